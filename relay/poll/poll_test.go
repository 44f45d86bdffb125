package poll

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
func TestDescriptorsHaveTheirTurn(t *testing.T) {
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

// counter is a poller with nothing to do. It counts the rounds between its turns.
type counter struct {
	busy          *tireless
	turns, before int
	longest       int
}

func (c *counter) Poll() bool {
	c.turns++
	if c.turns > 1 {
		c.longest = max(c.longest, c.before-c.busy.rounds)
	}
	c.before = c.busy.rounds
	return false
}
func (c *counter) Busy() bool { return false }
func (c *counter) Arm() bool  { return false }
func (c *counter) Disarm()    {}

// Pollers that have had nothing for a while have fewer turns, and none waits for more than eight
// rounds.
func TestIdlePollersHaveATurnInEightRounds(t *testing.T) {
	l, err := New()
	if err != nil {
		t.Fatal(err)
	}
	const rounds = 100_000
	busy := &tireless{l, rounds}
	l.Add(busy)
	var idle []*counter
	for range 20 {
		c := &counter{busy: busy}
		idle = append(idle, c)
		l.Add(c)
	}
	l.Run()
	for i, c := range idle {
		if c.longest > coldRounds || c.turns < rounds/coldRounds || c.turns > rounds/2 {
			t.Errorf("poller %d had %d turns in %d rounds, and waited %d rounds for one", i, c.turns, rounds, c.longest)
		}
	}
}

// BenchmarkRoundBesideIdlePollers is a round of a loop that has 100 pollers, one of which has
// something to do.
func BenchmarkRoundBesideIdlePollers(b *testing.B) {
	l, err := New()
	if err != nil {
		b.Fatal(err)
	}
	busy := &tireless{l, b.N}
	l.Add(busy)
	for range 99 {
		l.Add(&counter{busy: busy})
	}
	b.ResetTimer()
	l.Run()
}

// BenchmarkRound is a round of a loop that has something to do.
func BenchmarkRound(b *testing.B) {
	l, err := New()
	if err != nil {
		b.Fatal(err)
	}
	l.Add(&tireless{l, b.N})
	b.ResetTimer()
	l.Run()
}
