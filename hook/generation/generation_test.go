package generation

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/testprocess"
	"github.com/peerlane/peerlane/hook/process"
)

// layout returns a layout with the directories of state.
func layout(t *testing.T) paths.Layout {
	t.Helper()
	l := paths.New(t.TempDir())
	for _, dir := range []string{l.UIDs(), l.Generations()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// made writes a generation without a supervisor.
func made(t *testing.T, l paths.Layout, id string, created time.Time) *Generation {
	t.Helper()
	if err := os.Mkdir(l.GenerationDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	g := &Generation{ID: id, Created: created, Init: process.Process{PID: 1 << 30}}
	if err := g.Write(l); err != nil {
		t.Fatal(err)
	}
	return g
}

const (
	firstID  = "00000000000000000000000000000001"
	secondID = "00000000000000000000000000000002"
)

func TestStatusOfEndedRelayIsCorrected(t *testing.T) {
	ended := testprocess.Ended(t)
	dead := &ended
	own, pidfd, err := process.Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	pidfd.Close()
	for _, c := range []struct {
		name, state string
		relay       *process.Process
		supervised  bool
		want        string
	}{
		{"starting", StateStarting, dead, true, StateWaiting},
		{"ready", StateReady, dead, true, StateWaiting},
		{"draining", StateDraining, dead, true, StateWaiting},
		{"stopping", StateStopping, dead, true, StateWaiting},
		{"ready without a supervisor", StateReady, dead, false, StateDown},
		{"ending", StateEnding, dead, true, StateEnding},
		{"stopped without a supervisor", StateStopped, dead, false, StateStopped},
		{"a live relay", StateReady, &own, false, StateReady},
		{"no relay", StateReady, nil, false, StateReady},
	} {
		for _, before := range []string{"", "an earlier error"} {
			s := Status{State: c.state, Relay: c.relay, Error: before}
			if err := s.correct(c.supervised); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			corrected := c.relay == dead
			if s.State != c.want || (s.Relay == nil) != (corrected || c.relay == nil) {
				t.Errorf("%s: %+v, want state %s", c.name, s, c.want)
			}
			if before != "" && s.Error != before || before == "" && strings.Contains(s.Error, "has ended") != corrected {
				t.Errorf("%s: error %q after %q", c.name, s.Error, before)
			}
		}
	}
}

func TestListReturnsOldestFirstAndNamesUnreadable(t *testing.T) {
	l := layout(t)
	now := time.Now()
	made(t, l, firstID, now)
	made(t, l, secondID, now.Add(-time.Hour))
	for _, other := range []string{"not-an-id", strings.Repeat("g", 32)} {
		if err := os.Mkdir(filepath.Join(l.Generations(), other), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	const damaged, incomplete, foreign = "0000000000000000000000000000000a", "0000000000000000000000000000000b",
		"0000000000000000000000000000000c"
	made(t, l, damaged, now)
	if err := os.WriteFile(File(l, damaged), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(l.GenerationDir(incomplete), 0o700); err != nil {
		t.Fatal(err)
	}
	made(t, l, foreign, now).ID = firstID
	if err := os.WriteFile(File(l, foreign), []byte(`{"generation": "`+firstID+`"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := IDs(l); err != nil || !slices.Equal(got, []string{firstID, secondID, damaged, incomplete, foreign}) {
		t.Errorf("ids %v, %v", got, err)
	}
	infos, err := List(l)
	var ids []string
	for _, i := range infos {
		ids = append(ids, i.ID)
		if i.Alive || i.Supervised {
			t.Errorf("%s is alive: %t, supervised: %t", i.ID, i.Alive, i.Supervised)
		}
	}
	if want := []string{secondID, firstID}; !slices.Equal(ids, want) {
		t.Errorf("%v, want %v", ids, want)
	}
	if text := fmt.Sprint(err); !errors.Is(err, ErrTorn) || !strings.Contains(text, damaged) ||
		!strings.Contains(text, foreign) || strings.Contains(text, incomplete) {
		t.Errorf("%v; want an error of %s and %s alone", err, damaged, foreign)
	}
	if infos, err := List(paths.New(t.TempDir())); err != nil || infos != nil {
		t.Errorf("of a host without state: %v, %v", infos, err)
	}
}

func TestGenerationOfOtherMachineIsForeign(t *testing.T) {
	const own, other = firstID, secondID
	for _, c := range []struct {
		name, host, machine string
		want                bool
	}{
		{"this machine", own + "\n", own, false},
		{"another machine", own, other, true},
		{"a generation without a machine", own, "", false},
		{"a host without an id", "", other, false},
		{"a host with another form of id", "uninitialized", other, false},
	} {
		l := paths.New(t.TempDir())
		file := filepath.Join(l.Root, "etc/machine-id")
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(c.host), 0o644); err != nil {
			t.Fatal(err)
		}
		g := Generation{Machine: c.machine}
		if got := g.Foreign(l); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}

func TestIDHasThirtyTwoHexadecimalDigits(t *testing.T) {
	for name, want := range map[string]bool{
		NewID(): true, firstID: true, firstID[1:]: false, firstID + "0": false, strings.Repeat("F", 32): false,
		"": false,
	} {
		if got := IsID(name); got != want {
			t.Errorf("%q: %t", name, got)
		}
	}
	if first, second := NewID(), NewID(); first == second {
		t.Errorf("two generations have the id %s", first)
	}
}

func TestReadStatusDamagedFileIsZero(t *testing.T) {
	l := layout(t)
	made(t, l, firstID, time.Now())
	want := Status{State: StateReady, Starts: 2}
	for _, c := range []struct {
		name, text string
		want       Status
	}{
		{"no file", "", Status{}},
		{"a damaged file", "{", Status{}},
		{"a status", `{"state": "ready", "starts": 2}`, want},
	} {
		if c.text != "" {
			if err := os.WriteFile(StatusFile(l, firstID), []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := ReadStatus(l, firstID); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
}
