package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
)

// toLog makes standard error a log of a generation until the end of the test.
func toLog(t *testing.T) (log *boundedLog, path string) {
	t.Helper()
	l := paths.New(t.TempDir())
	const id = "00000000000000000000000000000001"
	if err := os.MkdirAll(l.GenerationDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := generation.OpenLog(l, id)
	if err != nil {
		t.Fatal(err)
	}
	before := os.Stderr
	os.Stderr = f
	t.Cleanup(func() {
		os.Stderr = before
		f.Close()
	})
	return newBoundedLog(l, id), f.Name()
}

// A relay can write without an end, and fills at most two logs.
func TestBoundedLogKeepsPreviousLog(t *testing.T) {
	log, path := toLog(t)
	write := func(text string) {
		t.Helper()
		if n, err := log.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatalf("%d bytes, %v", n, err)
		}
	}
	check := func(name, present, previous string) {
		t.Helper()
		for path, want := range map[string]string{path: present, path + ".1": previous} {
			got, err := os.ReadFile(path)
			if string(got) != want || want != "" && err != nil {
				t.Errorf("%s: %s has %d bytes, %v; want %d", name, filepath.Base(path), len(got), err, len(want))
			}
		}
	}
	half := strings.Repeat("a", maxLog/2)
	write(half)
	write(half)
	check("a full log", half+half, "")
	write("b")
	check("a byte more", "b", half+half)
	write("c")
	check("the next", "bc", half+half)
	write(half + half)
	check("a second full log", half+half, "bc")
	if err := os.RemoveAll(filepath.Dir(path)); err != nil { // by an administrator
		t.Fatal(err)
	}
	write("d")
	if info, err := os.Stderr.Stat(); err != nil || info.Size() != 1 {
		t.Errorf("the removed log has %d bytes, %v", info.Size(), err)
	}
}

func TestBoundedLogOnPipeIsUnlimited(t *testing.T) {
	log, _ := toLog(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	file := os.Stderr
	os.Stderr = w
	err = log.makeRoom(2 * maxLog)
	os.Stderr = file
	if err := errors.Join(err, w.Close()); err != nil {
		t.Error(err)
	}
}
