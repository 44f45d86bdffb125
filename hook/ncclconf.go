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
// it, so an image committed from such a container works.
const ncclConfTarget = paths.ContainerDir + "/" + paths.NCCLConfName

// maxNCCLConf limits the size of NCCL's defaults in bytes.
const maxNCCLConf = 64 << 10

// sendChannels is the variable with the number of channels for sending to another rank; the hook
// sets eight in place of two. A channel sends some 20 GB/s between GPUs of one host, the rate of
// one SM. NCCL reads the variable before it loads a plugin, so Peerlane's plugin cannot set it.
const sendChannels = "NCCL_NCHANNELS_PER_NET_PEER"

const sendChannelsText = "\n# Added by Peerlane's hook: the container has one lane, which reaches only this host.\n" +
	sendChannels + "=8\n"

// addSendChannels adds sendChannels to the administrator's text, unless the text sets it, for a
// container with one lane that reaches only this host: there every other rank is behind the lane,
// and ranks are few. Between hosts, a NIC requires fewer than eight channels, and NCCL's number
// decreases with the number of ranks.
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

// reachesHostOnly reports whether the lanes of a generation reach only this host, with the rule of
// the supervisor: without a readable key, lanes reach only the host, and the supervisor logs the
// reason.
func reachesHostOnly(l paths.Layout, g *generation.Generation) bool {
	c := g.Config
	if c.Scope == launch.ScopeAuto {
		n, _ := hostnetwork.New(l, g.Network, g.Tenant, g.Rails, g.NetworkMemory)
		c.Network = n.Where
	}
	return c.Local()
}

// giveNCCLConf installs NCCL's defaults in a container: a copy of the administrator's file beside
// the relay's socket, and a symbolic link to the copy at /etc/nccl.conf unless the container has a
// file there. rootfs is as in Attach. An error does not stop the container.
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

// attachNCCLConf calls linkNCCLConf in the container of a generation.
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

// writeNCCLConf copies the administrator's file into the socket directory of a generation, with
// sendChannels for a local lane. written is false if the host has no such file.
func writeNCCLConf(l paths.Layout, g *generation.Generation) (written bool, err error) {
	fail := func(err error) (bool, error) {
		return false, fmt.Errorf("read NCCL's defaults for containers: %w", err)
	}
	if err := paths.CheckTrusted(l.NCCLConf()); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return fail(err)
	}
	text, err := ocispec.ReadBounded(l.NCCLConf(), maxNCCLConf)
	if err != nil {
		return fail(err)
	}
	if err := generation.WriteFile(l.SocketDir(g.ID), paths.NCCLConfName, addSendChannels(l, g, text)); err != nil {
		return false, fmt.Errorf("write NCCL's defaults for container %q: %w", g.Container.ID, err)
	}
	return true, nil
}

// linkNCCLConf makes the link in the mount namespace of init, which the calling thread enters.
// absent is the reason why the container has neither its own file nor the link.
//
// The image is hostile: the lookup of /etc stays in the root file system and enters no other
// mount, because a volume at /etc is a directory of the host. symlinkat follows no link and
// replaces nothing.
func linkNCCLConf(init *os.File, rootfs string) (absent string, err error) {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return "", os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(init.Fd()), unix.CLONE_NEWNS); err != nil {
		return "", fmt.Errorf("enter the container's mount namespace: %w", err)
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
		return "", fmt.Errorf("open /etc in the root file system %s: %w", rootfs, err)
	}
	defer unix.Close(dir)
	// With a user namespace, the link belongs to the container's root, like the rest of /etc: an
	// engine that commits the container then finds only ids that it can map.
	var etc unix.Stat_t
	if err := unix.Fstat(dir, &etc); err != nil {
		return "", os.NewSyscallError("fstat", err)
	}
	if etc.Uid != 0 || etc.Gid != 0 { // of this thread only, which ends
		if err := errors.Join(unix.Setfsgid(int(etc.Gid)), unix.Setfsuid(int(etc.Uid))); err != nil {
			return "", fmt.Errorf("set the owner of the container's /etc: %w", err)
		}
	}
	switch err := unix.Symlinkat(ncclConfTarget, dir, filepath.Base(generation.ContainerNCCLConf)); err {
	case nil, unix.EEXIST: // made now, or a file of the container, or the link of an earlier hook
		return "", nil
	case unix.EROFS:
		return "the container's root file system is read-only", nil
	default:
		return fmt.Sprintf("create a symbolic link in the container's /etc: %v", err), nil
	}
}
