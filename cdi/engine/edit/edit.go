// Package edit changes single keys of a configuration file in TOML or JSON, and keeps every other
// byte: comments, order and blanks.
//
// Set parses its result before it returns: except for the keys, the result must have the meaning
// of the original text. Set refuses a change that cannot be made in this way, and names the line
// in the error.
package edit

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Key is a key to set or remove.
type Key struct {
	// Path is the list of the tables of the key, outermost first, and the name of the key.
	Path []string `json:"path"`
	// Value is a bool, an int64, a string or a []string; nil removes the key.
	Value any `json:"value"`
	// Keep is the number of outer tables to keep even if the tables become empty. Keep applies
	// only to a key to remove.
	Keep int `json:"keep,omitempty"`
}

func (k Key) String() string { return strings.Join(k.Path, ".") }

// Error is the position and cause of a malformed text or of a change that is not possible.
type Error struct {
	Line   int // from 1; 0 if no single line is the cause
	Reason string
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.Reason
	}
	return fmt.Sprintf("line %d: %s", e.Line, e.Reason)
}

// Language is a format of configuration files.
type Language interface {
	// Read reads a text; the error is an *Error.
	Read(text []byte) (map[string]any, error)
	// set changes a single key.
	set(text []byte, k Key) ([]byte, error)
}

// Set sets or removes keys. An empty text has no keys. Set returns no text with an error. The
// error is an *Error, except for a key without a name.
func Set(l Language, text []byte, keys ...Key) ([]byte, error) {
	for _, k := range keys {
		if len(k.Path) == 0 {
			return nil, errors.New("a key without a name")
		}
		want, err := l.Read(text)
		if err != nil {
			return nil, err
		}
		if k.Value != nil && Same(Get(want, k.Path...), k.Value) {
			continue
		}
		if err := apply(want, k); err != nil {
			return nil, err
		}
		changed, err := l.set(text, k)
		if err != nil {
			return nil, err
		}
		got, err := l.Read(changed)
		if err != nil {
			return nil, &Error{0, fmt.Sprintf("setting %s would break the file: %v; set it by hand", k, err)}
		}
		if !reflect.DeepEqual(want, got) {
			return nil, &Error{0, fmt.Sprintf("setting %s would also change other keys; set it by hand", k)}
		}
		text = changed
	}
	return text, nil
}

// Get returns the value of a key, nil if the key is missing.
func Get(tree map[string]any, path ...string) any {
	for i, name := range path {
		value, found := tree[name]
		if !found {
			return nil
		}
		if i == len(path)-1 {
			return value
		}
		below, ok := value.(map[string]any)
		if !ok {
			return nil
		}
		tree = below
	}
	return tree
}

// Texts returns a value that is a list of strings, nil for any other value.
func Texts(value any) []string {
	if list, ok := value.([]string); ok {
		return list
	}
	list, ok := value.([]any)
	if !ok {
		return nil
	}
	texts := []string{}
	for _, item := range list {
		text, ok := item.(string)
		if !ok {
			return nil
		}
		texts = append(texts, text)
	}
	return texts
}

// Same reports whether two values are equal, whether set by Go code or read from a file.
func Same(a, b any) bool { return reflect.DeepEqual(plain(a), plain(b)) }

// plain converts a value to the types of Read.
func plain(value any) any {
	if list, ok := value.([]string); ok {
		all := make([]any, len(list))
		for i := range list {
			all[i] = list[i]
		}
		return all
	}
	return value
}

// Depth returns the number of tables of a path that exist.
func Depth(tree map[string]any, path []string) int {
	for i := range len(path) - 1 {
		below, ok := tree[path[i]].(map[string]any)
		if !ok {
			return i
		}
		tree = below
	}
	return len(path) - 1
}

// apply makes the change of set on the tree of Read.
func apply(tree map[string]any, k Key) error {
	tables := []map[string]any{tree}
	for i, name := range k.Path[:len(k.Path)-1] {
		value, found := tree[name]
		below, ok := value.(map[string]any)
		if found && !ok {
			return &Error{0, fmt.Sprintf("%s is not a table, so it cannot contain %s", strings.Join(k.Path[:i+1], "."), k)}
		}
		if !found {
			if k.Value == nil {
				return nil
			}
			below = map[string]any{}
			tree[name] = below
		}
		tree = below
		tables = append(tables, tree)
	}
	last := k.Path[len(k.Path)-1]
	if k.Value != nil {
		tree[last] = plain(k.Value)
		return nil
	}
	if _, ok := tree[last]; !ok {
		return nil
	}
	delete(tree, last)
	for i := len(tables) - 1; i > k.Keep && len(tables[i]) == 0; i-- {
		delete(tables[i-1], k.Path[i-1])
	}
	return nil
}

// splice replaces a range of bytes of a text.
func splice(text []byte, from, to int, with string) []byte {
	return slices.Concat(text[:from], []byte(with), text[to:])
}

// lineOf returns the number, from 1, of the line that contains a byte.
func lineOf(text []byte, at int) int {
	return 1 + strings.Count(string(text[:max(0, min(at, len(text)))]), "\n")
}

// newline returns the line ending of a text.
func newline(text []byte) string {
	if strings.Contains(string(text), "\r\n") {
		return "\r\n"
	}
	return "\n"
}
