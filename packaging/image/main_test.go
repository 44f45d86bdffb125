package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"
)

// rootfs returns a root file system with a program.
func rootfs(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	program := filepath.Join(root, "usr/bin/peerlane-kubelet")
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

// blobs returns the regular files of the archive by name.
func blobs(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			files[filepath.Clean(h.Name)] = text
		}
	}
}

// decode parses a JSON file of the archive.
func decode(t *testing.T, files map[string][]byte, name string, value any) {
	t.Helper()
	if err := json.Unmarshal(files[name], value); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// descriptor refers to a blob.
type descriptor struct {
	Digest      string
	Annotations map[string]string
}

func (d descriptor) blob() string { return filepath.Join("blobs/sha256", d.Digest[len("sha256:"):]) }

func TestWriteImageHasNameEntrypointAndFiles(t *testing.T) {
	out, at := t.TempDir(), time.Unix(1790000000, 0)
	if err := write("localhost/peerlane-kubelet:1.0", rootfs(t), out, at); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(filepath.Join(out, "image.tar"))
	if err != nil {
		t.Fatal(err)
	}
	files := blobs(t, archive)
	for name, text := range files {
		if layout, err := os.ReadFile(filepath.Join(out, "image", name)); err != nil || !bytes.Equal(layout, text) {
			t.Errorf("%s differs between the folder and the archive: %v", name, err)
		}
	}
	var index struct{ Manifests []descriptor }
	decode(t, files, "index.json", &index)
	if len(index.Manifests) != 1 {
		t.Fatalf("%d manifests", len(index.Manifests))
	}
	named := false
	for _, name := range index.Manifests[0].Annotations {
		named = named || name == "localhost/peerlane-kubelet:1.0"
	}
	if !named {
		t.Errorf("the annotations are %v", index.Manifests[0].Annotations)
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	decode(t, files, index.Manifests[0].blob(), &manifest)
	var config struct {
		Architecture string
		Created      time.Time
		Config       struct{ Entrypoint, Env []string }
	}
	decode(t, files, manifest.Config.blob(), &config)
	if config.Architecture != runtime.GOARCH || !config.Created.Equal(at) ||
		!slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/peerlane-kubelet"}) ||
		!slices.Equal(config.Config.Env, []string{"PATH=/usr/bin"}) {
		t.Errorf("the configuration is %+v", config)
	}
	if len(manifest.Layers) != 1 || files[manifest.Layers[0].blob()] == nil {
		t.Errorf("the layers are %+v", manifest.Layers)
	}
}

func TestWriteEqualFilesGivesEqualArchives(t *testing.T) {
	var archives [2][]byte
	for i := range archives {
		out := t.TempDir()
		if err := write("localhost/x:1", rootfs(t), out, time.Unix(1e9, 0)); err != nil {
			t.Fatal(err)
		}
		var err error
		if archives[i], err = os.ReadFile(filepath.Join(out, "image.tar")); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the archives differ")
	}
}

func TestWriteAgainRemovesBlobsOfTheEarlierImage(t *testing.T) {
	out := t.TempDir()
	stale := filepath.Join(out, "image/blobs/sha256/stale")
	if err := errors.Join(os.MkdirAll(filepath.Dir(stale), 0o755), os.WriteFile(stale, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := write("localhost/x:1", rootfs(t), out, time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a blob of the earlier image: %v", err)
	}
}

func TestWriteAbsentRootKeepsTheEarlierImage(t *testing.T) {
	out := t.TempDir()
	if err := write("localhost/x:1", rootfs(t), out, time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(filepath.Join(out, "image.tar"))
	if err != nil {
		t.Fatal(err)
	}
	if err := write("localhost/x:2", filepath.Join(out, "absent"), out, time.Unix(0, 0)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	after, err := os.ReadFile(filepath.Join(out, "image.tar"))
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the earlier archive is changed: %v", err)
	}
	if _, err := os.Stat(filepath.Join(out, "image/index.json")); err != nil {
		t.Error(err)
	}
}

func TestWriteWithoutOutputFolderFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var path *fs.PathError
	if err := write("localhost/x:1", rootfs(t), file, time.Unix(0, 0)); !errors.As(err, &path) {
		t.Errorf("%v", err)
	}
}
