package engine

import (
	"fmt"
	"regexp"
	"strconv"
)

// version is the part of an engine's version that plans depend on.
type version struct{ major, minor int }

var numbers = regexp.MustCompile(`(\d+)\.(\d+)(\.\d+)?`)

// versionError is the error of a text that is not a version.
type versionError struct{ text string }

func (e *versionError) Error() string {
	return fmt.Sprintf("%q is not a version such as 28.2.2", e.text)
}

// formError is the error of a configuration of a later version.
type formError struct {
	file string
	// version is the version in the file.
	version int64
}

func (e *formError) Error() string {
	return fmt.Sprintf("%s has version %d, and this Peerlane supports versions up to 4", e.file, e.version)
}

func parseVersion(text string) (v version, err error) {
	m := numbers.FindStringSubmatch(text)
	if m == nil {
		return v, &versionError{text}
	}
	if v.major, err = strconv.Atoi(m[1]); err == nil {
		v.minor, err = strconv.Atoi(m[2])
	}
	return v, err
}

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}
