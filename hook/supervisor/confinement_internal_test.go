package supervisor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestLackingPartOfTheSandboxHasCodeCauseAndRemedy(t *testing.T) {
	for missing, want := range map[string]struct{ object, cause string }{
		"Landlock: this kernel lacks Landlock": {"Landlock", "this kernel lacks Landlock"},
		"its own limit of tasks: its control group has no pids.max": {"its own limit of tasks",
			"its control group has no pids.max"},
		"a filter of system calls: seccomp: invalid argument: 22": {"a filter of system calls",
			"seccomp: invalid argument: 22"},
	} {
		f := lacking(missing)
		if f.Code != fault.NoSandbox || f.Object != want.object || f.Cause != missingPart(want.cause) || f.Remedy == "" {
			t.Errorf("%q: %+v", missing, f)
		}
		if text := f.Error(); !strings.HasPrefix(text, "the relay's sandbox lacks "+missing+"; ") ||
			!fault.NoSandbox.In(text) {
			t.Errorf("%q: %s", missing, text)
		}
	}
}

func TestOpenLimitIsTheKernelsWithAMemoryLimit(t *testing.T) {
	for _, tt := range []struct {
		maximum, files string
		want           uint64
	}{
		{"1073741816", "9223372036854775807", 1073741816}, // the values of systemd
		{"1048576", "9223372036854775807", 1048576},
		{"1048576", "2470938", 65536},
		{"1048576", "12800000", 200000},
		{"1024", "9223372036854775807", 65536},
		{"1048576", "", 65536},
		{"", "9223372036854775807", 65536},
		{"many", "9223372036854775807", 65536},
	} {
		dir := t.TempDir()
		for name, text := range map[string]string{"nr_open": tt.maximum, "file-max": tt.files} {
			if text == "" {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := openLimit(dir, true); got != tt.want {
			t.Errorf("fs.nr_open %q, fs.file-max %q: %d, want %d", tt.maximum, tt.files, got, tt.want)
		}
		if got := openLimit(dir, false); got != 65536 {
			t.Errorf("fs.nr_open %q, fs.file-max %q without a memory limit: %d", tt.maximum, tt.files, got)
		}
	}
}
