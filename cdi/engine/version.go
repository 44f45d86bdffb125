package engine

import (
	"fmt"
	"regexp"
	"strconv"
)

// version is the part of an engine's version that plans depend on.
type version struct{ major, minor int }

var numbers = regexp.MustCompile(`(\d+)\.(\d+)(\.\d+)?`)

func parseVersion(text string) (v version, err error) {
	m := numbers.FindStringSubmatch(text)
	if m == nil {
		return v, fmt.Errorf("%q is not a version such as 28.2.2", text)
	}
	if v.major, err = strconv.Atoi(m[1]); err == nil {
		v.minor, err = strconv.Atoi(m[2])
	}
	return v, err
}

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}
