package testutil

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// failure is a fake test that records a failure.
type failure struct {
	testing.TB
	text string
}

func (f *failure) Helper() {}
func (f *failure) Fatalf(format string, arguments ...any) {
	f.text = fmt.Sprintf(format, arguments...)
	runtime.Goexit()
}

func failureOf(run func(t testing.TB)) string {
	f := &failure{}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		run(f)
	}()
	<-ended
	return f.text
}

// elapse returns a wait for which the clock shows this elapsed time.
func elapse(w Wait, clock time.Duration) Wait {
	w.begin = w.begin.Add(-clock)
	return w
}

func TestWaitIsOverAfterItsLimitWithoutLoad(t *testing.T) {
	if elapse(Begin(), limit/2).Over() {
		t.Error("a wait is over before its limit")
	}
	if !elapse(Begin(), limit+time.Second).Over() {
		t.Error("a wait is not over after its limit")
	}
	if !(Wait{}).Over() {
		t.Error("a wait that never began is not over")
	}
}

func TestWaitDoesNotCountTimeOfQueuedProcesses(t *testing.T) {
	w := elapse(Begin(), 2*limit)
	w.stalled -= limit + time.Second
	if w.Over() {
		t.Errorf("a wait of %v, of which the machine was overloaded for more than %v, is over", 2*limit, limit)
	}
	if w.rest() > limit {
		t.Errorf("the wait can last %v longer", w.rest())
	}
	w = elapse(Begin(), patience*limit+patience*time.Second)
	w.stalled -= time.Hour
	if !w.Over() {
		t.Error("on an overloaded machine a wait has no end")
	}
}

func TestUntilWaitsForItsCondition(t *testing.T) {
	n := 0
	Until(t, "the third look", func() bool { n++; return n == 3 })
	if n != 3 {
		t.Errorf("%d looks", n)
	}
}

func TestSucceedsNamesConditionAndLastError(t *testing.T) {
	message := failureOf(func(t testing.TB) {
		(&lastError{t, new(error)}).Fatalf("%s: waited 1m0s", "the door")
	})
	if !strings.HasPrefix(message, "the door: waited 1m0s: ") {
		t.Errorf("it says %q", message)
	}
	n := 0
	Succeeds(t, "two failures", func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	})
}

func TestReceiveReturnsTheValue(t *testing.T) {
	c := make(chan int)
	go func() { c <- 7 }()
	if got := Receive(t, "a number", c); got != 7 {
		t.Errorf("got %d", got)
	}
}

func TestContextOfAPastLimitIsADeadline(t *testing.T) {
	ctx, cancel := WithLimit(t.Context(), time.Millisecond)
	defer cancel()
	<-ctx.Done() // later if processes queue
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Errorf("the context's error is %v, want that of a deadline", ctx.Err())
	}
	ctx, cancel = WithLimit(t.Context(), time.Hour)
	cancel()
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.Errorf("the error of a canceled context is %v", ctx.Err())
	}
}

func TestReadStallReturnsTotalOfSome(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cpu")
	if err := os.WriteFile(path, []byte("some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 "+
		"avg60=0.00 avg300=0.00 total=7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := readStall(path); got != 2500*time.Millisecond {
		t.Errorf("got %v", got)
	}
	if got := readStall(filepath.Join(t.TempDir(), "none")); got != 0 {
		t.Errorf("without the file: %v", got)
	}
}
