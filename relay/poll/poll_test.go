package poll

import (
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
)

// tireless is a poller that always has more to do, for so many rounds.
type tireless struct {
	loop   *Loop
	rounds int
}

func (p *tireless) Poll() bool {
	if p.rounds--; p.rounds <= 0 {
		p.loop.Stop()
	}
	return true
}
func (p *tireless) Busy() bool { return false }
func (p *tireless) Arm() bool  { return false }
func (p *tireless) Disarm()    {}

// A descriptor that becomes ready has its turn however much there is to do.
func TestReadyDescriptorsAreServedUnderLoad(t *testing.T) {
	l, err := New()
	if err != nil {
		t.Fatal(err)
	}
	rung, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(rung)
	heard := false
	l.Add(&tireless{l, 1 << 40})
	if err := l.Watch(rung, func(uint32) {
		heard = true
		l.Stop()
	}); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(time.Minute, l.Stop)
	defer late.Stop()
	time.AfterFunc(10*time.Millisecond, func() { Ring(rung) })
	l.Run()
	if !heard {
		t.Error("a descriptor that was ready was not heard of in a minute")
	}
}

// armed counts how often the loop wants to sleep.
type armed struct {
	spin time.Duration
	n    atomic.Int64
}

func (a *armed) Poll() bool          { return false }
func (a *armed) Busy() bool          { return false }
func (a *armed) Arm() bool           { a.n.Add(1); return false }
func (a *armed) Disarm()             {}
func (a *armed) Spin() time.Duration { return a.spin }

func TestSpinnerKeepsLoopFromSleep(t *testing.T) {
	for _, spin := range []time.Duration{0, time.Hour} {
		l, err := New()
		if err != nil {
			t.Fatal(err)
		}
		a := &armed{spin: spin}
		l.Add(a)
		ended := make(chan bool)
		go func() { l.Run(); close(ended) }()
		if spin == 0 {
			testutil.Until(t, "the loop to sleep", func() bool { return a.n.Load() > 0 })
		} else {
			time.Sleep(20 * SpinTime)
		}
		l.Stop()
		<-ended
		if n := a.n.Load(); spin > 0 && n > 0 {
			t.Errorf("the loop has slept %d times beside a poller that asks it to spin", n)
		}
	}
}

// BenchmarkIteration is a round of a loop that has something to do.
func BenchmarkIteration(b *testing.B) {
	l, err := New()
	if err != nil {
		b.Fatal(err)
	}
	l.Add(&tireless{l, b.N})
	b.ResetTimer()
	l.Run()
}
