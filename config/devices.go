package config

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// DeviceMatches reports whether a pattern of Runtime.Devices permits a CDI device. The pattern
// names vendor and class literally. In the name, * matches any letters, ? matches one letter, and
// [abc] matches a, b or c.
func DeviceMatches(pattern, device string) bool {
	kind, names, _ := strings.Cut(pattern, "=")
	deviceKind, name, qualified := strings.Cut(device, "=")
	if !qualified || kind != deviceKind {
		return false
	}
	matches, err := path.Match(names, name)
	return matches && err == nil
}

// checkPattern refuses a pattern that matches no device, or more than one class.
func checkPattern(pattern string) error {
	kind, names, ok := strings.Cut(pattern, "=")
	vendor, class, two := strings.Cut(kind, "/")
	switch {
	case !ok || !two || vendor == "" || class == "" || names == "":
		return errors.New(`must be one device, such as "peerlane.dev/lane=3", or all of a class, such as "peerlane.dev/lane=*"`)
	case strings.ContainsAny(kind, "*?[]\\"):
		return errors.New("vendor and class must be literal; only the name may be a pattern")
	}
	if _, err := path.Match(names, ""); err != nil {
		return fmt.Errorf("%s: %w", names, err)
	}
	return nil
}
