package hook

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/hook/process"
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
func TestStatesThatCannotBeRead(t *testing.T) {
	for name, c := range map[string]struct {
		text io.Reader
		says string
	}{
		"nothing":            {strings.NewReader(""), "unexpected end"},
		"half of it":         {strings.NewReader(`{"id": "c", "pid"`), "unexpected end"},
		"another document":   {strings.NewReader(`{"id": "c"}{"id": "d"}`), "after top-level value"},
		"an endless id":      {&endless{head: `{"id": "`, body: "c"}, "more than 16777216 bytes"},
		"endless notes":      {&endless{head: `{"annotations": {"a": "b"`, body: `, "a": "b"`}, "more than 16777216 bytes"},
		"no end of depth":    {strings.NewReader(strings.Repeat(`{"annotations":`, 1<<20)), "exceeded max depth"},
		"two processes":      {strings.NewReader(`{"id": "c", "pid": 42, "pid": 43}`), "twice, the second time with \"43\""},
		"two of other cases": {strings.NewReader(`{"id": "c", "pid": 42, "PID": 43}`), "twice"},
		"two bundles":        {strings.NewReader(`{"bundle": "/a", "id": "c", "bundle": "/b"}`), "twice"},
		"two statuses":       {strings.NewReader(`{"status": "creating", "status": "created"}`), "twice"},
		"two ids":            {strings.NewReader(`{"id": null, "id": "b"}`), "twice"},
		"two sets of notes":  {strings.NewReader(`{"annotations": {}, "annotations": {}}`), "twice"},
		"half a process":     {strings.NewReader(`{"pid": 4.5}`), "cannot unmarshal"},
		"too great a number": {strings.NewReader(`{"pid": 99999999999999999999}`), "cannot unmarshal"},
		"a list":             {strings.NewReader(`[{"id": "c"}]`), "cannot unmarshal"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := ReadState(c.text)
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") ||
				len(err.Error()) > 400 {
				t.Errorf("%+v, %v; want a short error with %q", s, err, c.says)
			}
			if e, is := c.text.(*endless); is && e.taken > 2*maxState {
				t.Errorf("%d bytes are taken", e.taken)
			}
		})
	}
}

// Create refuses an incomplete or too large state with a short error, and makes no generation.
func TestStatesOfNoContainer(t *testing.T) {
	self := os.Getpid()
	ended := endedProcess(t)
	for name, c := range map[string]struct {
		state State
		says  string
	}{
		"nothing":         {State{}, `status "" and pid 0`},
		"no pid":          {State{ID: "c", Status: "creating", Bundle: "/b"}, "pid 0"},
		"the host's init": {State{ID: "c", Status: "creating", Bundle: "/b", PID: 1}, "pid 1"},
		"a process group": {State{ID: "c", Status: "creating", Bundle: "/b", PID: -self}, "pid -"},
		"no status":       {State{ID: "c", Bundle: "/b", PID: self}, `status ""`},
		"an endless status": {State{ID: "c", Bundle: "/b", PID: self, Status: strings.Repeat("s", 1<<20)},
			`status "sss`},
		"a restored checkpoint": {State{ID: "c", Status: "stopped", Bundle: "/b", PID: self}, "a lane cannot be restored"},
		"no bundle":             {State{ID: "c", Status: "creating", PID: self}, "names no bundle"},
		"an endless bundle": {State{ID: "c", Status: "creating", PID: self, Bundle: "/" + strings.Repeat("b", 1<<20)},
			"4096 bytes"},
		"an endless root": {State{ID: "c", Status: "creating", PID: self, Bundle: "/nowhere", Root: "/" +
			strings.Repeat("b", 1<<20)}, "4096 bytes"},
		"an endless id": {State{ID: strings.Repeat("c", 1<<20), Status: "creating", Bundle: "/b", PID: self},
			"its id has 1048576 bytes"},
		"a bundle that climbs": {State{ID: "c", Status: "creating", PID: self, Bundle: "/nowhere/../../.."}, "config.json"},
		"this very process": {State{ID: "c", Status: "creating", PID: self, Bundle: "BUNDLE"},
			"mount namespace of the host"},
		"a kernel's thread":      {State{ID: "c", Status: "creating", PID: 2, Bundle: "BUNDLE"}, ""},
		"an ended process":       {State{ID: "c", Status: "creating", PID: ended, Bundle: "BUNDLE"}, "has ended"},
		"a number of no process": {State{ID: "c", Status: "creating", PID: 1<<32 + self, Bundle: "BUNDLE"}, "has ended"},
		"the greatest number":    {State{ID: "c", Status: "creating", PID: 1<<63 - 1, Bundle: "BUNDLE"}, "has ended"},
	} {
		t.Run(name, func(t *testing.T) {
			l, bundle := readyHost(t)
			if c.state.Bundle == "BUNDLE" {
				c.state.Bundle = bundle
			}
			begun := time.Now()
			warning, err := Create(ReadAhead(l), c.state, "", Devices{Lanes: []string{testplan.UUID0 + "@0000:17:00.0"}})
			if err == nil || !strings.Contains(err.Error(), c.says) || len(err.Error()) > 1000 {
				t.Errorf("%v, %v; want a short error with %q", warning, err, c.says)
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
	for err, want := range map[error]string{
		unix.EPERM: "CAP_SYS_ADMIN", unix.ENOSYS: "Linux 5.12", unix.EMFILE: "LimitNOFILE=", unix.ENFILE: "fs.file-max",
		unix.ENOMEM: "",
	} {
		said := newMountError("open_tree", "/dir", err)
		if !errors.Is(said, err) {
			t.Errorf("%v does not wrap %v", said, err)
		}
		for _, remedy := range []string{"CAP_SYS_ADMIN", "Linux 5.12", "LimitNOFILE=", "fs.file-max"} {
			descriptors := (want == "LimitNOFILE=" || want == "fs.file-max") &&
				(remedy == "LimitNOFILE=" || remedy == "fs.file-max")
			if strings.Contains(said.Error(), remedy) != (remedy == want || descriptors) {
				t.Errorf("%v", said)
			}
		}
	}
}

func TestInitThatHasEndedIsNamed(t *testing.T) {
	c := exec.Command("true")
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	err := isolated(generation.Container{ID: "c", PID: c.Process.Pid})
	if !errors.Is(err, process.ErrEnded) || !strings.Contains(err.Error(), `container "c"`) ||
		strings.Contains(err.Error(), "/proc/") {
		t.Errorf("%v", err)
	}
}
