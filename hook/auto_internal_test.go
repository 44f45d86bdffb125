package hook

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/internal/testutil"
)

// A runtime in a user namespace bind-mounts device nodes of the host. Where config.json cannot be
// read, mounted nodes count, and nodes of the image do not.
func TestLaneAutoCountsMountedNodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: device nodes")
	}
	dir := t.TempDir()
	rootfs, node, ready := filepath.Join(dir, "rootfs"), filepath.Join(dir, "node"), filepath.Join(dir, "ready")
	err := errors.Join(
		os.MkdirAll(filepath.Join(rootfs, "dev"), 0o755),
		os.WriteFile(filepath.Join(rootfs, "dev/nvidia3"), nil, 0o644),
		unix.Mknod(
			node,
			unix.S_IFCHR|0o666,
			int(unix.Mkdev(gpuMajor, 3)),
		),
		unix.Mknod(filepath.Join(rootfs, "dev/nvidia4"), unix.S_IFCHR|0o666, int(unix.Mkdev(gpuMajor, 4))),
		os.Symlink(node, filepath.Join(rootfs, "dev/nvidia5")),
	)
	if err != nil {
		t.Fatal(err)
	}
	init := exec.Command(
		"unshare",
		"-m",
		"sh",
		"-c",
		`mount --bind "$0" "$1" && touch "$2" && exec sleep 1000000`,
		node,
		filepath.Join(rootfs, "dev/nvidia3"),
		ready,
	)
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := init.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = init.Wait() // killed above
	}()
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(ready); err == nil {
			break
		}
		if end.Over() {
			t.Fatal("the mount was not made")
		}
	}
	minors, err := gpuMinors(ocispec.RootOnly(rootfs), generation.Container{ID: "c", PID: init.Process.Pid}, rootfs)
	if err != nil || !slices.Equal(minors, []int{3}) {
		t.Errorf("GPUs of the container: %v, %v", minors, err)
	}
	// Where config.json is readable, mounts of config.json count.
	s := &ocispec.Spec{
		Mounts: []ocispec.Mount{
			{Destination: "/dev/nvidia0", Source: node},
			{Destination: "/dev/other", Source: node},
			{Destination: "/dev/nvidia1", Source: dir},
		},
	}
	if minors, err := gpuMinors(s, generation.Container{}, rootfs); err != nil || !slices.Equal(minors, []int{3}) {
		t.Errorf("mounted GPUs of the container: %v, %v", minors, err)
	}
}
