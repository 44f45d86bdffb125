package hook

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestLackingPartOfTheSandboxHasCodeCauseAndRemedy(t *testing.T) {
	for missing, want := range map[string]struct{ object, cause string }{
		"Landlock: this kernel has none":                                  {"Landlock", "this kernel has none"},
		"a limit of tasks of its own: its control group has no pids.max":  {"a limit of tasks of its own", "its control group has no pids.max"},
		"a filter of system calls: seccomp: function not implemented: 38": {"a filter of system calls", "seccomp: function not implemented: 38"},
	} {
		f := lacking(missing)
		if f.Code != fault.NoSandbox || f.Object != want.object || f.Cause.Error() != want.cause || f.Remedy == "" {
			t.Errorf("%q: %+v", missing, f)
		}
		if text := f.Error(); !strings.HasPrefix(text, "the relay's sandbox lacks "+missing+"; ") || !fault.NoSandbox.In(text) {
			t.Errorf("%q: %s", missing, text)
		}
	}
}

func TestRelayWithoutControlGroupHasCodeCauseAndRemedy(t *testing.T) {
	f := withoutCgroup("c1", fs.ErrPermission)
	if f.Code != fault.NoSandbox || f.Object != "c1" || !errors.Is(f, fs.ErrPermission) || !strings.Contains(f.Remedy, "cgroup2") {
		t.Errorf("%+v", f)
	}
}
