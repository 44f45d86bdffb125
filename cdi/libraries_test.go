package cdi

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// libraryDir fills a directory with files of these names, owned and protected like the files of a
// package.
func libraryDir(t *testing.T, names ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "peerlane")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestLibrariesAreMountedWhereLoadersLook(t *testing.T) {
	o := testOptions(t, allNodes...)
	o.LibraryDir = libraryDir(
		t,
		"libpeerlane.so.0",
		"libnccl-net-peerlane.so",
		"nixl/libplugin_PEERLANE.so",
		"nixl/README",
		"nccl-topology.xml",
		"nccl.conf",
		"README",
		"libpeerlane.a",
		"peerlane.so",
	)
	list, err := Generate(testPlan(), o)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"/usr/lib/libpeerlane.so.0": "libpeerlane.so.0", "/usr/lib64/libpeerlane.so.0": "libpeerlane.so.0",
		"/usr/lib/libnccl-net-peerlane.so":   "libnccl-net-peerlane.so",
		"/usr/lib64/libnccl-net-peerlane.so": "libnccl-net-peerlane.so",

		"/usr/lib/peerlane/nixl/libplugin_PEERLANE.so": "libplugin_PEERLANE.so",
		"/etc/nccl-topology.xml":                       "nccl-topology.xml", "/run/peerlane": "anchor",
	}
	for _, spec := range list {
		if spec.Kind == KindNIC { // a container without a lane does not use the relay's libraries
			if len(spec.ContainerEdits.Mounts) > 0 {
				t.Errorf("%s mounts %v", spec.Kind, spec.ContainerEdits.Mounts)
			}
			continue
		}
		got := map[string]string{}
		for _, m := range spec.ContainerEdits.Mounts {
			got[m.ContainerPath] = filepath.Base(m.HostPath)
			if m.ContainerPath != "/run/peerlane" {
				if diff := cmp.Diff([]string{"bind", "ro", "nosuid", "nodev", "rprivate"}, m.Options); diff != "" {
					t.Errorf("%s (-want +got):\n%s", m.ContainerPath, diff)
				}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", spec.Kind, diff)
		}
		var text bytes.Buffer
		if err := encode(&text, spec); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text.String(), "LD_") || strings.Contains(text.String(), "NCCL_") {
			t.Errorf("%s sets a variable that users set:\n%s", spec.Kind, text.String())
		}
	}
}

// findLibraries skips a library that an unprivileged user could have written.
func TestLibraryWritableByOthersIsSkipped(t *testing.T) {
	for _, test := range []struct {
		name string
		edit func(dir string) error
		want string
	}{
		{"others may write the file", func(dir string) error {
			return os.Chmod(filepath.Join(dir, "libpeerlane.so.0"), 0o666)
		}, "chmod go-w"},
		{"others may write the directory", func(dir string) error { return os.Chmod(dir, 0o777) }, "chmod go-w"},
		{"a link", func(dir string) error {
			path := filepath.Join(dir, "libpeerlane.so.0")
			return errors.Join(os.Rename(path, filepath.Join(dir, "file")), os.Symlink("file", path))
		}, "not a regular file"},
		{"somebody's file", func(dir string) error { return os.Chown(filepath.Join(dir, "libpeerlane.so.0"), 65534, 65534) },
			"belongs to uid 65534"},
	} {
		t.Run(test.name, func(t *testing.T) {
			o := testOptions(t, allNodes...)
			o.LibraryDir = libraryDir(t, "libpeerlane.so.0")
			err := test.edit(o.LibraryDir)
			if errors.Is(err, fs.ErrPermission) {
				t.Skip("needs root: giving a file away")
			}
			if err != nil {
				t.Fatal(err)
			}
			list, err := Generate(testPlan(), o)
			if err != nil {
				t.Fatal(err)
			}
			if mounts := list[0].ContainerEdits.Mounts; len(mounts) != 1 {
				t.Errorf("%d mounts, want the anchor's", len(mounts))
			}
			notes, err := Notes(testPlan(), o)
			if err != nil {
				t.Fatal(err)
			}
			last := notes[len(notes)-1]
			if !strings.Contains(last, "containers do not get "+filepath.Join(o.LibraryDir, "libpeerlane.so.0")) ||
				!strings.Contains(last, test.want) {
				t.Errorf("the last note is %q", last)
			}
		})
	}
}
