// Package testutil compares errors and waits in tests. The limits of waits follow the progress of
// the machine and not the clock: time in which processes queue for a processor does not count, so
// that a test beside other load waits longer and does not fail.
//
// Package testutil imports no other package of Peerlane, so that the tests of every package can use
// it.
package testutil

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	// limit is the default limit of a wait on an idle machine.
	limit = time.Minute
	// patience is the largest factor by which load extends a wait. Ten minutes are less than the
	// idle time of integration/confine, so that the report names the waiting test.
	patience = 10
	// interval is the time between two checks of a condition.
	interval = 2 * time.Millisecond
)

// Wait is a wait that has begun. The zero Wait is over.
type Wait struct {
	begin   time.Time
	stalled time.Duration
	limit   time.Duration
}

// Begin begins a wait of one minute on an idle machine.
func Begin() Wait { return BeginFor(limit) }

// BeginFor begins a wait with a limit for an idle machine.
func BeginFor(limit time.Duration) Wait {
	return Wait{begin: time.Now(), stalled: stalled(), limit: limit}
}

// Over reports whether the wait has reached the limit: the elapsed time, less the time in which a
// process queued for a processor.
func (w Wait) Over() bool {
	elapsed := time.Since(w.begin)
	return elapsed > w.limit && elapsed-w.queued(elapsed) > w.limit
}

// queued returns the part of the elapsed time that does not count.
func (w Wait) queued(elapsed time.Duration) time.Duration {
	return min(stalled()-w.stalled, elapsed/patience*(patience-1))
}

// rest returns the shortest time after which the wait can be over.
func (w Wait) rest() time.Duration {
	elapsed := time.Since(w.begin)
	return max(interval, w.limit+w.queued(elapsed)-elapsed)
}

// Until waits until a condition holds. At the end of the wait, Until fails the test with the
// description of the condition.
func Until(t testing.TB, condition string, holds func() bool) {
	t.Helper()
	for w := Begin(); !holds(); time.Sleep(interval) {
		if w.Over() {
			t.Fatalf("%s: waited %v", condition, time.Since(w.begin).Round(time.Second))
		}
	}
}

// Succeeds waits until a function returns no error. At the end of the wait, Succeeds fails the test
// with the last error.
func Succeeds(t testing.TB, what string, try func() error) {
	t.Helper()
	var err error
	Until(&lastError{t, &err}, what, func() bool { err = try(); return err == nil })
}

// lastError adds an error to the message of a failure.
type lastError struct {
	testing.TB
	err *error
}

func (l *lastError) Fatalf(format string, arguments ...any) {
	l.Helper()
	l.TB.Fatalf("%s: %v", fmt.Sprintf(format, arguments...), *l.err)
}

// Receive receives a value from a channel; the zero value from a closed channel. At the end of the
// wait, Receive fails the test.
func Receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	w := Begin()
	for {
		timer := time.NewTimer(w.rest())
		select {
		case v := <-c:
			timer.Stop()
			return v
		case <-timer.C:
			if w.Over() {
				t.Fatalf("receiving %s: waited %v", what, time.Since(w.begin).Round(time.Second))
			}
		}
	}
}

// Context returns a context that is canceled when a wait is over, and at the test's end.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := WithLimit(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// WithLimit is context.WithTimeout with a limit for an idle machine.
func WithLimit(parent context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(parent, patience*limit)
	c := &limited{Context: ctx}
	w := BeginFor(limit)
	var mu sync.Mutex
	var timer *time.Timer
	mu.Lock()
	timer = time.AfterFunc(limit, func() {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case ctx.Err() != nil:
		case w.Over():
			c.over.Store(true)
			cancel()
		default:
			timer.Reset(w.rest())
		}
	})
	mu.Unlock()
	return c, func() { timer.Stop(); cancel() }
}

// After is time.After with a limit for an idle machine: it returns a channel that is closed at the
// end of the wait.
func After(limit time.Duration) <-chan struct{} {
	ctx, cancel := WithLimit(context.Background(), limit)
	context.AfterFunc(ctx, cancel)
	return ctx.Done()
}

// Deadline returns the latest end of a wait on any machine, for operations that need a point in
// time, such as the deadline of a socket.
func Deadline() time.Time { return time.Now().Add(patience * limit) }

// limited is a context that ends with a wait.
type limited struct {
	context.Context
	over atomic.Bool
}

func (c *limited) Err() error {
	err := c.Context.Err()
	if errors.Is(err, context.Canceled) && c.over.Load() {
		return context.DeadlineExceeded
	}
	return err
}

// pressure is the kernel's file with the time for which processes have queued.
const pressure = "/proc/pressure/cpu"

var lastStall struct {
	sync.Mutex
	at    time.Time
	total time.Duration
}

// stalled returns the time since boot in which a process queued for a processor; 0 if the kernel
// does not measure it.
func stalled() time.Duration {
	lastStall.Lock()
	defer lastStall.Unlock()
	if time.Since(lastStall.at) > 50*time.Millisecond {
		lastStall.total = readStall(pressure)
		lastStall.at = time.Now()
	}
	return lastStall.total
}

func readStall(path string) time.Duration {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for _, word := range strings.Fields(string(text)) { // the first line is "some"
		var microseconds int64
		if n, _ := fmt.Sscanf(word, "total=%d", &microseconds); n == 1 {
			return time.Duration(microseconds) * time.Microsecond
		}
	}
	return 0
}
