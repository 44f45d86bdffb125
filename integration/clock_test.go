package integration_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/internal/testutil"
)

// The host's clock jumps by years in both directions, as on a host with an empty battery: relays go
// on, a restarted relay serves, and containers start and end.
func TestClockJumpsRelaysServe(t *testing.T) {
	if os.Getenv("PEERLANE_VM_HEAVY") == "" {
		t.Skip("needs a machine of its own, whose clock it sets; make vm-long runs it")
	}
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			begun, right := time.Now(), time.Now()
			jump := func(by time.Duration) {
				t.Helper()
				// Since uses the monotonic clock
				to := unix.NsecToTimespec(right.Round(0).Add(time.Since(begun)).Add(by).UnixNano())
				if err := unix.ClockSettime(unix.CLOCK_REALTIME, &to); err != nil {
					t.Fatal(err)
				}
			}
			defer jump(0)
			const year = 365 * 24 * time.Hour
			a, _ := b.streaming("stream", "rounds")
			for _, by := range []time.Duration{3 * year, -20 * year, 10 * time.Second, -10 * time.Second} {
				jump(by)
				a.goesOn()
				c := b.start(b.lanes[0], "hold")
				c.next("hello")
				i := b.inspection(c)
				kill(t, i.Status.Relay.PID)
				c.exec("hello") // the next relay serves
				jump(0)
				a.goesOn()
				c.end()
				testutil.Succeeds(t, fmt.Sprintf("the end of a container after a jump by %v", by), func() error {
					left, err := control.Find(b.Layout, c.id)
					if len(left) > 0 {
						return fmt.Errorf("%+v is left, %v", left, err)
					}
					return nil
				})
			}
		})
	}
}
