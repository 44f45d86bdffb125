package programs_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/programs"
)

func TestProgramIsBuiltAndRemoved(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	t.Setenv(programs.Variable, "")
	t.Setenv(programs.RunVariable, "")
	dir, remove, err := programs.Directory(programs.WireGenerate)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(dir, programs.WireGenerate)).CombinedOutput()
	var ended *exec.ExitError
	if !errors.As(err, &ended) || !strings.Contains(string(out), "usage: ") {
		t.Errorf("the program without an argument: %v, %s", err, out)
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", dir, err)
	}
}

func TestProgramsThatAreBuiltAlreadyAreTaken(t *testing.T) {
	given := t.TempDir()
	t.Setenv(programs.Variable, given)
	t.Setenv("PATH", "") // so that no program can be built
	var refused *programs.DirectoryError
	if _, _, err := programs.Directory(programs.Hook); !errors.As(err, &refused) ||
		refused.Variable != programs.Variable || refused.Directory != given {
		t.Errorf("a program that is not there: %v", err)
	}
	if err := os.WriteFile(filepath.Join(given, programs.Hook), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, remove, err := programs.Directory(programs.Hook)
	if err != nil || dir != given {
		t.Fatalf("%s, %v; want %s", dir, err, given)
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(given, programs.Hook)); err != nil {
		t.Errorf("the given directory was removed: %v", err)
	}
	t.Setenv(programs.Variable, "bin")
	if _, _, err := programs.Directory(programs.Hook); !errors.Is(err, programs.ErrNotAbsolute) {
		t.Errorf("a directory that depends on the working directory: %v", err)
	}
}

func TestDirectoryWithoutGoCommandFails(t *testing.T) {
	t.Setenv(programs.Variable, "")
	t.Setenv(programs.RunVariable, "")
	t.Setenv("PATH", "")
	_, _, err := programs.Directory(programs.Hook)
	if !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("err = %v", err)
	}
}

// ending is a fake test that records its end.
type ending struct {
	testing.TB
	how string
}

func (e *ending) Helper()              {}
func (e *ending) Fatal(...any)         { e.how = "failed"; runtime.Goexit() }
func (e *ending) Skipf(string, ...any) { e.how = "skipped"; runtime.Goexit() }

func TestMustHaveSkipsWithGivenPrograms(t *testing.T) {
	for _, test := range []struct {
		name, given string
		err         error
		want        string
	}{
		{"there", "", nil, "ran on"},
		{"there, though not needed", "/given", nil, "ran on"},
		{"missing where Peerlane is built", "", exec.ErrNotFound, "failed"},
		{"missing where the programs are given", "/given", exec.ErrNotFound, "skipped"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv(programs.Variable, test.given)
			e := &ending{}
			done := make(chan struct{})
			go func() {
				defer close(done)
				programs.MustHave(e, test.err)
				e.how = "ran on"
			}()
			<-done
			if e.how != test.want {
				t.Errorf("the test %s; want: %s", e.how, test.want)
			}
		})
	}
}
