// Package paths returns the paths of Peerlane's files on a host.
//
// Three trees have a common root: state (root only: identities and plans), run (sockets, the only
// tree of which containers get a mount) and configuration. Tests and `peerlane demo` use private
// roots; packages use "/".
package paths

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
)

// The paths of the relay in a container. Both names are a public interface: engines keep the
// names in containers that live for months.
const (
	// ContainerDir is the directory that the CDI specification mounts an empty
	// anchor on, and over which the hook attaches the socket directory.
	ContainerDir = "/run/peerlane"
	// SocketName is the relay's socket in ContainerDir and in SocketDir.
	SocketName = "relay.sock"
	// TopologyName is the topology file of the virtual switch, in NCCL's format, beside the
	// socket. Peerlane's plugin reads the file.
	TopologyName = "nccl-topology.xml"
	// NCCLConfName is the container's copy of Layout.NCCLConf, beside the socket: the hook links
	// the container's /etc/nccl.conf to the copy.
	NCCLConfName = "nccl.conf"
)

// Layout is the set of paths below a root.
type Layout struct{ Root string }

// New returns the layout below root; an empty root is "/".
func New(root string) Layout {
	if root == "" {
		root = "/"
	}
	return Layout{Root: filepath.Clean(root)}
}

// IsDefault reports whether the layout is that of an installed package.
func (l Layout) IsDefault() bool { return l.Root == "/" }

// State is the root-owned tree, mode 0700: plan, identities, administration sockets.
func (l Layout) State() string { return filepath.Join(l.Root, "var/lib/peerlane") }

// Run is the tree of sockets.
func (l Layout) Run() string { return filepath.Join(l.Root, "run/peerlane") }

// Config is the administrator's directory.
func (l Layout) Config() string { return filepath.Join(l.Root, "etc/peerlane") }

// ConfigFile is the administrator's configuration, TOML.
func (l Layout) ConfigFile() string { return filepath.Join(l.Config(), "config.toml") }

// GoodConfig is a copy of the last ConfigFile without a fault: the hook starts containers with
// the copy while ConfigFile has a fault.
func (l Layout) GoodConfig() string { return filepath.Join(l.State(), "config.good.toml") }

// NCCLConf has NCCL's defaults for containers with a lane.
func (l Layout) NCCLConf() string { return filepath.Join(l.Config(), NCCLConfName) }

// PlanFile is the path of the plan, which `cdi generate` writes and the hook reads.
func (l Layout) PlanFile() string { return filepath.Join(l.State(), "plan.json") }

// SelfTestFile holds the results of the tests of pairs of GPUs, of the present boot.
func (l Layout) SelfTestFile() string { return filepath.Join(l.State(), "self-test.json") }

// SelfTestLock is locked while pairs are tested.
func (l Layout) SelfTestLock() string { return filepath.Join(l.State(), "self-test.lock") }

// Libraries holds the files that containers load, by the names that programs use: shared
// libraries, and a topology file for NCCL.
func (l Layout) Libraries() string { return filepath.Join(l.Root, "usr/lib/peerlane") }

// Generations holds a directory for every running container, named by the generation's 32
// hexadecimal digits.
func (l Layout) Generations() string { return filepath.Join(l.State(), "generations") }

// UIDs holds a file for every uid of a relay: a second name of the lock of its generation's
// supervisor.
func (l Layout) UIDs() string { return filepath.Join(l.State(), "uids") }

// GenerationDir is the state of a generation.
func (l Layout) GenerationDir(generation string) string {
	return filepath.Join(l.Generations(), generation)
}

// Sockets is the 0700 parent of the socket directories.
func (l Layout) Sockets() string { return filepath.Join(l.Run(), "sockets") }

// SocketDir is the directory of a generation that is mounted into its container. The directory
// holds the socket SocketName, the files TopologyName and NCCLConfName, and nothing else.
func (l Layout) SocketDir(generation string) string {
	return filepath.Join(l.Sockets(), generation)
}

// Peers holds the sockets between the relays of a host.
func (l Layout) Peers() string { return filepath.Join(l.Run(), "peers") }

// PeerSocket is the socket at which relays connect to this generation's relay.
func (l Layout) PeerSocket(generation string) string {
	return filepath.Join(l.Peers(), generation+".sock")
}

// Launcher is the socket of peerlane-relay.socket, by which systemd starts
// supervisors; root only.
func (l Layout) Launcher() string { return filepath.Join(l.Run(), "launcher.sock") }

// Cgroup names the control group, below cgroup2's root, with a group per generation. Different
// layouts on one host have different groups.
func (l Layout) Cgroup() string {
	if l.IsDefault() {
		return "peerlane"
	}
	h := fnv.New32a()
	h.Write([]byte(l.Root)) // a hash's Write never fails
	return fmt.Sprintf("peerlane-%08x", h.Sum32())
}

// Create makes the directories that a host needs, with their modes, and corrects the modes of
// present directories. Create is idempotent.
func (l Layout) Create() error {
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{l.State(), stateMode},
		{l.Anchor(), anchorMode},
		{l.Generations(), 0o700},
		{l.UIDs(), 0o700},
		{l.Run(), 0o755},
		{l.Sockets(), 0o700},
		{l.Peers(), 0o711},
		{l.Config(), 0o755},
	} {
		// Every hook calls Create: change nothing if the directories are right.
		if info, err := os.Stat(d.path); err == nil && info.IsDir() && info.Mode().Perm() == d.mode &&
			info.Mode()&(os.ModeSetuid|os.ModeSetgid|os.ModeSticky) == 0 {
			continue
		}
		if err := directory(d.path, d.mode); err != nil {
			return err
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return err
		}
	}
	return nil
}

// CreateState makes the directory of the state, if it is missing.
func (l Layout) CreateState() error { return directory(l.State(), stateMode) }

// stateMode denies the state to users other than root: a user can lock any file that the user can
// open.
const stateMode = 0o700

// directory makes a missing directory with a mode, independent of the umask. Every user may pass
// missing parents: /var/lib does not belong to Peerlane.
func directory(path string, mode os.FileMode) error {
	info, err := os.Stat(path)
	switch {
	case err == nil && !info.IsDir():
		return fmt.Errorf("%s is not a directory; move it away", path)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := directory(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	err = os.Mkdir(path, mode)
	if errors.Is(err, fs.ErrExist) {
		return nil // another process created it first
	}
	if err != nil {
		return err
	}
	return os.Chmod(path, mode)
}
