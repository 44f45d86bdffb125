package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
)

// containerNCCLConf is the file that NCCL reads last, after the environment,
// NCCL_CONF_FILE and ~/.nccl.conf. NCCL replaces no variable that is set.
const containerNCCLConf = "/etc/nccl.conf"

// ncclConfTarget is the target of the symbolic link that the hook makes at
// containerNCCLConf. Outside a container with a lane the link dangles, and NCCL
// ignores it: so an image that was committed from such a container works.
const ncclConfTarget = paths.ContainerDir + "/" + paths.NCCLConfName

// maxNCCLConf bounds NCCL's defaults, bytes.
const maxNCCLConf = 64 << 10

// sendChannels lets NCCL send to another rank by eight channels in place of two. A channel
// moves some 20 GB/s between GPUs of one host, which is what one SM copies. NCCL reads the
// variable before it loads a plugin, so that Peerlane's plugin cannot set it.
const sendChannels = "NCCL_NCHANNELS_PER_NET_PEER"

const sendChannelsText = "\n# Of Peerlane's hook: the container has one lane, which reaches only this host.\n" + sendChannels + "=8\n"

// addSendChannels adds sendChannels to the administrator's text, unless that sets it, for a
// container of one lane which reaches only this host: there every other rank is behind
// the lane, and ranks are few. Between hosts a NIC has fewer channels than eight to fill, and
// NCCL's number falls with the ranks.
func addSendChannels(l paths.Layout, g *Generation, text []byte) []byte {
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

// reachesHostOnly reports whether the lanes of a generation reach only this host, as its
// supervisor will find: without a key that can be read they do, and the supervisor logs the
// reason.
func reachesHostOnly(l paths.Layout, g *Generation) bool {
	c := g.Config
	if c.Scope == launch.ScopeAuto {
		n, _ := newNetworking(l, g.Network, g.Tenant, g.Rails, g.NetworkMemory)
		c.Network = n.where
	}
	return c.Local()
}

// giveNCCLConf gives a container NCCL's defaults: a copy of the administrator's file
// beside the relay's socket, and a symbolic link to it at /etc/nccl.conf if the
// container has nothing there. rootfs is as in Attach. An error stops no container.
func giveNCCLConf(l paths.Layout, g *Generation, rootfs string) error {
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
	return errors.Join(err, writeJSON(ncclConfFile(l, g.ID), linkedNCCLConf{Absent: absent}))
}

// attachNCCLConf is linkNCCLConf in the container of a generation.
func attachNCCLConf(g *Generation, rootfs string) (absent string, err error) {
	init, err := g.Init.open()
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
func writeNCCLConf(l paths.Layout, g *Generation) (written bool, err error) {
	fail := func(err error) (bool, error) {
		return false, fmt.Errorf("reading NCCL's defaults for containers: %w", err)
	}
	if err := paths.Trusted(l.NCCLConf()); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return fail(err)
	}
	text, err := readBounded(l.NCCLConf(), maxNCCLConf)
	if err != nil {
		return fail(err)
	}
	if err := replace(l.SocketDir(g.ID), paths.NCCLConfName, addSendChannels(l, g, text)); err != nil {
		return false, fmt.Errorf("writing NCCL's defaults for container %q: %w", g.Container.ID, err)
	}
	return true, nil
}

// replace writes a file that everybody may read: a reader has the old file or the
// new one, whole.
func replace(dir, name string, text []byte) error {
	f, err := os.CreateTemp(dir, "."+name+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}

// linkNCCLConf makes the link in the mount namespace of init, which the calling
// thread enters. absent says why the container has neither a file of its own nor
// the link.
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
	dir, err := openIn(root, filepath.Dir(containerNCCLConf), unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_XDEV)
	switch err {
	case nil:
	case unix.ENOENT:
		return "the container has no directory /etc", nil
	case unix.EXDEV:
		return "/etc of the container is a mount, and Peerlane changes no volume", nil
	case unix.ENOTDIR, unix.ELOOP:
		return "/etc of the container is no directory", nil
	default:
		return "", fmt.Errorf("opening /etc in the root file system %s: %w", rootfs, err)
	}
	defer unix.Close(dir)
	// With a user namespace the container's root owns the link, as the rest of /etc:
	// an engine that commits the container finds no id that it cannot map.
	var etc unix.Stat_t
	if err := unix.Fstat(dir, &etc); err != nil {
		return "", os.NewSyscallError("fstat", err)
	}
	if etc.Uid != 0 || etc.Gid != 0 { // of this thread alone, which ends
		if err := errors.Join(unix.Setfsgid(int(etc.Gid)), unix.Setfsuid(int(etc.Uid))); err != nil {
			return "", fmt.Errorf("taking the owner of the container's /etc: %w", err)
		}
	}
	switch err := unix.Symlinkat(ncclConfTarget, dir, filepath.Base(containerNCCLConf)); err {
	case nil, unix.EEXIST: // of the container, or an earlier hook's
		return "", nil
	case unix.EROFS:
		return "the container's root file system cannot be written", nil
	default:
		return fmt.Sprintf("making a symbolic link in the container's /etc: %v", err), nil
	}
}

// openIn opens a path as a process sees it whose root directory is root: no
// symbolic link leads out of it.
func openIn(root int, path string, flags, resolve uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | resolve}
	// EAGAIN: something was renamed meanwhile.
	fd, err = -1, unix.EAGAIN
	for try := 0; try < 100 && (err == unix.EAGAIN || err == unix.EINTR); try++ {
		fd, err = unix.Openat2(root, strings.TrimPrefix(path, "/"), &how)
	}
	return fd, err
}

