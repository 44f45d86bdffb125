// Package oci writes images in the format of the OCI image specification, without a daemon or a
// registry. Equal files give equal bytes.
package oci

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Image is an image with one layer.
type Image struct {
	// Name is the reference of the image, such as localhost/peerlane:1.
	Name string
	// Architecture is the processor, a value of GOARCH.
	Architecture string
	// Config is the field config of the image's configuration.
	Config map[string]any
	// Time is the creation time in the image's configuration; the zero time is omitted.
	Time time.Time
}

// file is a file of a layout.
type file struct {
	name string
	text []byte
}

// Layer returns a tar of the files of a directory. All files belong to root.
func Layer(rootfs string, at time.Time) ([]byte, error) {
	if at.IsZero() {
		at = time.Unix(0, 0)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	err := filepath.WalkDir(rootfs, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(rootfs, path)
		if err != nil || name == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(path); err != nil {
				return err
			}
		}
		header, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		*header = tar.Header{Typeflag: header.Typeflag, Name: name, Linkname: header.Linkname, Size: header.Size,
			Mode: header.Mode, ModTime: at, Format: tar.FormatPAX}
		if info.IsDir() {
			header.Name += "/"
		}
		if err := w.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	})
	if err == nil {
		err = w.Close()
	}
	return out.Bytes(), err
}

// files returns the files of the image's layout, the blobs before the index that names the blobs.
func (i Image) files(layer []byte) ([]file, error) {
	type object map[string]any
	var files []file
	blob := func(kind string, text []byte) object {
		digest := fmt.Sprintf("%x", sha256.Sum256(text))
		files = append(files, file{"blobs/sha256/" + digest, text})
		return object{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + digest, "size": len(text)}
	}
	layerAt := blob("layer.v1.tar", layer)
	config := object{
		"architecture": i.Architecture, "os": "linux", "config": i.Config,
		"rootfs": object{"type": "layers", "diff_ids": []any{layerAt["digest"]}},
	}
	if !i.Time.IsZero() {
		config["created"] = i.Time.UTC().Format(time.RFC3339)
	}
	text, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	text, err = json.Marshal(object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": blob("config.v1+json", text), "layers": []object{layerAt},
	})
	if err != nil {
		return nil, err
	}
	manifestAt := blob("manifest.v1+json", text)
	manifestAt["platform"] = object{"architecture": i.Architecture, "os": "linux"}
	manifestAt["annotations"] = object{"io.containerd.image.name": i.Name, "org.opencontainers.image.ref.name": i.Name}
	text, err = json.Marshal(object{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
		"manifests": []object{manifestAt}})
	return append(files, file{"index.json", text}, file{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}), err
}

// WriteArchive writes the image with a layer as a tar of an OCI layout, which ctr, podman and skopeo
// read.
func (i Image) WriteArchive(out io.Writer, layer []byte) error {
	files, err := i.files(layer)
	if err != nil {
		return err
	}
	w := tar.NewWriter(out)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.text)),
			ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
		if _, err := w.Write(f.text); err != nil {
			return err
		}
	}
	return w.Close()
}

// WriteLayout writes the image with a layer as an OCI layout, a directory.
func (i Image) WriteLayout(dir string, layer []byte) error {
	files, err := i.files(layer)
	if err != nil {
		return err
	}
	for _, f := range files {
		path := filepath.Join(dir, f.name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
