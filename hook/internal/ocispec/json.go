package ocispec

import (
	"encoding/json"
	"errors"
	"fmt"
)

// errDuplicateKey is the error of an object that has a key twice.
var errDuplicateKey = errors.New("a key is there twice")

// NoDuplicateKeys rejects duplicate keys: JSON parsers differ in the value that they keep, so the
// hook and the runtime could act on different values.
type NoDuplicateKeys[T any] struct {
	Value T
	given bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (o *NoDuplicateKeys[T]) UnmarshalJSON(text []byte) error {
	if o.given {
		return fmt.Errorf("%w, the second time with %.60q", errDuplicateKey, text)
	}
	o.given = true
	return json.Unmarshal(text, &o.Value)
}
