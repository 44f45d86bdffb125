package verbs

import (
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// portA sets the port of device a0 down or active.
func (w *two) portA(t *testing.T, down bool) {
	t.Helper()
	if err := devices(func(a, _ *softdevice.Device) { a.Down = down })(w); err != nil {
		t.Fatal(err)
	}
}

// flap takes the link of a port away for length during writes, and demands that every write arrives
// once.
func flap(t *testing.T, w *two, length time.Duration) (reconnects int) {
	t.Helper()
	s := newStream(w)
	if err := w.rdma.Script(slow); err != nil {
		t.Fatal(err)
	}
	s.begin()
	receive(t, s.done, "the first write's end")
	s.done <- nil
	w.portA(t, true)
	w.a.until("the port's event", func(s *QPGroup) bool { return s.fabric.ports[s.fabric.nics[0]] == 1 })
	time.Sleep(length)
	w.portA(t, false)
	s.mustEnd(t)
	w.a.loop.Call(func() { reconnects = w.a.set.reconnects })
	return reconnects
}

// patient sets the default limits of relays.
func patient(_ string, c *Config) {
	c.Timeout = launch.DefaultVerbs.Timeout
	c.Reconnect, c.PortWait = 0, 0
}

// TestShortFlapKeepsQueuePairs demands that a short loss of a link costs no queue pair.
func TestShortFlapKeepsQueuePairs(t *testing.T) {
	t.Parallel()
	if reconnects := flap(t, connected(t, patient), 300*time.Millisecond); reconnects != 0 {
		t.Errorf("the queue pairs were replaced %d times", reconnects)
	}
}

// TestFlapOf30SecondsLosesNothing demands that the defaults outlast a flap of 30 s.
func TestFlapOf30SecondsLosesNothing(t *testing.T) {
	t.Parallel()
	for name, timeout := range map[string]int{"the default timeout": launch.DefaultVerbs.Timeout,
		"a timeout of 0.5 s": 14} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := connected(t, patient, func(_ string, c *Config) { c.Timeout = timeout })
			if reconnects := flap(t, w, 30*time.Second); reconnects == 0 {
				t.Error("the queue pairs were not replaced")
			}
		})
	}
}

// TestAliveFollowsRDMAWrites demands that a group reports the peer alive for the length of the silence after a
// write, and while a port of this side has no link.
func TestAliveFollowsRDMAWrites(t *testing.T) {
	w := connected(t, func(_ string, c *Config) { c.PortWait = time.Hour })
	const silence = time.Minute
	if left := w.a.set.Alive(silence); left > silence {
		t.Errorf("the other relay counts as alive for %v without a write", left)
	}
	w.a.loop.Call(func() { w.a.set.signs.Store(0) })
	if left := w.a.set.Alive(silence); left != 0 {
		t.Errorf("the other relay counts as alive for %v without a sign", left)
	}
	write := w.granted(t, 1)
	done := make(chan error, 1)
	w.a.loop.Call(func() { write(func(err error) { done <- err }) })
	if err := receive(t, done, "the write's end"); err != nil {
		t.Fatal(err)
	}
	receive(t, w.arrived, "the arrival")
	for name, e := range map[string]*side{"sender": w.a, "receiver": w.b} {
		e.until("a sign of the "+name, func(s *QPGroup) bool {
			left := s.Alive(silence)
			return left > silence/2 && left <= silence
		})
	}
	w.portA(t, true)
	w.a.until("the port's event", func(s *QPGroup) bool { return len(s.downs) == 1 })
	if left := w.a.set.Alive(silence); left < silence+time.Second {
		t.Errorf("without a link the other relay counts as alive for %v, want nearly %v", left, waitTime)
	}
	w.portA(t, false)
	w.a.until("the port", func(s *QPGroup) bool { return len(s.downs) == 0 })
}

// TestSecondPortUpKeepsExcuseOfPortWithoutLink demands that a returning port does not shorten the
// grace period of another port without a link, and that the last returning port does.
func TestSecondPortUpKeepsExcuseOfPortWithoutLink(t *testing.T) {
	s := &QPGroup{fabric: &Fabric{config: Config{Reconnect: waitTime}}}
	a, b := &nic{context: new(verbs.Context)}, &nic{context: new(verbs.Context)}
	s.portDown(a)
	s.portDown(b)
	s.portUp(b)
	if left := s.Alive(0); left < waitTime/2 {
		t.Errorf("with a port down the other relay counts as alive for %v, want nearly %v", left, waitTime)
	}
	s.portUp(a)
	if left := s.Alive(0); left >= waitTime/2 {
		t.Errorf("with all ports up the other relay counts as alive for %v", left)
	}
}

// TestFlapsWhileReconnectingExcuseSilence demands that each flap of a port during a failing
// reconnect begins a grace period.
func TestFlapsWhileReconnectingExcuseSilence(t *testing.T) {
	w := connected(t)
	if err := devices(func(_, b *softdevice.Device) { b.Down = true })(w); err != nil {
		t.Fatal(err)
	}
	w.a.until("the end of the queue pairs", func(s *QPGroup) bool { return s.phase != running })
	for i := range 2 {
		for _, down := range []bool{true, false} {
			if err := devices(func(a, b *softdevice.Device) { a.Down, b.Down = down, true })(w); err != nil {
				t.Fatal(err)
			}
			events := 2*i + 1
			if !down {
				events++
			}
			w.a.until("the port's event", func(s *QPGroup) bool { return s.fabric.ports[s.fabric.nics[0]] == events })
			w.a.loop.Call(func() {
				if _, is := w.a.set.downs[w.a.fabric.nics[0].context]; is != down || down && w.a.set.Alive(0) == 0 {
					t.Errorf("flap %d: without a link %t, excused as one without a link: %t", i+1, down, is)
				}
			})
		}
	}
}
