package bundle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Runtime is a low-level OCI runtime.
type Runtime struct {
	// Name is runc or crun.
	Name string
	path string
	// State is the runtime's own directory (--root).
	State string
	// Before is a program with arguments that runs the runtime; nil for none. The runtime's
	// arguments follow the program's arguments.
	Before []string
}

// FindRuntime finds a runtime by name in PATH, or by path.
func FindRuntime(name, state string) (*Runtime, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("the OCI runtime %s is not installed: %w; install the package %s, or choose another by "+
			"--runtime", name, err, filepath.Base(name))
	}
	return &Runtime{Name: filepath.Base(path), path: path, State: state}, nil
}

// Path returns the path of the runtime's program.
func (r *Runtime) Path() string { return r.path }

// Command returns the runtime's command with these arguments.
func (r *Runtime) Command(ctx context.Context, arguments ...string) *exec.Cmd {
	path, arguments := r.path, append([]string{"--root", r.State}, arguments...)
	if r.Before != nil {
		path, arguments = r.Before[0], slices.Concat(r.Before[1:], arguments)
	}
	if r.Name == "crun" && hybridControllers() {
		// crun refuses hosts whose cgroup v2 hierarchy has controllers beside v1 controllers. A
		// mount namespace without the v2 hierarchy lets crun use v1. Other mounts stay shared, as
		// without the script.
		script := `mount --make-rprivate /sys/fs/cgroup && umount /sys/fs/cgroup/unified && exec "$@"`
		arguments = append([]string{"-m", "--propagation", "unchanged", "sh", "-c", script, "sh", path}, arguments...)
		return exec.CommandContext(ctx, "unshare", arguments...)
	}
	return exec.CommandContext(ctx, path, arguments...)
}

func hybridControllers() bool {
	controllers, err := os.ReadFile("/sys/fs/cgroup/unified/cgroup.controllers")
	return err == nil && len(bytes.TrimSpace(controllers)) > 0
}

// Run returns the command `run`, which ends with the container.
func (r *Runtime) Run(ctx context.Context, b *Bundle, id string) *exec.Cmd {
	return r.Command(ctx, "run", "--bundle", b.Dir, id)
}

// Kill sends a signal to a container's init.
func (r *Runtime) Kill(ctx context.Context, id, signal string) error {
	return r.do(ctx, &bytes.Buffer{}, "kill", id, signal)
}

// Delete removes a container in any state. A missing container is no error.
func (r *Runtime) Delete(ctx context.Context, id string) error {
	// After the end of init, `run` removes the container as well, and either command may find a
	// half-removed container.
	var err error
	for range 20 {
		var stderr bytes.Buffer
		if err = r.do(ctx, &stderr, "delete", "--force", id); err == nil {
			// crun 1.8 waits for about a second until killed processes have left their cgroups,
			// then reports an error, and leaves the cgroups.
			if strings.Contains(stderr.String(), "cannot destroy subsystem") {
				err = removeGroups(ctx, id)
			}
			return err
		}
		if _, gone := os.Stat(filepath.Join(r.State, id)); errors.Is(gone, fs.ErrNotExist) {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

// removeGroups removes a container's cgroups after the last process has left.
func removeGroups(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var groups []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // removed by the runtime in between
		case err != nil:
			return err
		case d.IsDir() && d.Name() == id:
			groups = append(groups, path)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, group := range groups {
		for {
			err := unix.Rmdir(group)
			if err == nil || err == unix.ENOENT {
				break
			}
			if err != unix.EBUSY || ctx.Err() != nil {
				return &os.PathError{Op: "rmdir", Path: group, Err: err}
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	return nil
}

func (r *Runtime) do(ctx context.Context, stderr *bytes.Buffer, arguments ...string) error {
	c := r.Command(ctx, arguments...)
	c.Stderr = stderr
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", r.Name, strings.Join(arguments, " "),
			errors.Join(err, errors.New(strings.TrimSpace(stderr.String()))))
	}
	return nil
}
