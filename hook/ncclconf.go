package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/hostnetwork"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/openat2"
	"github.com/peerlane/peerlane/relay/launch"
)

// ncclConfTarget is the target of the symbolic link that the hook makes at
// generation.ContainerNCCLConf. Outside a container with a lane the link dangles, and NCCL ignores
// it, so an image that was committed from such a container works.
const ncclConfTarget = paths.ContainerDir + "/" + paths.NCCLConfName

// maxNCCLConf limits the size of NCCL's defaults in bytes.
const maxNCCLConf = 64 << 10

// sendChannels makes NCCL send to another rank by eight channels instead of two. A channel moves
// some 20 GB/s between GPUs of one host, the rate of one SM. NCCL reads the variable before loading
// a plugin, so Peerlane's plugin cannot set it.
const sendChannels = "NCCL_NCHANNELS_PER_NET_PEER"

const sendChannelsText = "\n# Added by Peerlane's hook: the container has one lane, which reaches only this host.\n" +
	sendChannels + "=8\n"

// addSendChannels adds sendChannels to the administrator's text, unless set there, for a
// container of one lane which reaches only this host: there every other rank is behind the lane,
// and ranks are few. Between hosts a NIC has fewer channels than eight to fill, and NCCL's number
// falls with the ranks.
func addSendChannels(l paths.Layout, g *generation.Generation, text []byte) []byte {
	if len(g.Config.Lanes) != 1 || setsSendChannels(text) || !reachesHostOnly(l, g) {
		return text
	}
	return append(text, sendChannelsText...)
}

// setsSendChannels reports whether a line of text, other than a comment, sets sendChannels.
func setsSendChannels(text []byte) bool {
	for line := range strings.Lines(string(text)) {
		if name, _, _ := strings.Cut(line, "="); strings.TrimSpace(name) == sendChannels {
			return true
		}
	}
	return false
}

// reachesHostOnly reports whether the lanes of a generation reach only this host, by the
// supervisor's rule: without a readable key, lanes reach the host only, and the supervisor logs
// the reason.
func reachesHostOnly(l paths.Layout, g *generation.Generation) bool {
	c := g.Config
	if c.Scope == launch.ScopeAuto {
		n, _ := hostnetwork.New(l, g.Network, g.Tenant, g.Rails, g.NetworkMemory)
		c.Network = n.Where
	}
	return c.Local()
}

// giveNCCLConf installs NCCL's defaults in a container: a copy of the administrator's file beside
// the relay's socket, and a symbolic link to it at /etc/nccl.conf if the container has nothing
// there. rootfs is as in Attach. An error stops no container.
func giveNCCLConf(l paths.Layout, g *generation.Generation, rootfs string) error {
	written, err := writeNCCLConf(l, g)
	if err == nil && !written {
		return nil
	}
	var absent string
	if err == nil {
		absent, err = attachNCCLConf(g, rootfs)
	}
	if err != nil {
		absent = err.Error()
	}
	return errors.Join(
		err,
		generation.WriteJSON(generation.NCCLConfFile(l, g.ID), generation.NCCLConfRecord{Absent: absent}),
	)
}

// attachNCCLConf is linkNCCLConf in the container of a generation.
func attachNCCLConf(g *generation.Generation, rootfs string) (absent string, err error) {
	init, err := g.Init.Open()
	if err != nil {
		return "", err
	}
	defer init.Close()
	err = onDisposableThread(func() (err error) {
		absent, err = linkNCCLConf(init, rootfs)
		return err
	})
	return absent, err
}

// writeNCCLConf copies the administrator's file into the socket directory of a
// generation, with the channels of a local lane. It reports false if the host has no such file.
func writeNCCLConf(l paths.Layout, g *generation.Generation) (written bool, err error) {
	fail := func(err error) (bool, error) {
		return false, fmt.Errorf("reading NCCL's defaults for containers: %w", err)
	}
	if err := paths.Trusted(l.NCCLConf()); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return fail(err)
	}
	text, err := ocispec.ReadBounded(l.NCCLConf(), maxNCCLConf)
	if err != nil {
		return fail(err)
	}
	if err := generation.WriteFile(l.SocketDir(g.ID), paths.NCCLConfName, addSendChannels(l, g, text)); err != nil {
		return false, fmt.Errorf("writing NCCL's defaults for container %q: %w", g.Container.ID, err)
	}
	return true, nil
}

// linkNCCLConf makes the link in the mount namespace of init, which the calling thread enters.
// absent is the reason why the container has neither its own file nor the link.
//
// The image is hostile: the lookup of /etc stays in the root file system and enters
// no other mount, because a volume at /etc is a directory of the host's. symlinkat
// follows no link and replaces nothing.
func linkNCCLConf(init *os.File, rootfs string) (absent string, err error) {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return "", os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(init.Fd()), unix.CLONE_NEWNS); err != nil {
		return "", fmt.Errorf("entering the container's mount namespace: %w", err)
	}
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &os.PathError{Op: "open", Path: rootfs, Err: err}
	}
	defer unix.Close(root)
	dir, err := openat2.InRoot(
		root,
		filepath.Dir(generation.ContainerNCCLConf),
		unix.O_PATH|unix.O_DIRECTORY,
		unix.RESOLVE_NO_XDEV,
	)
	switch err {
	case nil:
	case unix.ENOENT:
		return "the container has no directory /etc", nil
	case unix.EXDEV:
		return "/etc of the container is a mount, and Peerlane does not change volumes", nil
	case unix.ENOTDIR, unix.ELOOP:
		return "/etc of the container is not a directory", nil
	default:
		return "", fmt.Errorf("opening /etc in the root file system %s: %w", rootfs, err)
	}
	defer unix.Close(dir)
	// With a user namespace the container's root owns the link, as the rest of /etc: an engine
	// that commits the container then finds only ids that it can map.
	var etc unix.Stat_t
	if err := unix.Fstat(dir, &etc); err != nil {
		return "", os.NewSyscallError("fstat", err)
	}
	if etc.Uid != 0 || etc.Gid != 0 { // only of this thread, which ends
		if err := errors.Join(unix.Setfsgid(int(etc.Gid)), unix.Setfsuid(int(etc.Uid))); err != nil {
			return "", fmt.Errorf("taking the owner of the container's /etc: %w", err)
		}
	}
	switch err := unix.Symlinkat(ncclConfTarget, dir, filepath.Base(generation.ContainerNCCLConf)); err {
	case nil, unix.EEXIST: // of the container, or of an earlier hook
		return "", nil
	case unix.EROFS:
		return "the container's root file system is read-only", nil
	default:
		return fmt.Sprintf("making a symbolic link in the container's /etc: %v", err), nil
	}
}
