package earlier

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestArchiveHasFilesOfCommit(t *testing.T) {
	if exec.Command("git", "cat-file", "-e", commit).Run() != nil {
		t.Skipf("commit %s is not in this clone", commit)
	}
	c := exec.Command("git", append([]string{"-C", "../..", "archive", commit}, paths...)...)
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	unpacked, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	want := files(t, bytes.NewReader(out))
	if len(want) < 300 {
		t.Errorf("git archive has %d files", len(want))
	}
	if diff := cmp.Diff(want, files(t, unpacked)); diff != "" {
		t.Errorf("files of the commit and of the archive (-commit +archive):\n%s", diff)
	}
}

// Engines keep these paths for the life of a container.
func TestPackagesHaveFilesThatContainersHold(t *testing.T) {
	for list, names := range map[string][]string{
		"peerlane":    {"/usr/libexec/peerlane/peerlane-hook", "/usr/libexec/peerlane/peerlane-relay"},
		"libpeerlane": {"/usr/lib/peerlane/" + Library, "/usr/lib/peerlane/libnccl-net-peerlane.so"},
	} {
		for _, format := range []string{"deb", "rpm"} {
			text, err := os.ReadFile("../packages/testdata/" + list + "." + format + ".txt")
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				if !strings.Contains(string(text), " "+name+"\n") {
					t.Errorf("%s is not in the %s package of %s", name, format, list)
				}
			}
		}
	}
	if Library != "libpeerlane.so.0" {
		t.Errorf("the SONAME is %s", Library)
	}
}

func files(t *testing.T, from io.Reader) map[string]string {
	t.Helper()
	files := map[string]string{}
	for r := tar.NewReader(from); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = string(content)
	}
}
