package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/relay/launch"
)

func TestHostWithoutRelaysPrintsNone(t *testing.T) {
	root := t.TempDir()
	if out := peerlane(t, "relay", "list", "--root", root); out != "No container has a relay.\n" {
		t.Errorf("list printed %q", out)
	}
	if relays := decode[[]generation.Info](t, "relay", "list", "--root", root, "-o", "json"); relays == nil ||
		len(relays) > 0 {
		t.Errorf("list -o json printed %v, want an empty list", relays)
	}
	if out := peerlane(t, "relay", "gc", "--root", root); out != "Nothing is left to remove.\n" {
		t.Errorf("gc printed %q", out)
	}
	got := decode[struct{ Removed []string }](t, "relay", "gc", "--root", root, "-o", "json")
	if got.Removed == nil || len(got.Removed) > 0 {
		t.Errorf("gc -o json printed %v, want an empty list", got.Removed)
	}
}

func TestRelayTableShowsStates(t *testing.T) {
	g := generation.Generation{
		ID:        "0123456789abcdef0123456789abcdef",
		Container: generation.Container{ID: "trainer"},
		Init:      process.Process{PID: 4711},
		Created:   time.Now().Add(-3 * time.Hour),
		Config:    launch.Config{Lanes: []launch.Lane{{GPU: launch.GPU{Index: 3}}, {GPU: launch.GPU{Index: 7}}}},
	}
	var out bytes.Buffer
	a := &app{out: terminal.New(&out)}
	relays := []generation.Info{
		{Generation: g, Supervised: true, Status: generation.Status{State: generation.StateReady,
			Relay: &process.Process{PID: 4712}, Starts: 2}},
		{Generation: g, Supervised: true, Status: generation.Status{State: generation.StateDown, Starts: 5,
			Error: "no libcuda"}},
		{Generation: g, Supervised: true},
		{Generation: g, Status: generation.Status{State: generation.StateReady}},
	}
	table := a.relayTable(relays, formWide).Render().String()
	id := g.ID
	for _, want := range []string{
		id + ` +trainer +- +4711 +3, 7 +4712 +2 +3 hours ago +ready +-`,
		id + ` +trainer +- +4711 +3, 7 +- +5 +3 hours ago +down +no libcuda`,
		id + ` +trainer +- +4711 +3, 7 +- +0 +3 hours ago +starting +-`,
		id + ` +trainer +- +4711 +3, 7 +- +0 +3 hours ago +left +-`,
	} {
		if !regexp.MustCompile(want).MatchString(table) {
			t.Errorf("no row %q in\n%s", want, table)
		}
	}
	// The table fits 100 columns although engine ids have 64 characters and errors are sentences.
	relays[0].Container.ID = strings.Repeat("0123456789abcdef", 4)
	for range 16 {
		relays[1].Config.Lanes = append(relays[1].Config.Lanes, launch.Lane{GPU: launch.GPU{Index: 12}})
	}
	relays[1].Status.Error = strings.Repeat("the driver's library cannot be loaded ", 5)
	table = a.relayTable(relays, formTable).Render().String()
	for line := range strings.Lines(table) {
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > columns {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
	for _, want := range []string{`(?m)^0123456789ab +- +3, 7 +2 +3 hours ago +ready`, `trainer +- +18 GPUs +5 `} {
		if !regexp.MustCompile(want).MatchString(table) {
			t.Errorf("no row %q in\n%s", want, table)
		}
	}
}
