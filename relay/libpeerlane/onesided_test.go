package libpeerlane_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

func TestCOneSidedOperationsMoveAllBytes(t *testing.T) {
	for _, k := range []kind{plain, address} { // the program has a single thread
		if why := lacks(t, k); why != "" {
			t.Logf("without -fsanitize=%s: %s", k, why)
			continue
		}
		a, b := newHost(t).pair(launch.RouteStaged, 0, 1)
		start(t, program(t, "tests", "onesided", k), a, b, devices[0].UUID, devices[1].UUID).end()
	}
}

// The example with a stopped owner.
func TestRemoteMemoryOfStoppedProgramIsReadable(t *testing.T) {
	const bytes, seed = 3_000_001, 41
	remote := program(t, "examples", "remote", plain)
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			a, b := newHost(t).pair(route, 0, 1)
			offers := start(t, remote, b, devices[1].UUID, "offer", fmt.Sprint(bytes), fmt.Sprint(seed))
			handle, key, _ := strings.Cut(offers.line(), " ")
			offers.stop()
			changes := start(t, remote, a, devices[0].UUID, "change", handle, key, fmt.Sprint(bytes), fmt.Sprint(seed))
			if got, want := changes.end(), fmt.Sprintf("changed %d bytes\n", bytes); got != want {
				t.Errorf("it says %q, not %q", got, want)
			}
			if !offers.stopped() {
				t.Error("it was not stopped all the time")
			}
			if err := offers.Process.Signal(unix.SIGCONT); err != nil {
				t.Fatal(err)
			}
			offers.say("look")
			if got, want := offers.end(), fmt.Sprintf("were changed: %d bytes\n", bytes); got != want {
				t.Errorf("it says %q, not %q", got, want)
			}
		})
	}
}

// stop stops the program, and waits for the stop.
func (p *process) stop() {
	p.Helper()
	if err := p.Process.Signal(unix.SIGSTOP); err != nil {
		p.Fatal(err)
	}
	for end := testutil.Begin(); !p.stopped(); time.Sleep(time.Millisecond) {
		if end.Over() {
			p.Fatalf("%s does not stop", p.name)
		}
	}
}

func (p *process) stopped() bool {
	p.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	if err != nil {
		p.Fatal(err)
	}
	return strings.HasPrefix(string(text[strings.LastIndexByte(string(text), ')')+1:]), " T ")
}
