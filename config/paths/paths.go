// Package paths returns the paths of Peerlane's files on a host.
//
// Three trees have a common root: state (for root only: identities and plans), run (sockets; the
// only tree with mounts in containers) and configuration. Packages use "/"; tests and `peerlane
// demo` use private roots.
package paths

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
)

// Paths of the relay in a container. The names are a public interface: engines keep them in
// containers that run for months.
const (
	// ContainerDir is the directory on which the CDI specification mounts an empty anchor. The
	// hook attaches the socket directory over the anchor.
	ContainerDir = "/run/peerlane"
	// SocketName is the name of the relay's socket in ContainerDir and SocketDir.
	SocketName = "relay.sock"
	// TopologyName is the name of the topology file of the virtual switch, in NCCL's format,
	// beside the socket. Peerlane's NCCL plugin reads the file.
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

// IsDefault reports whether the root is that of installed packages.
func (l Layout) IsDefault() bool { return l.Root == "/" }

// State returns the tree for root only, mode 0700: plan, identities and administration sockets.
func (l Layout) State() string { return filepath.Join(l.Root, "var/lib/peerlane") }

// Run returns the tree of sockets.
func (l Layout) Run() string { return filepath.Join(l.Root, "run/peerlane") }

// Config returns the directory of the administrator's files.
func (l Layout) Config() string { return filepath.Join(l.Root, "etc/peerlane") }

// ConfigFile returns the path of the administrator's configuration, in TOML.
func (l Layout) ConfigFile() string { return filepath.Join(l.Config(), "config.toml") }

// GoodConfig returns the path of a copy of the last ConfigFile without a fault. While ConfigFile
// has a fault, the hook starts containers with the copy.
func (l Layout) GoodConfig() string { return filepath.Join(l.State(), "config.good.toml") }

// NCCLConf returns the path of NCCL's defaults for containers with a lane.
func (l Layout) NCCLConf() string { return filepath.Join(l.Config(), NCCLConfName) }

// PlanFile returns the path of the plan, which `cdi generate` writes and the hook reads.
func (l Layout) PlanFile() string { return filepath.Join(l.State(), "plan.json") }

// SelfTestFile returns the path of the self-test results of this boot.
func (l Layout) SelfTestFile() string { return filepath.Join(l.State(), "self-test.json") }

// SelfTestLock returns the path of the file that is locked during self-tests.
func (l Layout) SelfTestLock() string { return filepath.Join(l.State(), "self-test.lock") }

// Libraries returns the directory of the files that containers load, by the names that programs
// use: shared libraries, and a topology file for NCCL.
func (l Layout) Libraries() string { return filepath.Join(l.Root, "usr/lib/peerlane") }

// Generations returns the directory with a subdirectory for every running container, named by the
// 32 hexadecimal digits of the generation.
func (l Layout) Generations() string { return filepath.Join(l.State(), "generations") }

// UIDs returns the directory with a file for every uid of a relay. The file is a hard link of the
// lock of the generation's supervisor.
func (l Layout) UIDs() string { return filepath.Join(l.State(), "uids") }

// GenerationDir returns the directory with the state of a generation.
func (l Layout) GenerationDir(generation string) string {
	return filepath.Join(l.Generations(), generation)
}

// Sockets returns the parent of the socket directories, mode 0700.
func (l Layout) Sockets() string { return filepath.Join(l.Run(), "sockets") }

// SocketDir returns the directory of a generation that the hook mounts into the container. It
// contains only the socket SocketName and the files TopologyName and NCCLConfName.
func (l Layout) SocketDir(generation string) string {
	return filepath.Join(l.Sockets(), generation)
}

// Peers returns the directory of the sockets between the relays of a host.
func (l Layout) Peers() string { return filepath.Join(l.Run(), "peers") }

// PeerSocket returns the path of the socket at which other relays connect to this generation's
// relay.
func (l Layout) PeerSocket(generation string) string {
	return filepath.Join(l.Peers(), generation+".sock")
}

// Launcher returns the path of the socket of peerlane-relay.socket, through which systemd starts
// supervisors. Only root can connect.
func (l Layout) Launcher() string { return filepath.Join(l.Run(), "launcher.sock") }

// Cgroup returns the name of the control group, below the root of cgroup2, that has a group per
// generation. Layouts on one host have different groups.
func (l Layout) Cgroup() string {
	if l.IsDefault() {
		return "peerlane"
	}
	h := fnv.New32a()
	h.Write([]byte(l.Root)) // Write of a hash returns no error
	return fmt.Sprintf("peerlane-%08x", h.Sum32())
}

// Create creates the directories of a host with their modes, and corrects the modes of existing
// directories. Create is idempotent.
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
		// Every hook calls Create: change nothing if the directory is right.
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

// CreateState creates the directory of the state, if the directory is missing.
func (l Layout) CreateState() error { return directory(l.State(), stateMode) }

// stateMode denies users other than root access to the state, because a user can lock any file
// that the user can open.
const stateMode = 0o700

// directory creates a missing directory with a mode, with any umask. Missing parents are
// accessible to all users: /var/lib does not belong to Peerlane.
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
		return nil // another process created the directory first
	}
	if err != nil {
		return err
	}
	return os.Chmod(path, mode)
}
