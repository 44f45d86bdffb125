package generation

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// After the kill of a supervisor, its relay can outlive the generation for a moment. A sweep then
// keeps the mark of the uid. ReturnUID waits until the relay has ended, and removes the mark.
func TestReturnUIDOfADyingRelayRemovesItsMark(t *testing.T) {
	l := paths.New(t.TempDir())
	const uid = 2000000001
	for _, dir := range []string{l.UIDs(), l.Generations()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	relay := exec.Command("sleep", "0.3")
	if err := relay.Start(); err != nil {
		t.Fatal(err)
	}
	process, pidfd, err := process.Identify(relay.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer pidfd.Close()
	text, err := json.Marshal(process)
	if err != nil {
		t.Fatal(err)
	}
	mark := uidMark(l, uid)
	if err := os.WriteFile(mark, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := SweepUIDs(l); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(mark); err != nil {
		t.Fatalf("the sweep removed the mark of a live relay: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- relay.Wait() }()
	g := &Generation{}
	g.Sandbox.UID = uid
	if err := g.ReturnUID(l); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(mark); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there, %v", filepath.Base(mark), err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestLinkUIDTakesEachUIDOnce(t *testing.T) {
	l := layout(t)
	made(t, l, firstID, time.Now())
	if err := MakeSupervisorLock(l, firstID); err != nil {
		t.Fatal(err)
	}
	var taken []int
	for range 3 {
		uid, err := LinkUID(l, firstID, 2000000001, 2000000003)
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, uid)
	}
	slices.Sort(taken)
	if want := []int{2000000001, 2000000002, 2000000003}; !slices.Equal(taken, want) {
		t.Errorf("uids %v, want %v", taken, want)
	}
	if uid, err := LinkUID(l, firstID, 2000000001, 2000000003); uid != 0 || err != nil {
		t.Errorf("uid %d of none, %v", uid, err)
	}
	if uid, err := LinkUID(l, secondID, 2000000004, 2000000004); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("uid %d of a generation without a lock, %v", uid, err)
	}
}

func TestReleaseUIDRemovesOwnMarkOnly(t *testing.T) {
	l := layout(t)
	made(t, l, firstID, time.Now())
	if err := MakeSupervisorLock(l, firstID); err != nil {
		t.Fatal(err)
	}
	lock, err := os.OpenFile(SupervisorLock(l, firstID), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	const uid, other = 2000000001, 2000000002
	if err := os.Link(SupervisorLock(l, firstID), uidMark(l, uid)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(uidMark(l, other), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		uid  int
		left []int
	}{
		{"no uid", 0, []int{uid, other}},
		{"a uid of another generation", other, []int{uid, other}},
		{"a uid without a mark", 2000000009, []int{uid, other}},
		{"the own uid", uid, []int{other}},
	} {
		g := &Generation{ID: firstID}
		g.Sandbox.UID = c.uid
		if err := g.ReleaseUID(l, lock); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		var left []int
		for _, u := range []int{uid, other} {
			if _, err := os.Lstat(uidMark(l, u)); err == nil {
				left = append(left, u)
			}
		}
		if !slices.Equal(left, c.left) {
			t.Errorf("%s: marks of %v, want %v", c.name, left, c.left)
		}
	}
}

func TestRecordedRelayOtherTextIsNone(t *testing.T) {
	relay := process.Process{PID: 7, Start: 8, Boot: "b"}
	for name, c := range map[string]struct {
		text string
		want *process.Process
	}{
		"a record":            {`{"pid": 7, "start": 8, "boot": "b"}`, &relay},
		"empty":               {"", nil},
		"no JSON":             {"{", nil},
		"no pid":              {"{}", nil},
		"pid 0":               {`{"pid": 0}`, nil},
		"pid 1":               {`{"pid": 1}`, &process.Process{PID: 1}},
		"a blank":             {strings.Repeat(" ", 2000) + `{"pid": 7}`, nil},
		"the limit of length": {strings.Repeat(" ", 1024-len(`{"pid": 7}`)) + `{"pid": 7}`, &process.Process{PID: 7}},
		"above the limit":     {strings.Repeat(" ", 1025-len(`{"pid": 7}`)) + `{"pid": 7}`, nil},
	} {
		path := filepath.Join(t.TempDir(), "lock")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := recordedRelay(f); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if err := RecordRelay(f, relay); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != `{"pid":7,"start":8,"boot":"b"}` {
			t.Errorf("%s: %q after a record, %v", name, text, err)
		}
		f.Close()
	}
}

func TestOrphansAreMarksWithoutGeneration(t *testing.T) {
	l := layout(t)
	for _, name := range []string{"1", "5", "6", "0", "-3", "text", "7x"} {
		if err := os.WriteFile(filepath.Join(l.UIDs(), name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(l.UIDs(), "6"), filepath.Join(l.Generations(), "lock")); err != nil {
		t.Fatal(err)
	}
	if got, err := orphans(l); err != nil || !slices.Equal(got, []int{1, 5}) {
		t.Errorf("%v, %v", got, err)
	}
	if err := SweepUIDs(l); err != nil {
		t.Error(err)
	}
	if got, err := orphans(l); err != nil || got != nil {
		t.Errorf("%v after a sweep, %v", got, err)
	}
	if got, err := orphans(paths.New(t.TempDir())); err != nil || got != nil {
		t.Errorf("without state: %v, %v", got, err)
	}
}

func TestClaimUIDOfOneUIDTakesIt(t *testing.T) {
	l := layout(t)
	made(t, l, firstID, time.Now())
	if err := MakeSupervisorLock(l, firstID); err != nil {
		t.Fatal(err)
	}
	g := &Generation{ID: firstID}
	g.Sandbox.Mode, g.Sandbox.Group = config.SandboxAuto, 2000000000
	if err := g.ClaimUID(l, config.Relay{UIDs: "2000000000-2000000001"}); err != nil || g.Sandbox.UID != 2000000001 {
		t.Errorf("uid %d, %v", g.Sandbox.UID, err)
	}
}

// A mark that cannot be read stays, because a relay may run with the uid.
func TestUnreadableMarkStaysAndFails(t *testing.T) {
	l := layout(t)
	const uid = 2000000001
	mark := uidMark(l, uid)
	if err := os.Symlink(mark, mark); err != nil {
		t.Fatal(err)
	}
	made(t, l, firstID, time.Now())
	if err := MakeSupervisorLock(l, firstID); err != nil {
		t.Fatal(err)
	}
	g := &Generation{ID: firstID}
	g.Sandbox.Mode, g.Sandbox.Group, g.Sandbox.UID = config.SandboxAuto, uid-1, uid
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"sweep", func() error { return SweepUIDs(l) }},
		{"return", func() error { return g.ReturnUID(l) }},
		{"claim", func() error { return g.ClaimUID(l, config.Relay{UIDs: "2000000000-2000000001"}) }},
	} {
		if err := c.call(); !errors.Is(err, unix.ELOOP) {
			t.Errorf("%s: %v", c.name, err)
		}
		if _, err := os.Lstat(mark); err != nil {
			t.Errorf("%s: the mark is gone: %v", c.name, err)
		}
	}
}

func TestSweepUIDsClosesMarks(t *testing.T) {
	l := layout(t)
	own, pidfd, err := process.Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	pidfd.Close()
	mark, err := os.OpenFile(uidMark(l, 2000000001), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(RecordRelay(mark, own), mark.Close(), SweepUIDs(l)); err != nil {
		t.Fatal(err)
	}
	if n := testutil.Descriptors(t, mark.Name()); n != 0 {
		t.Errorf("%d descriptors of a running relay's mark are open", n)
	}
}

func TestMarksUnreadableDirectoryFails(t *testing.T) {
	l := paths.New(t.TempDir())
	if err := os.MkdirAll(filepath.Dir(l.UIDs()), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.UIDs(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(paths.Layout) error{"all": SweepUIDs, "locked": SweepUIDsLocked} {
		if err := call(l); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClaimUIDTakesFreeUIDOfRange(t *testing.T) {
	l := layout(t)
	settings := config.Relay{UIDs: "2000000000-2000000002"} // the first is the group
	claim := func(id, mode string, group int) (int, error) {
		if _, err := os.Stat(l.GenerationDir(id)); err != nil {
			made(t, l, id, time.Now())
			if err := MakeSupervisorLock(l, id); err != nil {
				t.Fatal(err)
			}
		}
		g := &Generation{ID: id}
		g.Sandbox.Mode, g.Sandbox.Group = mode, group
		err := g.ClaimUID(l, settings)
		return g.Sandbox.UID, err
	}
	const thirdID = "00000000000000000000000000000003"
	for _, c := range []struct {
		name, mode string
		group      int
	}{{"no sandbox", config.SandboxOff, 2000000000}, {"no group", config.SandboxAuto, 0}} {
		if uid, err := claim(firstID, c.mode, c.group); uid != 0 || err != nil {
			t.Errorf("%s: uid %d, %v", c.name, uid, err)
		}
	}
	first, err := claim(firstID, config.SandboxAuto, 2000000000)
	if err != nil {
		t.Fatal(err)
	}
	second, err := claim(secondID, config.SandboxAuto, 2000000000)
	got := []int{min(first, second), max(first, second)}
	if want := []int{2000000001, 2000000002}; err != nil || !slices.Equal(got, want) {
		t.Errorf("uids %v, %v; want %v", got, err, want)
	}
	uid, err := claim(thirdID, config.SandboxAuto, 2000000000)
	if f, ok := errors.AsType[*fault.Error](err); uid != 0 || !ok || f.Code != fault.NoRelayUID ||
		f.Operation != "all 2 uids of relays are taken" {
		t.Errorf("uid %d of none, %v", uid, err)
	}
	// The mark of a removed generation is free.
	if err := os.RemoveAll(l.GenerationDir(firstID)); err != nil {
		t.Fatal(err)
	}
	if uid, err := claim(thirdID, config.SandboxAuto, 2000000000); uid != first || err != nil {
		t.Errorf("uid %d, %v; want %d of the removed generation", uid, err, first)
	}
	settings.UIDs = "none"
	if uid, err := claim(firstID, config.SandboxAuto, 2000000000); uid != 0 || err == nil {
		t.Errorf("uid %d of a wrong range", uid)
	}
}
