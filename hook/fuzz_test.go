package hook

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// ReadState reads a state as encoding/json does, or refuses the state. A state that passes check
// belongs to a container.
func FuzzState(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ReadState(bytes.NewReader(text))
		if err != nil {
			// The text itself: a runtime shows the error to its user as one line.
			if strings.Contains(err.Error(), "\n") && !bytes.Contains(text, []byte("\n")) {
				t.Errorf("the error has more than a line: %v", err)
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
		if want := (State{plain.ID, plain.Status, plain.PID, plain.Bundle, plain.Root,
			plain.Annotations}); !reflect.DeepEqual(
			s,
			want,
		) {
			t.Errorf("state %+v, read as %+v", want, s)
		}
		// Parsers differ in the value that a repeated key has, so ReadState refuses a repeated
		// key.
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

// top counts a key at the top level of an object.
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
