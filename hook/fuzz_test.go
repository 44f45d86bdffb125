package hook

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
)

// A state is read as the runtime means it, or refused; what is not refused is a
// container's.
func FuzzState(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ReadState(bytes.NewReader(text))
		if err != nil {
			if strings.Contains(err.Error(), "\n") && !bytes.Contains(text, []byte("\n")) {
				t.Errorf("the error is not one line: %v", err)
			}
			return
		}
		var plain struct {
			ID, Status, Bundle, Root string
			PID                      int
			Annotations              map[string]string
		}
		if err := json.Unmarshal(text, &plain); err != nil {
			t.Fatalf("%+v was read of what is no state: %v", s, err)
		}
		if want := (State{plain.ID, plain.Status, plain.PID, plain.Bundle, plain.Root, plain.Annotations}); !reflect.DeepEqual(s, want) {
			t.Errorf("it is %+v, and was read as %+v", want, s)
		}
		// The first key of two would be another value.
		for _, key := range []string{"id", "pid", "status", "bundle"} {
			if top(text, key) > 1 {
				t.Errorf("%+v has %s twice", s, key)
			}
		}
		if s.check() != nil {
			return
		}
		if s.PID < 2 || s.Bundle == "" || len(s.ID) > maxID || s.Status != "creating" && s.Status != "created" {
			t.Errorf("a container is %+v", s)
		}
	})
}

// top counts a key of an object.
func top(text []byte, key string) int {
	d := json.NewDecoder(bytes.NewReader(text))
	if start, err := d.Token(); err != nil || start != json.Delim('{') {
		return 0
	}
	count := 0
	for d.More() {
		name, err := d.Token()
		var value json.RawMessage
		if err != nil || d.Decode(&value) != nil {
			break
		}
		if name == key {
			count++
		}
	}
	return count
}

// A generation's files are those of one generation, or damaged: nothing that they
// say makes a reader fail, and what ends by them is no process of somebody else.
func FuzzGeneration(f *testing.F) {
	const id = "00112233445566778899aabbccddeeff"
	l := paths.New(f.TempDir())
	dir := l.GenerationDir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, generation, status []byte) {
		for path, text := range map[string][]byte{generationFile(l, id): generation, statusFile(l, id): status} {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		g, err := readGeneration(l, id)
		if err != nil {
			return
		}
		if g.ID != id || g.Container.PID != g.Init.PID {
			t.Errorf("generation %s is read as %+v", id, g)
		}
		if err := g.write(l); err != nil {
			t.Fatalf("%+v was read, and cannot be written: %v", g, err)
		}
		again, err := readGeneration(l, id)
		if err != nil {
			t.Fatalf("%+v was written, and cannot be read: %v", g, err)
		}
		first, err := json.Marshal(g)
		second, errAgain := json.Marshal(again)
		if err != nil || errAgain != nil || !bytes.Equal(first, second) {
			t.Errorf("%s is %s after another reading, %v, %v", first, second, err, errAgain)
		}
		if _, err := List(l); err != nil && !strings.Contains(err.Error(), id) {
			t.Errorf("the error names no generation: %v", err)
		}
		// It may name any process: none of another start or boot is its relay's.
		if s, err := readStatus(l, id); err == nil && s.Relay != nil {
			if process, err := s.Relay.open(); err == nil {
				process.Close()
				t.Errorf("process %+v is taken for a relay's", s.Relay)
			}
		}
		if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) != 1 {
			t.Errorf("there are %v, %v", entries, err)
		}
	})
}

// Each request to a supervisor has one answer, whatever it is; only one that makes
// sense reaches the supervisor.
func FuzzAdmin(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) == 0 || len(text) > 4<<10 {
			return // the socket has neither
		}
		ours, theirs := net.Pipe()
		defer ours.Close()
		requests := make(chan request)
		over := make(chan struct{})
		go func() {
			defer close(over)
			serveAdmin(theirs, requests)
		}()
		var command string
		reached := false
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			select {
			case r := <-requests:
				command, reached = r.command, true
				r.reply(nil)
			case <-over:
			}
		}()
		if _, err := ours.Write(text); err != nil {
			t.Fatal(err)
		}
		var answer adminAnswer
		if err := json.NewDecoder(ours).Decode(&answer); err != nil {
			t.Fatalf("%q has no answer: %v", text, err)
		}
		<-over
		<-answered
		var asked adminRequest
		sense := json.Unmarshal(text, &asked) == nil && asked.Version == adminVersion
		if reached != sense || reached && command != asked.Command {
			t.Errorf("%q reached the supervisor: %v, as %q", text, reached, command)
		}
		if answer.Version != adminVersion || (answer.Error == "") != sense {
			t.Errorf("%q is answered with %+v", text, answer)
		}
	})
}
