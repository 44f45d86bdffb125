package hook

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// FuzzState checks that ReadState reads a state like encoding/json, or refuses it, and that a
// state that passes check belongs to a container.
func FuzzState(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ReadState(bytes.NewReader(text))
		if err != nil {
			// A runtime shows the text of the error to its user as one line.
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
		// JSON parsers differ in the value of a repeated key, so ReadState refuses a repeated key.
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

// top returns the number of occurrences of a key at the top level of an object.
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
