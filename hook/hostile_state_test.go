package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// endless is an endless reader that counts the bytes read.
type endless struct {
	head, body string
	taken      int
}

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		if at := e.taken + i; at < len(e.head) {
			p[i] = e.head[at]
		} else {
			p[i] = e.body[(at-len(e.head))%len(e.body)]
		}
	}
	e.taken += len(p)
	return len(p), nil
}

// ReadState refuses a malformed or endless state with a short error, and reads little more than
// maxState bytes.
func TestReadStateEndlessStateIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		text io.Reader
		want error
	}{
		"nothing":          {strings.NewReader(""), &json.SyntaxError{Offset: 0}},
		"half of it":       {strings.NewReader(`{"id": "c", "pid"`), &json.SyntaxError{Offset: 17}},
		"another document": {strings.NewReader(`{"id": "c"}{"id": "d"}`), &json.SyntaxError{Offset: 12}},
		"an endless id":    {&endless{head: `{"id": "`, body: "c"}, errStateTooLong},
		"endless notes":    {&endless{head: `{"annotations": {"a": "b"`, body: `, "a": "b"`}, errStateTooLong},
		"no end of depth": {strings.NewReader(strings.Repeat(`{"annotations":`, 1<<20)),
			&json.SyntaxError{Offset: 10000*15 + 1}}, // the limit of package json
		"two processes": {strings.NewReader(`{"id": "c", "pid": 42, "pid": 43}`),
			&ocispec.DuplicateKeyError{Second: "43"}},
		"two of other cases": {strings.NewReader(`{"id": "c", "pid": 42, "PID": 43}`),
			&ocispec.DuplicateKeyError{Second: "43"}},
		"two bundles": {strings.NewReader(`{"bundle": "/a", "id": "c", "bundle": "/b"}`),
			&ocispec.DuplicateKeyError{Second: `"/b"`}},
		"two statuses": {strings.NewReader(`{"status": "creating", "status": "created"}`),
			&ocispec.DuplicateKeyError{Second: `"created"`}},
		"two ids": {strings.NewReader(`{"id": null, "id": "b"}`), &ocispec.DuplicateKeyError{Second: `"b"`}},
		"two sets of notes": {strings.NewReader(`{"annotations": {}, "annotations": {}}`),
			&ocispec.DuplicateKeyError{Second: "{}"}},
		"half a process": {strings.NewReader(`{"pid": 4.5}`), &json.UnmarshalTypeError{Value: "number 4.5"}},
		"too great a number": {strings.NewReader(`{"pid": 99999999999999999999}`),
			&json.UnmarshalTypeError{Value: "number 99999999999999999999"}},
		"a list": {strings.NewReader(`[{"id": "c"}]`), &json.UnmarshalTypeError{Value: "array"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := ReadState(c.text)
			if !testutil.HasError(err, c.want) {
				t.Errorf("%+v, %v; want %T %+v", s, err, c.want, c.want)
			}
			// A runtime shows the text of the error to its user as one line.
			if err != nil && (strings.Contains(err.Error(), "\n") || len(err.Error()) > 400) {
				t.Errorf("the text of the error is not a short line: %v", err)
			}
			if e, ok := c.text.(*endless); ok && e.taken > 2*maxState {
				t.Errorf("%d bytes are taken", e.taken)
			}
		})
	}
}