// linkedNCCLConf is what the hook writes down for NCCLConf.
type linkedNCCLConf struct {
	// Absent says why the hook made no link, although the container has no file.
	Absent string `json:"absent,omitempty"`
}

func ncclConfFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "nccl-conf.json")
}

// Files that can be a container's /etc/nccl.conf.
const (
	NCCLConfPeerlane  = "peerlane"  // the copy of the administrator's file
	NCCLConfContainer = "container" // a file of the image or of a volume
	NCCLConfNone      = "none"
)

// NCCLConf says where NCCL in a container has its variables from.
type NCCLConf struct {
	// File is which file /etc/nccl.conf is: NCCLConfPeerlane, NCCLConfContainer or
	// NCCLConfNone.
	File string `json:"file"`
	// Reason says why it is NCCLConfNone.
	Reason string `json:"reason,omitempty"`
	// Environment are the variables of the container's configuration by which another
	// file or another network comes first, "NAME=value".
	Environment []string `json:"environment"`
}

// ncclBefore are variables that come before /etc/nccl.conf.
var ncclBefore = []string{"NCCL_CONF_FILE", "NCCL_NET", "NCCL_NET_PLUGIN"}

// ncclConf looks at a container that runs.
func ncclConf(l paths.Layout, info Info) NCCLConf {
	c := NCCLConf{File: NCCLConfNone, Environment: []string{}}
	if spec, err := readSpec(info.Container.Bundle); err == nil {
		for _, e := range spec.Process.Env {
			if name, _, _ := strings.Cut(e, "="); slices.Contains(ncclBefore, name) {
				c.Environment = append(c.Environment, e)
			}
		}
	}
	if !info.Alive {
		c.Reason = "the container has ended"
		return c
	}
	found, err := statIn(info.Init.PID, containerNCCLConf)
	if err == nil {
		c.File = NCCLConfContainer
		copied, err := os.Stat(filepath.Join(l.SocketDir(info.ID), paths.NCCLConfName))
		if err == nil && os.SameFile(found, copied) {
			c.File = NCCLConfPeerlane
		}
		return c
	}
	var hook linkedNCCLConf
	switch read := readJSON(ncclConfFile(l, info.ID), &hook); {
	case !errors.Is(err, fs.ErrNotExist):
		c.Reason = err.Error()
	case errors.Is(read, fs.ErrNotExist):
		c.Reason = fmt.Sprintf("the host had no %s when the container started", l.NCCLConf())
	case hook.Absent != "":
		c.Reason = hook.Absent
	default:
		c.Reason = "it was removed in the container, or is a symbolic link that leads nowhere"
	}
	return c
}

// statIn looks at a file of a process's root file system as that process sees it.
func statIn(pid int, path string) (os.FileInfo, error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the container's root directory: %w", err)
	}
	defer unix.Close(root)
	fd, err := openIn(root, path, unix.O_PATH, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	return f.Stat()
}
