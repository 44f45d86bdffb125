package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// ValueError is an impossible value in the configuration of a relay, or in a report or a record of a
// self-test.
type ValueError struct {
	Field    string // such as "slots"
	Value    any
	Possible string // the possible values, such as "1 to 1024"; empty if Field states them
}

func (e *ValueError) Error() string {
	value := fmt.Sprint(e.Value)
	if text, ok := e.Value.(string); ok {
		value = fmt.Sprintf("%.60q", text)
	}
	text := fmt.Sprintf("%s %s is not possible", e.Field, value)
	if e.Possible != "" {
		text += "; possible: " + e.Possible
	}
	return text
}

// Errors of a report or a record of a self-test.
var (
	errNotAsked = errors.New("nothing asked for this result, or the report has it twice")
	errTwice    = errors.New("the record has it twice")
	errMore     = errors.New("there is more behind it")
)

// textForm is the form of texts in reports.
var textForm = fmt.Sprintf("up to %d bytes without control characters", maxReason)

// UnknownFieldError is a field of a document that this release does not know.
type UnknownFieldError struct{ Field string }

func (e *UnknownFieldError) Error() string { return fmt.Sprintf("unknown field %q", e.Field) }

// lineError is an error in a line of a report.
type lineError struct {
	report string
	line   int // from 1
	err    error
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d of %s: %v", e.line, e.report, e.err) }

func (e *lineError) Unwrap() error { return e.err }

// decodeError gives an unknown field a type: package json has none.
func decodeError(err error) error {
	if field, unknown := strings.CutPrefix(err.Error(), "json: unknown field "); unknown {
		e := &UnknownFieldError{}
		if json.Unmarshal([]byte(field), &e.Field) == nil {
			return e
		}
	}
	return err
}
