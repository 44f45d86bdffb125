package ocispec

import (
	"encoding/json"
	"fmt"
)

// DuplicateKeyError is the error of an object with a duplicate key.
type DuplicateKeyError struct{ Second string } // the second value, as JSON

func (e *DuplicateKeyError) Error() string {
	return fmt.Sprintf("a key is there twice, the second time with %.60q", e.Second)
}

// NoDuplicateKeys rejects duplicate keys: JSON parsers differ in the value that they keep, so the
// hook and the runtime could act on different values.
type NoDuplicateKeys[T any] struct {
	Value T
	given bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (o *NoDuplicateKeys[T]) UnmarshalJSON(text []byte) error {
	if o.given {
		return &DuplicateKeyError{string(text)}
	}
	o.given = true
	return json.Unmarshal(text, &o.Value)
}
