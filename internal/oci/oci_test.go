package oci

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func made(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin/program"), []byte("program"), 0o711); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(root, "bin/program"), 0o711); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("program", filepath.Join(root, "bin/link")); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestLayerHasFilesOfRootWithTheirModes(t *testing.T) {
	at := time.Unix(1e9, 0)
	layer, err := Layer(made(t), at)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || !h.ModTime.Equal(at) {
			t.Errorf("%s belongs to %d:%d (%q), time %v", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got += fmt.Sprintf("%s %o %s%s\n", h.Name, h.Mode, h.Linkname, text)
	}
	if want := "bin/ 755 \nbin/link 777 program\nbin/program 711 program\n"; got != want {
		t.Errorf("the layer has\n%s, expected\n%s", got, want)
	}
}

func TestLayoutOfEqualFilesIsEqualAndItsDigestsAreThoseOfItsBlobs(t *testing.T) {
	i := Image{Name: "localhost/x:1", Architecture: "amd64", Config: map[string]any{"User": "0"}, Time: time.Unix(1e9, 0)}
	var archives [2]bytes.Buffer
	dir := t.TempDir()
	for n := range archives {
		layer, err := Layer(made(t), i.Time)
		if err != nil {
			t.Fatal(err)
		}
		if err := i.WriteArchive(&archives[n], layer); err != nil {
			t.Fatal(err)
		}
		if err := i.WriteLayout(dir, layer); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0].Bytes(), archives[1].Bytes()) {
		t.Error("two archives of equal files differ")
	}
	type descriptor struct {
		Digest string
		Size   int
	}
	read := func(d descriptor, into any) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(dir, "blobs/sha256", d.Digest[len("sha256:"):]))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("sha256:%x", sha256.Sum256(text)); got != d.Digest || len(text) != d.Size {
			t.Errorf("blob %s of %d bytes has the digest %s and %d bytes", d.Digest, d.Size, got, len(text))
		}
		if into != nil {
			if err := json.Unmarshal(text, into); err != nil {
				t.Fatal(err)
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	var index struct{ Manifests []descriptor }
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	var config struct {
		Architecture string
		RootFS       struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(text, &index); err != nil || len(index.Manifests) != 1 {
		t.Fatalf("%s: %v", text, err)
	}
	read(index.Manifests[0], &manifest)
	read(manifest.Config, &config)
	if len(manifest.Layers) != 1 || config.Architecture != "amd64" || len(config.RootFS.DiffIDs) != 1 ||
		config.RootFS.DiffIDs[0] != manifest.Layers[0].Digest {
		t.Errorf("manifest %+v, configuration %+v", manifest, config)
	}
	read(manifest.Layers[0], nil)
}