// Create refuses an incomplete or too large state with a short error, and makes no generation.
func TestCreateIncompleteStateIsRefused(t *testing.T) {
	self := os.Getpid()
	ended := endedProcess(t)
	for name, c := range map[string]struct {
		state State
		// want is nil for any error.
		want error
	}{
		"nothing":         {State{}, &stageError{}},
		"no pid":          {State{ID: "c", Status: "creating", Bundle: "/b"}, &stageError{"c", "creating", 0}},
		"the host's init": {State{ID: "c", Status: "creating", Bundle: "/b", PID: 1}, &stageError{"c", "creating", 1}},
		"a process group": {State{ID: "c", Status: "creating", Bundle: "/b", PID: -self},
			&stageError{"c", "creating", -self}},
		"no status": {State{ID: "c", Bundle: "/b", PID: self}, &stageError{"c", "", self}},
		"an endless status": {State{ID: "c", Bundle: "/b", PID: self, Status: strings.Repeat("s", 1<<20)},
			&stageError{"c", strings.Repeat("s", 1<<20), self}},
		"a restored checkpoint": {State{ID: "c", Status: "stopped", Bundle: "/b", PID: self}, fault.Checkpoint},
		"no bundle":             {State{ID: "c", Status: "creating", PID: self}, errNoBundle},
		"an endless bundle": {State{ID: "c", Status: "creating", PID: self, Bundle: "/" + strings.Repeat("b", 1<<20)},
			&lengthError{"bundle", "/" + strings.Repeat("b", 1<<20), unix.PathMax}},
		"an endless root": {State{ID: "c", Status: "creating", PID: self, Bundle: "/nowhere", Root: "/" +
			strings.Repeat("b", 1<<20)}, &lengthError{"root", "/" + strings.Repeat("b", 1<<20), unix.PathMax}},
		"an endless id": {State{ID: strings.Repeat("c", 1<<20), Status: "creating", Bundle: "/b", PID: self},
			&lengthError{"id", strings.Repeat("c", 1<<20), maxID}},
		"a bundle that climbs": {State{ID: "c", Status: "creating", PID: self, Bundle: "/nowhere/../../.."},
			&fs.PathError{Op: "open", Path: "/config.json", Err: unix.ENOENT}},
		"this very process": {State{ID: "c", Status: "creating", PID: self, Bundle: "BUNDLE"},
			ErrHostNamespace},
		// In a PID namespace, process 2 is another process or none: the cause varies.
		"a kernel's thread":      {State{ID: "c", Status: "creating", PID: 2, Bundle: "BUNDLE"}, nil},
		"an ended process":       {State{ID: "c", Status: "creating", PID: ended, Bundle: "BUNDLE"}, process.ErrEnded},
		"a number of no process": {State{ID: "c", Status: "creating", PID: 1<<32 + self, Bundle: "BUNDLE"}, process.ErrEnded},
		"the greatest number":    {State{ID: "c", Status: "creating", PID: 1<<63 - 1, Bundle: "BUNDLE"}, process.ErrEnded},
	} {
		t.Run(name, func(t *testing.T) {
			l, bundle := readyHost(t)
			if c.state.Bundle == "BUNDLE" {
				c.state.Bundle = bundle
			}
			begun := time.Now()
			warning, err := Create(ReadAhead(l), c.state, "", Devices{Lanes: []string{testplan.UUID0 + "@0000:17:00.0"}})
			if err == nil || c.want != nil && !testutil.HasError(err, c.want) || len(err.Error()) > 1000 {
				t.Errorf("%v, %.2000v; want a short error of %T %.100v", warning, err, c.want, c.want)
			}
			if took := time.Since(begun); took > time.Minute {
				t.Errorf("Create took %v", took)
			}
			if all, err := generation.IDs(l); err != nil || len(all) > 0 {
				t.Errorf("generations %v, %v", all, err)
			}
		})
	}
}

// readyHost returns a host with the plan of testplan, and a bundle.
func readyHost(t *testing.T) (l paths.Layout, bundle string) {
	t.Helper()
	l = paths.New(t.TempDir())
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	sysfs := filepath.Join(l.Root, "sys")
	plan := testplan.New(sysfs)
	for _, gpu := range plan.GPUs {
		dir := filepath.Join(sysfs, "bus/pci/devices", gpu.BusID)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "vendor"), []byte("0x10de\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := plan.Write(l.PlanFile()); err != nil {
		t.Fatal(err)
	}
	bundle = filepath.Join(l.Root, "bundle")
	if err := os.Mkdir(bundle, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(`{"root": {"path": "../../../../.."}}`),
		0o644); err != nil {
		t.Fatal(err)
	}
	return l, bundle
}

// endedProcess returns the pid of an ended process.
func endedProcess(t *testing.T) int {
	t.Helper()
	p, err := os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	return p.Pid
}

// An error names the remedy for the cause, and only that remedy.
func TestMountErrorsNameTheirRemedy(t *testing.T) {
	const files = "raise the engine's limit of open files (LimitNOFILE= of its unit), or fs.file-max"
	for cause, remedy := range map[error]string{
		unix.EPERM: "this needs CAP_SYS_ADMIN", unix.ENOSYS: "this needs Linux 5.12", unix.EMFILE: files, unix.ENFILE: files,
		unix.ENOMEM: "",
	} {
		code := fault.MountNotPermitted
		if remedy == "" {
			code = ""
		}
		want := fault.Error{Code: code, Operation: "mount by open_tree", Object: "/dir", Cause: cause, Remedy: remedy}
		if f, ok := errors.AsType[*fault.Error](newMountError("open_tree", "/dir", cause)); !ok || *f != want {
			t.Errorf("%v: %+v, want %+v", cause, f, want)
		}
	}
}

func TestInitThatHasEndedIsNamed(t *testing.T) {
	c := exec.Command("true")
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	err := checkMountNamespace(generation.Container{ID: "c", PID: c.Process.Pid})
	f, ok := errors.AsType[*fault.Error](err)
	if !ok || f.Object != fmt.Sprintf(`process %d, the init of container "c"`, c.Process.Pid) ||
		f.Cause != process.ErrEnded {
		t.Errorf("%v", err)
	}
}
