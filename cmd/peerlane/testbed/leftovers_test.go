package testbed

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
)

// A demo does not report processes of another demo that runs the same programs.
func TestSnapshotHasProcessesOfItsHostOnly(t *testing.T) {
	binaries, root, other := t.TempDir(), t.TempDir(), t.TempDir()
	shell, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	supervisor, relay := filepath.Join(binaries, "peerlane"), filepath.Join(binaries, "peerlane-relay")
	// The relay writes a byte when it runs, and ends with its standard input.
	const waits = "printf x; read line"
	child := fmt.Sprintf("%s -c '%s'; exit", relay, waits)
	for path, text := range map[string][]byte{
		supervisor: shell, relay: shell, filepath.Join(other, "demo"): []byte(child),
	} {
		if err := os.WriteFile(path, text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h := &Host{Root: root, Layout: paths.New(root), Binaries: binaries}
	for _, c := range []struct {
		name    string
		command []string // of the relay, or of a parent that starts the relay
		ours    bool
	}{
		{"relay of this process", []string{relay, "-c", waits}, true},
		{"client of this process", []string{relay, "-c", waits, "--socket", "-"}, true},
		{"relay of this directory", []string{relay, "-c", waits, "--root", root}, true},
		{"relay of another directory", []string{relay, "-c", waits, "--root", other}, false},
		{"software device of another directory", []string{relay, "-c", waits, "--socket", other + "/engine"}, false},
		{"relay of a supervisor of this directory", []string{supervisor, "-c", child, "--root", root}, true},
		{"relay of a supervisor of another directory", []string{supervisor, "-c", child, "--root", other}, false},
		{"relay of another demo", []string{supervisor, "demo"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command(c.command[0], c.command[1:]...)
			cmd.Dir = other
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				stdin.Close()
				_ = cmd.Wait()
			}()
			if _, err := io.ReadFull(stdout, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			s := Snapshot{}
			if err := h.processes(s); err != nil {
				t.Fatal(err)
			}
			ours := false
			for sentence := range s {
				_, command, _ := strings.Cut(sentence, ": ")
				ours = ours || strings.HasPrefix(command, relay+" ")
			}
			if ours != c.ours {
				t.Errorf("the snapshot has the relay: %v, want %v: %v", ours, c.ours, s)
			}
		})
	}
}
