// Package version reports the build of the running command.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set at link time by the Makefile:
//
//	-ldflags "-X github.com/peerlane/peerlane/cmd/version.version=v1.2.3 …"
//
// A plain `go build` or `go install` leaves them empty; the toolchain's own
// record of the module and the commit stands in.
var version, commit, date string

// Build describes the build of a command. A field that neither the linker nor the toolchain
// recorded is "unknown".
type Build struct {
	Version string `json:"version"` // a tag, or the description of a commit by the nearest tag
	Commit  string `json:"commit"`  // full hash; with "-dirty" if files differed from the commit
	Date    string `json:"date"`    // of the commit, RFC 3339
	Go      string `json:"go"`      // the toolchain
	Arch    string `json:"arch"`    // as "linux/amd64"
}

// Get returns the build of the running command.
func Get() Build {
	info, _ := debug.ReadBuildInfo()
	return merge(version, commit, date, info)
}

// merge prefers the linker's values to the toolchain's record.
func merge(version, commit, date string, info *debug.BuildInfo) Build {
	recorded := Build{Version: "unknown", Commit: "unknown", Date: "unknown"}
	if info != nil {
		if v := info.Main.Version; v != "" && v != "(devel)" {
			recorded.Version = v
		}
		dirty := ""
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				recorded.Commit = s.Value
			case s.Key == "vcs.time":
				recorded.Date = s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = "-dirty"
			}
		}
		if recorded.Commit != "unknown" {
			recorded.Commit += dirty
		}
	}
	return Build{
		Version: first(version, recorded.Version),
		Commit:  first(commit, recorded.Commit),
		Date:    first(date, recorded.Date),
		Go:      runtime.Version(),
		Arch:    runtime.GOOS + "/" + runtime.GOARCH,
	}
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// String returns one line: "v1.2.3 (commit 0123…, 2026-01-02T03:04:05Z, go1.26.0 linux/amd64)".
func (b Build) String() string {
	return fmt.Sprintf("%s (commit %s, %s, %s %s)", b.Version, b.Commit, b.Date, b.Go, b.Arch)
}
