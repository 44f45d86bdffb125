package main

import (
	"errors"
	"fmt"
)

// Causes of a line that is not a limit.
var (
	errWords = errors.New("a directory, a function and a value are expected")
	errTwice = errors.New("has a limit already")
)

// lineError is an error in a line of the limits, from 1.
type lineError struct {
	line int
	err  error
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %v", e.line, e.err) }

func (e *lineError) Unwrap() error { return e.err }

// limitError is the error of a function above or below its limit.
type limitError struct {
	function     string // directory and name
	value, limit int
}

func (e *limitError) Error() string {
	if e.value < e.limit {
		return fmt.Sprintf("%s is below its limit of %d: run `make complexity-update`", e.function, e.limit)
	}
	return fmt.Sprintf("%s has the cyclomatic complexity %d, the limit is %d: divide it", e.function, e.value, e.limit)
}
