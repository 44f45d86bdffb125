// Package fault defines the errors that an operator searches for. An [Error] has a
// stable code, such as PL1203, that the text of the error prints and `peerlane explain CODE` describes.
//
// A package returns an [Error] with the operation, the object, the cause and the remedy as
// fields. Callers and tests select an error by its code:
//
//	var f *fault.Error
//	if errors.As(err, &f) && f.Code == fault.AnchorNotMounted { … }
//	errors.Is(err, fault.AnchorNotMounted)
//
// An error without a code is internal: no page describes the error. An internal error has the same fields
// if callers or tests select on them.
package fault

import "strings"

// Code names an entry of the catalogue. Codes are stable: a release never gives a code another
// meaning.
type Code string

// Error returns the code, so that a Code is a target for errors.Is.
func (c Code) Error() string { return string(c) }

// In reports whether text ends with the code: whether text is that of an Error with the code.
func (c Code) In(text string) bool { return strings.HasSuffix(text, " ["+string(c)+"]") }

// Suffix returns the code that ends text as [Error.Error] writes it, " [PLnnnn]", or "".
func Suffix(text string) string {
	const form = " [PL0000]"
	at := len(text) - len(form)
	if at < 0 {
		return ""
	}
	for i := range len(form) {
		switch c := text[at+i]; {
		case form[i] == '0' && '0' <= c && c <= '9', form[i] != '0' && c == form[i]:
		default:
			return ""
		}
	}
	return text[at:]
}

// Error is a failed operation.
type Error struct {
	Code      Code   // empty for an internal error
	Operation string // verb phrase, such as "read the plan"
	Object    string // file, device, container or address; empty if Operation names the object
	Cause     error  // nil if operation and object state the cause
	Remedy    string // imperative, such as "run peerlane cdi refresh"
}

// Error returns e as "OPERATION OBJECT: CAUSE; REMEDY [CODE]", without the empty parts.
func (e *Error) Error() string {
	text := strings.TrimSpace(e.Operation + " " + e.Object)
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	if e.Remedy != "" {
		text += "; " + e.Remedy
	}
	if e.Code != "" {
		text += " [" + string(e.Code) + "]"
	}
	return text
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is reports whether target is the code of e.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code != "" && e.Code == code
}
