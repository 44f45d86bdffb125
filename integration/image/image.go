// Package image makes the image of tests, with the test program and busybox, without a registry.
package image

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/internal/oci"
)

// Program is the path of the test program in the image.
const Program = "/usr/bin/test-peerlane"

// Image is an image of the running test program and busybox.
type Image struct {
	RootFS string // a directory
	Layer  string // path of a tar file
	OCI    string // an OCI image in a tar file
}

// In returns an image with files in dir, and writes no file.
func In(dir string) *Image {
	return &Image{RootFS: filepath.Join(dir, "rootfs"), Layer: filepath.Join(dir, "layer.tar"),
		OCI: filepath.Join(dir, "oci.tar")}
}

// Make makes an image with a name in dir. libraries are files that engines mount into containers:
// the image gets the dependencies of the libraries.
func Make(dir, name string, libraries ...string) (*Image, error) {
	i := In(dir)
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	files := []bundle.File{{Host: self, Container: Program},
		{Host: busybox, Container: "/usr/bin/busybox"}}
	if err := bundle.RootFS(i.RootFS, files, libraries...); err != nil {
		return nil, err
	}
	for name, text := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/:/bin/sh\ntrainer:x:1000:1000::/:/bin/sh\n",
		"etc/group":  "root:x:0:\ntrainer:x:1000:\n",
	} {
		if err := os.WriteFile(filepath.Join(i.RootFS, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"sh", "ls", "test", "sleep", "cat", "true"} {
		if err := os.Symlink("busybox", filepath.Join(i.RootFS, "usr/bin", name)); err != nil {
			return nil, err
		}
	}
	if err := os.Symlink("usr/bin", filepath.Join(i.RootFS, "bin")); err != nil {
		return nil, err
	}
	return i, i.Pack(name)
}

// Pack writes the layer and the OCI image of the directory RootFS.
func (i *Image) Pack(name string) error {
	layer, err := oci.Layer(i.RootFS, time.Time{})
	if err != nil {
		return err
	}
	if err := os.WriteFile(i.Layer, layer, 0o644); err != nil {
		return err
	}
	out, err := os.Create(i.OCI)
	if err != nil {
		return err
	}
	// The image also serves as the pause container of a pod, which must keep running.
	packed := oci.Image{Name: name, Architecture: runtime.GOARCH,
		Config: map[string]any{"Env": []string{"PATH=/usr/bin:/bin"}, "Cmd": []string{"/bin/sleep", "1000000"}}}
	return errors.Join(packed.WriteArchive(out, layer), out.Close())
}
