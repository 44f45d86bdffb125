package control

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
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/openat2"
)

// Values of NCCLConf.File.
const (
	NCCLConfPeerlane  = "peerlane"  // the copy of the administrator's file
	NCCLConfContainer = "container" // a file of the image or of a volume
	NCCLConfNone      = "none"
)

// NCCLConf is the source of NCCL's variables in a container.
type NCCLConf struct {
	// File is the origin of /etc/nccl.conf: NCCLConfPeerlane, NCCLConfContainer or NCCLConfNone.
	File string `json:"file"`
	// Reason is the reason for NCCLConfNone.
	Reason string `json:"reason,omitempty"`
	// Environment are the variables of the container's configuration ("NAME=value") that select
	// another file or another network first.
	Environment []string `json:"environment"`
}

// ncclBefore are the variables with precedence over /etc/nccl.conf.
var ncclBefore = []string{"NCCL_CONF_FILE", "NCCL_NET", "NCCL_NET_PLUGIN"}

// ncclConf examines a running container.
func ncclConf(l paths.Layout, info generation.Info) NCCLConf {
	c := NCCLConf{File: NCCLConfNone, Environment: []string{}}
	if spec, err := ocispec.Read(info.Container.Bundle); err == nil {
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
	found, err := statIn(info.Init.PID, generation.ContainerNCCLConf)
	if err == nil {
		c.File = NCCLConfContainer
		copied, err := os.Stat(filepath.Join(l.SocketDir(info.ID), paths.NCCLConfName))
		if err == nil && os.SameFile(found, copied) {
			c.File = NCCLConfPeerlane
		}
		return c
	}
	var hook generation.NCCLConfRecord
	switch read := generation.ReadJSON(generation.NCCLConfFile(l, info.ID), &hook); {
	case !errors.Is(err, fs.ErrNotExist):
		c.Reason = err.Error()
	case errors.Is(read, fs.ErrNotExist):
		c.Reason = fmt.Sprintf("the host had no %s when the container started", l.NCCLConf())
	case hook.Absent != "":
		c.Reason = hook.Absent
	default:
		c.Reason = "the file was removed in the container, or is a dangling symbolic link"
	}
	return c
}

// statIn stats a file as a process with another root directory sees it.
func statIn(pid int, path string) (os.FileInfo, error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the container's root directory: %w", err)
	}
	defer unix.Close(root)
	fd, err := openat2.InRoot(root, path, unix.O_PATH, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	return f.Stat()
}
