package generation

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/process"
)

// After the kill of a supervisor, its relay can outlive the generation for a moment. A sweep then
// keeps the mark of the uid. ReturnUID waits until the relay has ended, and removes the mark.
func TestReturnUIDOfADyingRelayRemovesItsMark(t *testing.T) {
	l := paths.New(t.TempDir())
	const uid = 2000000001
	for _, dir := range []string{l.UIDs(), l.Generations()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	relay := exec.Command("sleep", "0.3")
	if err := relay.Start(); err != nil {
		t.Fatal(err)
	}
	process, pidfd, err := process.Identify(relay.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer pidfd.Close()
	text, err := json.Marshal(process)
	if err != nil {
		t.Fatal(err)
	}
	mark := uidMark(l, uid)
	if err := os.WriteFile(mark, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := SweepUIDs(l); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(mark); err != nil {
		t.Fatalf("the sweep removed the mark of a live relay: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- relay.Wait() }()
	g := &Generation{}
	g.Sandbox.UID = uid
	if err := g.ReturnUID(l); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(mark); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there, %v", filepath.Base(mark), err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
