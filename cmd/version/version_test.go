package version

import (
	"runtime"
	"runtime/debug"
	"testing"
)

func TestMergePrefersTheLinkerThenTheToolchain(t *testing.T) {
	recorded := &debug.BuildInfo{
		Main: debug.Module{Version: "v0.0.0-20260102030405-0123456789ab"},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "0123456789abcdef"},
			{Key: "vcs.time", Value: "2026-01-02T03:04:05Z"},
			{Key: "vcs.modified", Value: "true"},
		},
	}
	for _, test := range []struct {
		name                  string
		version, commit, date string
		info                  *debug.BuildInfo
		want                  Build
	}{
		{
			name:    "linked",
			version: "v1.2.3", commit: "fedcba", date: "2026-05-06T07:08:09Z",
			info: recorded,
			want: Build{Version: "v1.2.3", Commit: "fedcba", Date: "2026-05-06T07:08:09Z"},
		},
		{
			name: "go build in a working tree",
			info: recorded,
			want: Build{Version: "v0.0.0-20260102030405-0123456789ab", Commit: "0123456789abcdef-dirty",
				Date: "2026-01-02T03:04:05Z"},
		},
		{
			name: "go build without version control",
			info: &debug.BuildInfo{Main: debug.Module{Version: "(devel)"}},
			want: Build{Version: "unknown", Commit: "unknown", Date: "unknown"},
		},
		{
			name: "no record at all",
			want: Build{Version: "unknown", Commit: "unknown", Date: "unknown"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.want.Go = runtime.Version()
			test.want.Arch = runtime.GOOS + "/" + runtime.GOARCH
			if got := merge(test.version, test.commit, test.date, test.info); got != test.want {
				t.Errorf("merge = %+v, want %+v", got, test.want)
			}
		})
	}
}
