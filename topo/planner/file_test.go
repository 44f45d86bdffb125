package planner

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

func TestPlanSurvivesItsFile(t *testing.T) {
	plan, err := Make(topotest.TwoSockets().Nvswitches().Host(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "plan.json")
	for range 2 { // the second time over the first
		if err := plan.Write(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(plan, got); diff != "" {
		t.Error(diff)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("%v, %v; want mode 0644", info.Mode(), err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("the directory has more than the plan: %v, %v", entries, err)
	}
	for _, name := range []string{"7", "GPU-00000000-0000-0000-0000-000000000007", "0000:08:00.0"} {
		if l, err := got.Lane(name); err != nil || l.GPU != "0000:08:00.0" {
			t.Errorf("lane %s: %v, %v", name, l, err)
		}
	}
	if _, err := got.Lane("8"); err == nil {
		t.Error("the plan returns a lane of a missing GPU")
	}
}

func TestPlanWriteFailureLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "plan.json")
	if err := os.MkdirAll(filepath.Join(path, "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	var failed *os.LinkError
	if err := (&Plan{}).Write(path); !errors.As(err, &failed) || failed.New != path {
		t.Errorf("writing over a directory: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("something is left: %v, %v", entries, err)
	}
}

func TestBadPlanFileIsRefusedWithAReason(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plan.json")
	if _, err := Read(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	const gpu = `"gpus":[{"busid":"0000:01:00.0"}]`
	lane := "0000:01:00.0"
	for text, want := range map[string]error{
		``:               &json.SyntaxError{Offset: 0},
		`{"version":99}`: &versionError{99},
		`{"version":1,"lanes":"of another form"}`: &versionError{1},
		`{"version":2,` + gpu + `,"lanes":[{"gpu":"0000:01:00.0","kind":"staged"}]}`: &contradictionError{lane, false, 0,
			"staged"},
		`{"version":2,"lanes":[{"gpu":"0000:01:00.0"}]}`: &unlistedError{lane, lane},
		`{"version":2,` + gpu + `,"lanes":[{"gpu":"0000:01:00.0","relay":true}]}`: &contradictionError{lane, true, 0,
			""},
		`{"version":2,` + gpu + `,"lanes":[{"gpu":"0000:01:00.0","servers":["x"]}]}`:    &unlistedError{lane, "x"},
		`{"version":2,` + gpu + `,"lanes":[{"gpu":"0000:01:00.0","path":"SOMEWHERE"}]}`: &topo.PathTypeError{Text: "SOMEWHERE"},
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var f *fault.Error
		if _, err := Read(path); !errors.As(err, &f) || f.Code != fault.UnreadablePlan || f.Object != path ||
			!testutil.HasError(f.Cause, want) {
			t.Errorf("%s: %v; want %s of the file with the cause %v", text, err, fault.UnreadablePlan, want)
		}
	}
}
