package testutil

import (
	"encoding/json"
	"errors"
	"reflect"
)

// HasError reports whether err is or wraps want: the value, as in errors.Is, or an error of want's type
// with equal fields. HasError(err, nil) reports success. The texts in errors of package json are not
// exported, so HasError compares the offset of a json.SyntaxError and the Value of a
// json.UnmarshalTypeError.
func HasError(err, want error) bool {
	if err == nil || want == nil {
		return err == want
	}
	return errors.Is(err, want) || hasEqual(err, want)
}

func hasEqual(err, want error) bool {
	if equal(err, want) {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if cause := e.Unwrap(); cause != nil {
			return hasEqual(cause, want)
		}
	case interface{ Unwrap() []error }:
		for _, cause := range e.Unwrap() {
			if hasEqual(cause, want) {
				return true
			}
		}
	}
	return false
}

func equal(err, want error) bool {
	switch want := want.(type) {
	case *json.SyntaxError:
		e, ok := err.(*json.SyntaxError)
		return ok && e.Offset == want.Offset
	case *json.UnmarshalTypeError:
		e, ok := err.(*json.UnmarshalTypeError)
		return ok && e.Value == want.Value
	}
	if sentinel == reflect.TypeOf(want) {
		return false // The text is the only field: errors.Is compares the value.
	}
	return reflect.DeepEqual(err, want)
}

var sentinel = reflect.TypeOf(errors.New(""))
