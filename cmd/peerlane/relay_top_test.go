package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/relay/launch"
)

func TestTopTableShowsStalls(t *testing.T) {
	rate := control.Rate{GPU: "0000:17:00.0", Sends: true, Bytes: 60e9, Operations: 3000, InFlight: 16, P50: 81.23,
		P99:    1250,
		Stalls: []launch.Stall{{Cause: launch.StallNoGrant, Count: 9, Time: 3 * time.Second}}}
	byClient := rate
	byClient.InPlace = 45e9
	byClient.Stalls = []launch.Stall{{Cause: launch.StallNoSlot, Waiting: 3, Longest: 12 * time.Second},
		{Cause: launch.StallRingFull, Count: 1, Time: time.Second, Waiting: 1, Longest: time.Millisecond}}
	connection := rate
	connection.PID, connection.Program, connection.Number = 4711, launch.ProgramNIXL, 3
	connection.Peer, connection.Route = "container \x1b[2Jb",
		launch.RouteStaged
	a := &app{out: terminal.New(&bytes.Buffer{})}
	text := a.topText([]control.Rates{
		{Container: "trainer", Seconds: 2, Lanes: []control.Rate{rate, byClient}, Connections: []control.Rate{connection},
			MoreConnections: 5},
		{Container: "idle"}, {Container: "dead", NoReport: "its relay is down"},
	}, true)
	for _, want := range []string{
		`trainer +0000:17:00.0 +sends +30.00 +1,500 +16 +0 +81.2µs +1.25ms +no_grant 1.5`,
		`trainer +0000:17:00.0 +sends, 75 % in place +30.00 .*no_slot \(3 now, for 12s\), ring_full 0.5 \(1 now, for 1ms\)`,
		`trainer +4711 NIXL +3, staged with container .\[2Jb +0000:17:00.0 +sends`,
		`idle .*nothing has been sent or received`, `5 more connections`, `dead: its relay is down`,
	} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Error("a peer's name reaches the terminal as it is")
	}
}

func TestTopWithoutRelaysPrintsNone(t *testing.T) {
	root := t.TempDir()
	if out := peerlane(t, "relay", "top", "--root", root, "--interval", "10ms"); out != "No container has a relay.\n" {
		t.Errorf("top printed %q", out)
	}
	if got := decode[[]control.Rates](t, "relay", "top", "--root", root, "--interval", "10ms", "-o", "json"); got == nil {
		t.Error("top -o json prints no list")
	}
	aGeneration(t, root, strings.Repeat("a", 31)+"1", "trainer")
	got := decode[[]control.Rates](t, "relay", "top", "trainer", "--root", root, "--interval", "10ms", "-o", "json")
	if len(got) != 1 || got[0].Container != "trainer" || got[0].NoReport == "" || got[0].Lanes == nil ||
		got[0].Connections == nil {
		t.Errorf("top of a relay without a supervisor gives %+v", got)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"relay", "top", "--interval", "1ns", "--root", root}, &out, &errOut); code != exitUsage {
		t.Errorf("an interval of 1 ns: exit status %d", code)
	}
}
