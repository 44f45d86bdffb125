package hook

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestRelayWithoutControlGroupHasCodeCauseAndRemedy(t *testing.T) {
	f := withoutCgroup("c1", fs.ErrPermission)
	if f.Code != fault.NoSandbox || f.Object != "c1" || !errors.Is(f, fs.ErrPermission) ||
		!strings.Contains(f.Remedy, "cgroup2") {
		t.Errorf("%+v", f)
	}
}
