package testutil

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"
)

func TestHasErrorComparesTypesAndFields(t *testing.T) {
	sentinel := errors.New("a")
	path := &fs.PathError{Op: "open", Path: "/a", Err: unix.ENOENT}
	var text *json.UnmarshalTypeError
	syntax := json.Unmarshal([]byte("[1,"), &struct{}{})
	value := json.Unmarshal([]byte("[1]"), &struct{}{})
	if !errors.As(value, &text) {
		t.Fatal(value)
	}
	for _, c := range []struct {
		err, want error
		match     bool
	}{
		{nil, nil, true},
		{nil, sentinel, false},
		{sentinel, nil, false},
		{fmt.Errorf("b: %w", sentinel), sentinel, true},
		{errors.New("a"), sentinel, false}, // an equal text
		{fmt.Errorf("b: %w", path), &fs.PathError{Op: "open", Path: "/a", Err: unix.ENOENT}, true},
		{path, &fs.PathError{Op: "open", Path: "/b", Err: unix.ENOENT}, false},
		{path, unix.ENOENT, true},
		{path, fs.ErrNotExist, true},
		{errors.Join(sentinel, fmt.Errorf("b: %w", path)), &fs.PathError{Op: "open", Path: "/a", Err: unix.ENOENT}, true},
		{syntax, &json.SyntaxError{Offset: 3}, true},
		{syntax, &json.SyntaxError{Offset: 2}, false},
		{value, &json.UnmarshalTypeError{Value: "array"}, true},
		{value, &json.UnmarshalTypeError{Value: "string"}, false},
		{value, &json.SyntaxError{}, false},
	} {
		if match := HasError(c.err, c.want); match != c.match {
			t.Errorf("HasError(%v, %#v) is %t", c.err, c.want, match)
		}
	}
}
