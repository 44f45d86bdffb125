//go:build engines

package engines

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
)

// bare is an OCI runtime without an engine: the test creates bundles, and injects devices with the
// CDI library.
type bare struct {
	bed  *bed
	path string
}

func ociRuntime(version string, path func() string) func(*bed) engine {
	return func(b *bed) engine {
		b.mkdir("bundles")
		b.mkdir("runtime")
		b.mustBe(version, path(), "--version")
		return &bare{b, path()}
	}
}

func (r *bare) bundle(c container) (dir string, err error) {
	dir = filepath.Join(r.bed.Root, "bundles", c.name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	b := bundle.New(dir, c.command()...)
	b.Spec.Root = &specs.Root{Path: r.bed.image.RootFS, Readonly: c.readOnly}
	if !c.readOnly {
		// Containers write to a separate layer.
		b.Spec.Root.Path = filepath.Join(dir, "rootfs")
		if err := os.CopyFS(b.Spec.Root.Path, os.DirFS(r.bed.image.RootFS)); err != nil {
			return "", err
		}
	}
	if c.user {
		b.Spec.Process.User = specs.User{UID: 1000, GID: 1000}
	}
	if c.userNS {
		ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
		b.Spec.Linux.Namespaces = append(b.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		b.Spec.Linux.UIDMappings, b.Spec.Linux.GIDMappings = ids, ids
		if err := filepath.WalkDir(b.Spec.Root.Path, func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, 100000, 100000))
		}); err != nil {
			return "", err
		}
	}
	if c.memory > 0 {
		b.Spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &c.memory}
	}
	if err := b.Inject(r.bed.CDIDir(), c.devices...); err != nil {
		return "", err
	}
	return dir, b.Write()
}

func (r *bare) do(ctx context.Context, arguments ...string) error {
	return r.bed.ground.do(ctx, append([]string{r.path, "--root", r.bed.RuntimeState()}, arguments...)...)
}

func (r *bare) run(ctx context.Context, c container) error {
	dir, err := r.bundle(c)
	if err != nil {
		return err
	}
	err = r.do(ctx, "run", "--bundle", dir, c.name)
	return errors.Join(err, os.RemoveAll(dir))
}

func (r *bare) start(ctx context.Context, c container) error {
	dir, err := r.bundle(c)
	if err != nil {
		return err
	}
	return r.again(ctx, dir, c)
}

func (r *bare) again(ctx context.Context, dir string, c container) error {
	// The output goes to a file that outlives the runtime and blocks no reader.
	return r.bed.ground.do(ctx, "sh", "-c", `exec "$@" >"$0" 2>&1 </dev/null`, filepath.Join(dir, "output"),
		r.path, "--root", r.bed.RuntimeState(), "run", "--detach", "--bundle", dir, c.name)
}

func (r *bare) restart(ctx context.Context, c container) error {
	if err := r.end(ctx, c); err != nil {
		return err
	}
	return r.again(ctx, filepath.Join(r.bed.Root, "bundles", c.name), c)
}

// end ends and deletes the runtime's container, if any.
func (r *bare) end(ctx context.Context, c container) error {
	for {
		err := r.do(ctx, "delete", "--force", c.name)
		if err == nil || strings.Contains(err.Error(), "does not exist") ||
			strings.Contains(err.Error(), "No such file or directory") {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("delete container %s: %w", c.name, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (r *bare) remove(ctx context.Context, c container) error {
	return errors.Join(r.end(ctx, c), os.RemoveAll(filepath.Join(r.bed.Root, "bundles", c.name)))
}

func (r *bare) exec(ctx context.Context, c container, command ...string) error {
	return r.do(ctx, append([]string{"exec", c.name}, command...)...)
}

func (r *bare) pause(ctx context.Context, c container) error   { return r.do(ctx, "pause", c.name) }
func (r *bare) unpause(ctx context.Context, c container) error { return r.do(ctx, "resume", c.name) }

func (r *bare) update(ctx context.Context, c container) error {
	return r.do(ctx, "update", "--pids-limit", "500", c.name)
}

func (r *bare) checkpoint(ctx context.Context, c container, dir string) error {
	return r.do(ctx, "checkpoint", "--image-path", dir, "--work-path", dir, c.name)
}
