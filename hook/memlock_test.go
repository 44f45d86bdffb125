package hook

import (
	"errors"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// mayRaise says whether this process may lift hard limits.
func mayRaise(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func TestMemlockIsRaised(t *testing.T) {
	const low, high = 64 << 10, 128 << 10
	for _, test := range []struct {
		name       string
		configured string // a limit of the container's configuration
	}{
		{"where nothing is configured", ""},
		{"beside another limit", "RLIMIT_NOFILE"},
		{"not over the configuration", "RLIMIT_MEMLOCK"},
	} {
		t.Run(test.name, func(t *testing.T) {
			init := exec.Command("sleep", "1000000")
			if err := init.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := init.Process.Kill(); err != nil {
					t.Error(err)
				}
				_ = init.Wait() // killed above
			})
			if err := unix.Prlimit(init.Process.Pid, unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: low, Max: high}, nil); err != nil {
				t.Fatal(err)
			}
			s := &ocispec.Spec{}
			if test.configured != "" {
				s.Process.Rlimits = append(s.Process.Rlimits, struct {
					Type string `json:"type"`
				}{test.configured})
			}
			warning := raiseMemlock(init.Process.Pid, s)
			want := uint64(unix.RLIM_INFINITY)
			raised := true
			switch {
			case test.configured == "RLIMIT_MEMLOCK":
				want = low
			case !mayRaise(t):
				want, raised = high, false
			}
			var limit unix.Rlimit
			if err := unix.Prlimit(init.Process.Pid, unix.RLIMIT_MEMLOCK, nil, &limit); err != nil {
				t.Fatal(err)
			}
			if limit.Cur != want {
				t.Errorf("the limit is %d, want %d", limit.Cur, want)
			}
			f, _ := errors.AsType[*fault.Error](warning)
			if raised && warning != nil || !raised && (f == nil || f.Code != fault.LockedMemory || f.Remedy == "" ||
				!testutil.HasError(warning, &memlockError{unix.EPERM, high, true})) {
				t.Errorf("the warning is %v; raised: %v", warning, raised)
			}
		})
	}
}

func TestMemlockOfEndedProcessFails(t *testing.T) {
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	if err := raiseMemlock(ended.Process.Pid, &ocispec.Spec{}); !errors.Is(err, fault.LockedMemory) ||
		!errors.Is(err, unix.ESRCH) {
		t.Errorf("the warning is %v", err)
	}
}
