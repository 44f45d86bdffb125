package generation

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

// FuzzGeneration checks valid and damaged files of a generation: no content makes a reader crash,
// or ends a foreign process.
func FuzzGeneration(f *testing.F) {
	const id = "00112233445566778899aabbccddeeff"
	l := paths.New(f.TempDir())
	dir := l.GenerationDir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, generation, status []byte) {
		for path, text := range map[string][]byte{File(l, id): generation, StatusFile(l, id): status} {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		g, err := Read(l, id)
		if err != nil {
			return
		}
		if g.ID != id || g.Container.PID != g.Init.PID {
			t.Errorf("generation %s is read as %+v", id, g)
		}
		if err := g.Write(l); err != nil {
			t.Fatalf("%+v was read, and cannot be written: %v", g, err)
		}
		again, err := Read(l, id)
		if err != nil {
			t.Fatalf("%+v was written, and cannot be read: %v", g, err)
		}
		first, err := json.Marshal(g)
		second, errAgain := json.Marshal(again)
		if err != nil || errAgain != nil || !bytes.Equal(first, second) {
			t.Errorf("%s is %s after another reading, %v, %v", first, second, err, errAgain)
		}
		_, err = List(l)
		if f, ok := errors.AsType[*fault.Error](err); err != nil && (!ok || f.Object != id) {
			t.Errorf("the error does not name generation %s: %v", id, err)
		}
		// The file can name any process, but only a process of this start and boot is the relay.
		if s, err := ReadStatus(l, id); err == nil && s.Relay != nil {
			if process, err := s.Relay.Open(); err == nil {
				process.Close()
				t.Errorf("process %+v is taken for a relay's", s.Relay)
			}
		}
		if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) != 1 {
			t.Errorf("generations: %v, %v", entries, err)
		}
	})
}
