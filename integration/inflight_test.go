package integration_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/attack"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// hoardDescriptors takes a uid on one thread and puts as many descriptors in flight as the kernel
// permits a process with this limit of open files. It prints the number, and stays until the end of
// input.
func hoardDescriptors(arguments []string) error {
	uid, err := strconv.ParseUint(arguments[0], 10, 32)
	if err != nil {
		return err
	}
	limit, err := strconv.ParseUint(arguments[1], 10, 64)
	if err != nil {
		return err
	}
	sent, err := attack.DescriptorsInFlight(uint32(uid), limit)
	if err != nil {
		return err
	}
	emit(event{Kind: "in flight", Error: strconv.FormatUint(sent, 10)})
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// openFiles returns a process's limit of open files.
func openFiles(t *testing.T, pid int) (soft uint64) {
	t.Helper()
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/limits", pid))) {
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok {
			soft, err := strconv.ParseUint(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return soft
		}
	}
	t.Fatal("no limit of open files")
	return 0
}

// The kernel counts descriptors in flight per user of the sender and compares the count with the
// sender's own limit of open files. A process of a relay's uid with a smaller limit blocks no
// attach. With the relay's limit the process blocks new attaches to that relay until the process
// ends. The relay's process, attached clients and other relays go on.
func TestDescriptorsInFlightOfARelayUIDBlockNewAttachesOnly(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			a, z := b.streaming("stream", "rounds")
			i := b.inspection(a)
			limit := openFiles(t, i.Status.Relay.PID)
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			inFlight := func(limit uint64) *container {
				c := b.follow(fmt.Sprintf("%s-in-flight-%d", a.id, limit),
					exec.Command(self, "role", "in-flight", fmt.Sprint(i.Sandbox.Relay.UID), fmt.Sprint(limit)),
					func(context.Context) error { return nil })
				sent, err := strconv.ParseUint(c.next("in flight").Error, 10, 64)
				if err != nil || sent < limit {
					t.Fatalf("%d descriptors are in flight, %v", sent, err)
				}
				return c
			}

			smaller := inFlight(limit - 1000)
			a.exec("hello")
			smaller.end()

			same := inFlight(limit)
			ctx, cancel := testutil.WithLimit(t.Context(), time.Minute)
			defer cancel()
			out, err := b.runtime.Command(ctx, "exec", a.id, "/usr/bin/test", "role", "hello").CombinedOutput()
			var ended *exec.ExitError
			if !errors.As(err, &ended) || !strings.Contains(string(out), "["+string(fault.LimitMet)+"]") {
				t.Errorf("a process attaches while %d descriptors of the relay's uid are in flight: %v: %s", limit, err, out)
			}
			a.goesOn()
			z.exec("hello")
			same.end()
			a.exec("hello")
			if after := b.inspection(a); after.Status.Relay.PID != i.Status.Relay.PID || after.Status.Starts != 1 {
				t.Errorf("the relay was started again: %+v", after.Status)
			}
		})
	}
}
