package hook

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

func TestReadStateRefusesMalformedState(t *testing.T) {
	s, err := ReadState(
		strings.NewReader(
			`{"ociVersion":"1.0.2-dev","id":"c","status":"creating","pid":42,"bundle":"/b","annotations":{"a":"b"}}`,
		),
	)
	if diff := cmp.Diff(State{ID: "c", Status: "creating", PID: 42, Bundle: "/b",
		Annotations: map[string]string{"a": "b"}}, s); diff != "" ||
		err != nil {
		t.Errorf("%v (-want +got)\n%s", err, diff)
	}
	for _, text := range []string{"", "{", "[]", `{"pid":"1"}`} {
		_, err := ReadState(strings.NewReader(text))
		if f, ok := errors.AsType[*fault.Error](err); !ok || f.Object != "standard input" || f.Remedy == "" {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// At other hooks, runtimes pass pid 1 of the host or no pid.
func TestStateOfAnotherHookIsRefused(t *testing.T) {
	for _, test := range []struct {
		s  State
		ok bool
	}{
		{State{ID: "c", Status: "creating", PID: 42, Bundle: "/b"}, true}, // runc
		{State{ID: "c", Status: "created", PID: 42, Bundle: "/b"}, true},  // crun
		{State{ID: "c", Status: "creating", PID: 1, Bundle: "/b"}, false}, // runc at createContainer
		{State{ID: "c", Status: "created", PID: 0, Bundle: "/b"}, false},  // crun at createContainer
		{State{ID: "c", Status: "running", PID: 42, Bundle: "/b"}, false}, // crun at poststart
		{State{ID: "c", Status: "stopped", Bundle: "/b"}, false},
		{State{ID: "c", Status: "creating", PID: -1, Bundle: "/b"}, false},
		{State{ID: "c", Status: "creating", PID: 42}, false},
	} {
		if err := test.s.check(); (err == nil) != test.ok {
			t.Errorf("%+v: %v", test.s, err)
		}
	}
}

func TestMergeKeepsTheFirstLaneOfAGPU(t *testing.T) {
	a, b := launch.Lane{GPU: launch.GPU{BusID: "a"}}, launch.Lane{GPU: launch.GPU{BusID: "b"}}
	changed := launch.Lane{GPU: launch.GPU{BusID: "a"}, Role: "near"}
	present := []launch.Lane{a}
	merged, more := merge(present, []launch.Lane{changed, b, b})
	if diff := cmp.Diff([]launch.Lane{a, b}, merged); diff != "" || !more {
		t.Errorf("changed: %v (-want +got)\n%s", more, diff)
	}
	// The container now sees the server GPUs: merge reports that change once.
	seen := a
	seen.Copy = true
	for _, want := range []bool{true, false} {
		if merged, more = merge(merged, []launch.Lane{seen, b}); more != want {
			t.Errorf("changed: %v, want %v", more, want)
		}
		if diff := cmp.Diff([]launch.Lane{seen, b}, merged); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	if !slices.EqualFunc(present, []launch.Lane{a}, func(x, y launch.Lane) bool { return x.GPU == y.GPU }) {
		t.Errorf("merge changed the argument to %v", present)
	}
}
