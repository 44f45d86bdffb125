// Package image makes the image of tests, which has the test program and busybox, without a registry.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
)

// Program is the path of the test program in the image.
const Program = "/usr/bin/test-peerlane"

// Image is an image of the running test program and busybox.
type Image struct {
	RootFS string // a directory
	Layer  string // path of a tar file
	OCI    string // an OCI image in a tar file
}

// In returns an image whose files are in dir. Nothing is written.
func In(dir string) *Image {
	return &Image{RootFS: filepath.Join(dir, "rootfs"), Layer: filepath.Join(dir, "layer.tar"),
		OCI: filepath.Join(dir, "oci.tar")}
}

// Make makes an image with a name in dir. libraries are files that will be mounted into containers:
// the image gets the libraries that they need.
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
	if err := writeLayer(i.RootFS, i.Layer); err != nil {
		return err
	}
	return writeOCI(i.Layer, i.OCI, name)
}

func writeLayer(rootfs, path string) error {
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	err = filepath.WalkDir(rootfs, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(rootfs, file)
		if err != nil || name == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(file); err != nil {
				return err
			}
		}
		header, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		header.Name = name
		if err := w.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
			return err
		}
		in, err := os.Open(file)
		if err != nil {
			return err
		}
		defer in.Close()
		_, err = io.Copy(w, in)
		return err
	})
	if err != nil {
		return err
	}
	return w.Close()
}

// writeOCI packs a layer into an image, by the OCI image specification.
func writeOCI(layer, path, name string) error {
	blob, err := os.ReadFile(layer)
	if err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	add := func(name string, text []byte) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)),
			ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
		_, err := io.Copy(w, bytes.NewReader(text))
		return err
	}
	type object map[string]any
	addBlob := func(kind string, text []byte) (object, error) {
		digest := fmt.Sprintf("%x", sha256.Sum256(text))
		return object{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + digest, "size": len(text)},
			add("blobs/sha256/"+digest, text)
	}
	addJSON := func(kind string, value object) (object, error) {
		text, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		return addBlob(kind, text)
	}
	layerAt, err := addBlob("layer.v1.tar", blob)
	if err != nil {
		return err
	}
	// The image also serves as the pause container of a pod, which must keep running.
	configAt, err := addJSON("config.v1+json", object{
		"architecture": "amd64", "os": "linux",
		"config": object{"Env": []string{"PATH=/usr/bin:/bin"}, "Cmd": []string{"/bin/sleep", "1000000"}},
		"rootfs": object{"type": "layers", "diff_ids": []any{layerAt["digest"]}},
	})
	if err != nil {
		return err
	}
	manifestAt, err := addJSON("manifest.v1+json", object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": configAt,
		"layers": []object{layerAt},
	})
	if err != nil {
		return err
	}
	manifestAt["annotations"] = object{"io.containerd.image.name": name,
		"org.opencontainers.image.ref.name": name}
	index, err := json.Marshal(object{"schemaVersion": 2, "manifests": []object{manifestAt}})
	if err != nil {
		return err
	}
	if err := add("index.json", index); err != nil {
		return err
	}
	if err := add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	return w.Close()
}
