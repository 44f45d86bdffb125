package ocispec

import (
	"encoding/json"
	"fmt"
)

// NoDuplicateKeys rejects duplicate keys: JSON parsers differ in the value that they keep, so the
// hook and the runtime could act on different values.
type NoDuplicateKeys[T any] struct {
	Value T
	given bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (o *NoDuplicateKeys[T]) UnmarshalJSON(text []byte) error {
	if o.given {
		return fmt.Errorf("a key is there twice, the second time with %.60q", text)
	}
	o.given = true
	return json.Unmarshal(text, &o.Value)
}
