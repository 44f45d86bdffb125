package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/wire"
)

// until waits for a condition of a group.
func (e *side) until(what string, is func(*QPGroup) bool) {
	e.t.Helper()
	testutil.Until(e.t, what, func() (holds bool) {
		e.loop.Call(func() { holds = is(e.set) })
		return holds
	})
}

// endReconnects makes the next try of a reconnect the last. Goroutines outside the loop read the
// configuration, and may wait for the other side's loop, so endReconnects does not wait on the loop.
func (e *side) endReconnects() {
	e.t.Helper()
	e.until("a pause between two tries", func(s *QPGroup) bool {
		if s.working {
			return false
		}
		e.fabric.config.Reconnect = time.Nanosecond
		return true
	})
}

// stream writes over a channel, with more writes at a time than tickets.
type stream struct {
	*two
	from, to *device.Memory
	first    uint64 // grant
	done     chan error
}

const (
	streamBytes  = 9 << 10 // of a write: a part on each queue pair
	streamWrites = credits + 60
)

func newStream(w *two) *stream {
	return newStreamInto(w, func(*device.Memory) {})
}

// newStreamInto calls change with the target before its registration.
func newStreamInto(w *two, change func(*device.Memory)) *stream {
	s := &stream{two: w, from: w.a.memory(streamWrites * streamBytes), to: w.b.memoryThat(streamWrites*streamBytes,
		change)}
	w.b.loop.Call(func() {
		if err := w.arrivals.AddMemory(7, s.to); err != nil {
			w.b.t.Error(err)
		}
	})
	w.a.until("keys", func(*QPGroup) bool { return w.link.regions[7] != nil })
	return s
}

// begin grants and posts every write.
func (s *stream) begin() {
	random := rand.NewChaCha8([32]byte{byte(s.first)})
	_, _ = random.Read(s.from.HostBytes())
	s.done = make(chan error, streamWrites)
	s.b.loop.Call(func() {
		for i := range uint64(streamWrites) {
			if err := s.arrivals.Grant(s.first+i, 7, i*streamBytes, streamBytes); err != nil {
				s.b.t.Error(err)
			}
		}
	})
	s.a.loop.Call(func() {
		for i := range uint64(streamWrites) {
			s.link.Write(transport.Target{Region: 7, Offset: i * streamBytes},
				transport.Source{Place: s.from.At(i * streamBytes)}, streamBytes, s.first+i, func(err error) { s.done <- err })
		}
	})
}

// mustEnd demands that each write has arrived once.
func (s *stream) mustEnd(t *testing.T) {
	t.Helper()
	seen := map[uint64]bool{}
	for range streamWrites {
		if err := receive(t, s.done, "a write's end"); err != nil {
			t.Fatal(err)
		}
		one := receive(t, s.arrived, "an arrival")
		if i := one[0] - s.first; i >= streamWrites || seen[i] || one[1] != streamBytes {
			t.Fatalf("grant %d has arrived twice, or with %d bytes", one[0], one[1])
		}
		seen[one[0]-s.first] = true
	}
	if !bytes.Equal(s.from.HostBytes(), s.to.HostBytes()) {
		t.Error("wrong bytes")
	}
	s.first += streamWrites
	select {
	case one := <-s.arrived:
		t.Errorf("grant %d has arrived twice", one[0])
	default:
	}
}

// faultCase is a fault during writes, and its repair.
type faultCase struct {
	inject, heal func(*two) error
	words        []string // of the error without the repair
}

// slow delays writes, so that faults happen during writes.
const slow = "send delay=1"

func script(lines ...string) func(*two) error {
	return func(w *two) error { return w.rdma.Script(append([]string{slow}, lines...)...) }
}

func devices(change func(a, b *softdevice.Device)) func(*two) error {
	return func(w *two) error {
		a, b := deviceA, deviceB
		change(&a, &b)
		return w.rdma.Set(ofKind(w.iwarp, a, b, deviceC, deviceD)...)
	}
}

// failPair moves a queue pair to the error state without a cause.
func failPair(e func(*two) *side) func(*two) error {
	return func(w *two) (err error) {
		e(w).loop.Call(func() {
			if s := e(w).set; s.phase == running && !s.working {
				err = s.pairs[1].Fail()
			}
		})
		return err
	}
}

func nothing(*two) error { return nil }

func sideA(w *two) *side { return w.a }
func sideB(w *two) *side { return w.b }

// breaking gives both sides a fault at once, and calls of the reconnect fail.
func breaking(lines ...string) func(*two) error {
	return func(w *two) error {
		err := script(lines...)(w)
		for _, e := range []*side{w.a, w.b} {
			e.loop.Call(func() { e.set.fault(e.set.nics[0], "a test's fault") })
		}
		return err
	}
}

// kinds are the kinds of NICs; true for iWARP.
var kinds = map[string]bool{"RoCE": false, "iWARP": true}

func eachKind(t *testing.T, test func(t *testing.T, iwarp bool)) {
	for kind, iwarp := range kinds {
		t.Run(kind, func(t *testing.T) { test(t, iwarp) })
	}
}

// faults returns the faults of a kind of NICs.
func faults(iwarp bool) map[string]faultCase {
	all := map[string]faultCase{
		"a queue pair of the sender in error":   {failPair(sideA), nothing, nil},
		"a queue pair of the receiver in error": {failPair(sideB), nothing, nil},
		"faults of both sides at once":          {breaking(), nothing, nil},
		"a port of the sender down": {devices(func(a, _ *softdevice.Device) { a.Down = true }),
			devices(func(_, _ *softdevice.Device) {}),
			nil},
		"a port of the receiver down": {devices(func(_, b *softdevice.Device) { b.Down = true }),
			devices(func(_, _ *softdevice.Device) {}),
			[]string{"b0", "DOWN"}},
		"no locked memory": {breaking("ibv_reg_mr errno=12 device=b0"), nothing,
			[]string{"b0", "ENOMEM", "ulimit -l"}},
		"no domain":                      {breaking("ibv_alloc_pd errno=12 device=a0"), nothing, nil},
		"no queue pairs":                 {breaking("ibv_create_qp errno=12 device=b0"), nothing, []string{"b0", "ENOMEM"}},
		"a network that carries nothing": {script("send status=9"), nothing, []string{"a0", "remote invalid request error"}},
		"a request not accepted":         {breaking("ibv_post_send errno=12 device=a0"), nothing, nil},
	}
	if iwarp {
		all["a connection that ends"] = faultCase{func(w *two) (err error) {
			w.b.loop.Call(func() {
				if s := w.b.set; s.phase == running && !s.working {
					err = s.pairs[1].id.Disconnect()
				}
			})
			return err
		}, nothing, nil}
		all["a connection that is not made"] = faultCase{breaking("rdma_connect errno=110 device=b0"), nothing,
			[]string{"b0", "a0 (10.0.0.1)", "ETIMEDOUT"}}
		all["a connection that is not taken"] = faultCase{breaking("rdma_accept errno=12 device=a0"), nothing,
			[]string{"a0", "ENOMEM"}}
		all["nobody who listens"] = faultCase{breaking("rdma_listen errno=12 device=a0"), nothing, []string{"a0", "ENOMEM"}}
		all["another address"] = faultCase{func(w *two) error {
			return errors.Join(devices(func(_, b *softdevice.Device) { b.Address = "10.0.0.9" })(w), breaking()(w))
		}, nothing, nil}
		return all
	}
	all["another GID"] = faultCase{devices(func(_, b *softdevice.Device) { b.Address = "10.0.0.9" }), nothing, nil}
	// After three steps and the end of each queue pair.
	all["a way that is refused"] = faultCase{breaking("ibv_modify_qp errno=110 device=a0 from=17"), nothing, nil}
	return all
}

// TestAcknowledgedWritesHaveArrived demands that a write with an acknowledgement of the peer's NIC
// counts as arrived, although no group had processed the arrival before the reset.
func TestAcknowledgedWritesHaveArrived(t *testing.T) {
	w := connected(t)
	s := newStream(w)
	if err := w.rdma.Script(slow); err != nil {
		t.Fatal(err)
	}
	s.begin()
	w.b.loop.Call(func() { // the loop handles no event meanwhile
		for end := testutil.BeginFor(waitTime); len(s.done) < 10 && !end.Over(); {
			time.Sleep(time.Millisecond)
		}
		w.b.set.fault(w.b.set.nics[0], "a test's fault")
	})
	s.mustEnd(t)
	w.a.until("others in place of the queue pairs", func(s *QPGroup) bool { return s.reconnects == 1 })
}

// TestCompletionErrorsRepeatWrites demands that a write arrives after each kind of completion error
// and after an error of the posting call.
func TestCompletionErrorsRepeatWrites(t *testing.T) {
	eachKind(t, completionErrorsRepeatWrites)
}

func completionErrorsRepeatWrites(t *testing.T, iwarp bool) {
	w := connectedBy(t, iwarp)
	s := newStream(w)
	lines := []string{"ibv_post_send errno=12 device=a0"}
	for _, status := range []int{1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 20, 21} {
		// errors of connected queue pairs
		lines = append(lines, fmt.Sprintf("send status=%d device=a0", status))
	}
	for _, line := range lines {
		epoch := uint32(0)
		w.a.loop.Call(func() { epoch = w.a.set.protocol.epoch })
		if err := w.rdma.Script(line); err != nil {
			t.Fatal(err)
		}
		s.begin()
		w.a.until("a fault", func(s *QPGroup) bool { return s.protocol.epoch > epoch })
		if err := w.rdma.Script(); err != nil {
			t.Fatal(err)
		}
		s.mustEnd(t)
	}
}

// TestFaultsLoseAndDoubleNothing demands that each write arrives once, with each fault.
func TestFaultsLoseAndDoubleNothing(t *testing.T) {
	eachFault(t, func(t *testing.T, w *two, c faultCase) {
		s := newStream(w)
		if err := w.rdma.Script(slow); err != nil {
			t.Fatal(err)
		}
		s.begin()
		receive(t, s.done, "the first write") // the writes continue
		s.done <- nil
		if err := c.inject(w); err != nil {
			t.Fatal(err)
		}
		w.a.until("a fault", func(s *QPGroup) bool { return s.protocol.epoch > 0 })
		if err := w.rdma.Script(); err != nil {
			t.Fatal(err)
		}
		if err := c.heal(w); err != nil {
			t.Fatal(err)
		}
		s.mustEnd(t)
		for _, e := range []*side{w.a, w.b} {
			e.until("others in place of the queue pairs", func(s *QPGroup) bool {
				return s.phase == running && s.reconnects > 0 && s.deadline == nil
			})
		}
		s.begin() // again
		s.mustEnd(t)
		var doubts int
		w.a.loop.Call(func() {
			doubts = len(w.link.writes) + len(w.link.tickets) + len(w.link.waiting) + len(w.link.unconfirmed) +
				w.a.set.unconfirmed
		})
		w.b.loop.Call(func() { doubts += len(w.b.set.tickets) + len(w.arrivals.open) })
		if doubts > 0 {
			t.Errorf("%d writes, tickets and grants are left", doubts)
		}
	})
}

// eachFault runs a test with each fault, over NICs of each kind.
func eachFault(t *testing.T, test func(*testing.T, *two, faultCase)) {
	for kind, iwarp := range kinds {
		for name, c := range faults(iwarp) {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				test(t, connectedBy(t, iwarp), c)
			})
		}
	}
}

// TestPermanentFaultsEndPeer demands that a fault without a repair in time ends the writes and both
// Peers, with the NIC and the cause.
func TestPermanentFaultsEndPeer(t *testing.T) {
	eachFault(t, func(t *testing.T, w *two, c faultCase) {
		if c.words == nil {
			return
		}
		s := newStream(w)
		if err := c.inject(w); err != nil {
			t.Fatal(err)
		}
		s.begin()
		// Wait until both sides have the cause: after the time of the first side is over, the
		// second side records that end as its last fault. Then the next try of each side is the
		// last.
		for _, e := range []*side{w.a, w.b} {
			e.until("the reason", func(s *QPGroup) bool {
				return !slices.ContainsFunc(c.words, func(word string) bool { return !strings.Contains(s.lastFault, word) })
			})
		}
		for _, e := range []*side{w.a, w.b} {
			e.endReconnects()
		}
		for range streamWrites {
			if err := receive(t, s.done, "a write's end"); err != nil {
				demand(t, err, c.words)
				for len(s.done) > 0 {
					<-s.done
				}
				break
			}
		}
		for _, e := range []*side{w.a, w.b} {
			err := receive(t, e.down, "the Peer's end")
			demand(t, err, c.words)
		}
	})
}

// deafToStep drops a step.
type deafToStep struct {
	*QPGroup
	kind uint32
}

func (d *deafToStep) HandleMessage(c *tcp.Channel, payload []byte) error {
	if m, err := decode(payload); err == nil {
		if m, is := m.(*step); is && m.Kind == d.kind {
			return nil
		}
	}
	return d.QPGroup.HandleMessage(c, payload)
}

// TestPeerSilentAfterReconnectEnds demands that each side ends the Peer and the writes in time if
// the other side does not continue after the reconnect.
func TestPeerSilentAfterReconnectEnds(t *testing.T) {
	for _, of := range []struct {
		name string
		deaf string // the side that ends the Peer; the limit of the other side is an hour
		kind uint32
	}{{"the receiver never hears resume", "b0", kindResume}, {"the sender never hears granted", "a0", kindGranted}} {
		t.Run(of.name, func(t *testing.T) {
			eachKind(t, func(t *testing.T, iwarp bool) {
				t.Parallel()
				w, settled := joining(t, iwarp, func(nic string, s *QPGroup) tcp.Extension {
					if nic == of.deaf {
						return &deafToStep{s, of.kind}
					}
					return s
				}, func(nic string, c *Config) {
					if c.Reconnect = time.Hour; nic == of.deaf {
						c.Reconnect = 3 * time.Second
					}
				})
				if err := receive(t, settled, "the queue pairs"); err != nil {
					t.Fatal(err)
				}
				w.open(t)
				s := newStream(w)
				s.begin()
				w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
				for _, e := range []*side{w.a, w.b} {
					if err := receive(t, e.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusPeerRelayDied ||
						!strings.Contains(reason(err), "a test's fault") {
						t.Errorf("the Peer ended with %v", err)
					}
				}
				for range streamWrites { // each write ends, with success or an error
					_ = receive(t, s.done, "a write's end")
				}
			})
		})
	}
}

// late delays granted until the test releases it.
type late struct {
	*QPGroup
	kept [][]byte
}

func (l *late) HandleMessage(c *tcp.Channel, payload []byte) error {
	if m, err := decode(payload); err == nil {
		if m, is := m.(*step); is && m.Kind == kindGranted {
			l.kept = append(l.kept, bytes.Clone(payload))
			return nil
		}
	}
	return l.QPGroup.HandleMessage(c, payload)
}

// TestWritesBeforeAgreementAreNotCounted demands that the count of arrived writes excludes writes
// that complete after a reconnect and before granted.
func TestWritesBeforeAgreementAreNotCounted(t *testing.T) {
	eachKind(t, func(t *testing.T, iwarp bool) {
		var l *late
		w, settled := joining(t, iwarp, func(nic string, s *QPGroup) tcp.Extension {
			if nic != "a0" {
				return s
			}
			l = &late{QPGroup: s}
			return l
		})
		if err := receive(t, settled, "the queue pairs"); err != nil {
			t.Fatal(err)
		}
		w.open(t)
		s := newStream(w)
		if err := w.rdma.Script(slow); err != nil {
			t.Fatal(err)
		}
		s.begin()
		receive(t, s.done, "the first write")
		s.done <- nil
		w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
		if err := w.rdma.Script(); err != nil {
			t.Fatal(err)
		}
		w.a.until("writes by the new queue pairs", func(s *QPGroup) bool {
			return len(l.kept) == 1 && s.protocol.acknowledged > s.protocol.acknowledgedBefore
		})
		w.a.loop.Call(func() {
			if err := l.QPGroup.HandleMessage(nil, l.kept[0]); err != nil {
				t.Error(err)
			}
		})
		s.mustEnd(t)
	})
}

// TestPeerWithoutNewTicketsEnds demands that faults with completed writes between, but without an
// agreement of the relays, count as one fault: the Peer ends in time.
func TestPeerWithoutNewTicketsEnds(t *testing.T) {
	t.Parallel()
	var l *late
	w, settled := joining(t, false, func(nic string, s *QPGroup) tcp.Extension {
		if nic != "a0" {
			return s
		}
		l = &late{QPGroup: s}
		return l
	}, func(nic string, c *Config) {
		if c.Reconnect = time.Hour; nic == "a0" {
			c.Reconnect = 2 * time.Second
		}
	})
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
	w.open(t)
	s := newStream(w)
	// Each reconnect has a write.
	carried := false
	for grant, end := uint64(1), testutil.BeginFor(waitTime); !end.Over(); grant++ {
		w.b.loop.Call(func() {
			if w.b.set.gone == nil {
				if err := w.arrivals.Grant(grant, 7, 0, streamBytes); err != nil {
					t.Error(err)
				}
			}
		})
		w.a.loop.Call(func() {
			w.link.Write(transport.Target{Region: 7}, transport.Source{Place: s.from.At(0)}, streamBytes, grant, func(error) {})
		})
		over := false
		w.a.until("a write's end, or the Peer's", func(s *QPGroup) bool {
			over = s.gone != nil
			return over || s.phase == running && s.carries
		})
		if over {
			if err := receive(t, w.a.down, "the Peer's end"); !carried || wire.StatusOf(err) != wire.StatusPeerRelayDied ||
				!strings.Contains(reason(err), "a test's fault") {
				t.Errorf("the Peer ended with %v, carried %v", err, carried)
			}
			return
		}
		w.a.loop.Call(func() {
			carried = carried || w.a.set.protocol.epoch > 0
			w.a.set.fault(w.a.set.nics[0], "a test's fault")
		})
	}
	t.Error("the Peer does not end")
}

// TestSourceOfOldNICsIsRegisteredAgain demands that the current NICs register a source of a posted
// write that only the replaced NICs have registered.
func TestSourceOfOldNICsIsRegisteredAgain(t *testing.T) {
	w := connected(t)
	write := w.granted(t, 1)
	done := make(chan error, 1)
	w.a.loop.Call(func() {
		set := w.a.set
		for _, r := range w.a.fabric.registrations() {
			for _, n := range set.nics {
				r.drop(n.index)
			}
		}
		write(func(err error) { done <- err })
	})
	if err := receive(t, done, "the write's end"); err != nil {
		t.Fatal(err)
	}
	if one := receive(t, w.arrived, "the arrival"); one != [2]uint64{1, slot} {
		t.Errorf("%d bytes of grant %d have arrived", one[1], one[0])
	}
	// A failed registration returns the cause.
	again := w.granted(t, 2)
	w.script(t, "ibv_reg_mr errno=12 device=a0")
	w.a.loop.Call(func() {
		for _, r := range w.a.fabric.registrations() {
			for _, n := range w.a.set.nics {
				r.drop(n.index)
			}
		}
		again(func(err error) { done <- err })
	})
	if err := receive(t, done, "the write's end"); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("it ended with %v", err)
	}
}

// TestWritesOfClosedChannelEndAtReset demands that the reset ends writes of a channel that the
// receiver has closed without a confirmation, so that the sources are free.
func TestWritesOfClosedChannelEndAtReset(t *testing.T) {
	eachKind(t, func(t *testing.T, iwarp bool) {
		w := connectedBy(t, iwarp)
		write := w.granted(t, 1)
		if err := w.rdma.Script("send hold=1"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.script(t) })
		done := make(chan error, 1)
		w.a.loop.Call(func() { write(func(err error) { done <- err }) })
		w.held(t)
		w.b.loop.Call(func() { w.arrivals.channel.Leave() })
		w.a.until("the channel's end", func(s *QPGroup) bool { return len(s.channels) == 0 })
		w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
		w.script(t)
		if err := receive(t, done, "the write's end"); wire.StatusOf(err) != wire.StatusPeerClosed {
			t.Errorf("it ended with %v", err)
		}
	})
}

// TestNICWithoutRegistrationIsOmitted demands that a NIC that cannot register its memory again is
// omitted if another NIC works, unless only the first NIC can flush its writes.
func TestNICWithoutRegistrationIsOmitted(t *testing.T) {
	eachKind(t, nicWithoutRegistrationIsOmitted)
}

func nicWithoutRegistrationIsOmitted(t *testing.T, iwarp bool) {
	w := connectedBy(t, iwarp, func(nic string, c *Config) {
		if nic == "a0" {
			c.NICs = func() []string { return []string{"a0", "c0"} }
		}
	})
	s := newStream(w)
	if err := w.rdma.Script("ibv_reg_mr errno=12 device=c0"); err != nil {
		t.Fatal(err)
	}
	var others []*nic
	w.a.loop.Call(func() { others = w.a.set.nics })
	nics, err := w.a.fabric.active()
	if err != nil || len(nics) != 2 || len(others) != 2 {
		t.Fatalf("%v and %v, %v", others, nics, err)
	}
	var registers atomic.Pointer[[]*nic]
	var call *verbs.Error
	if renewed, err := w.a.fabric.renew(nics, others, others[1:], &registers); !errors.As(err, &call) ||
		call.Call != "ibv_reg_mr" || !strings.HasPrefix(call.On, "c0") || !errors.Is(err, unix.ENOMEM) ||
		len(renewed)+len(w.a.fabric.renewed) > 0 {
		t.Errorf("%v without one that is needed, %v", renewed, err)
	}
	s.begin()
	w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
	s.mustEnd(t)
	w.a.until("one NIC", func(s *QPGroup) bool { return s.reconnects > 0 && len(s.nics) == 1 && s.nics[0].name == "a0" })
	s.begin()
	s.mustEnd(t)
}

// twoNICs gives each side two NICs.
func twoNICs(nic string, c *Config) {
	also := map[string]string{"a0": "c0", "b0": "d0"}[nic]
	c.NICs = func() []string { return []string{nic, also} }
}

// TestNICWithFailedLinksIsOmitted demands that a reconnect omits a NIC with an active port whose
// links do not connect. Data uses the other NICs of both sides, or of the side that reported the
// link first. The next fault includes the NIC again.
func TestNICWithFailedLinksIsOmitted(t *testing.T) {
	for name, c := range map[string]struct {
		line  string
		iwarp bool
		left  []string // of a's NICs
	}{
		"a network that carries nothing": {"send status=12 device=a0", false, []string{"c0"}},
		// After three steps and the end of each queue pair.
		"a way that is refused":           {"ibv_modify_qp errno=110 device=b0 from=33", false, []string{"a0", "c0"}},
		"a network that carries no iWARP": {"send status=12 device=a0", true, []string{"c0"}},
		"a connection that is not made":   {"rdma_connect errno=110 device=b0", true, []string{"c0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := connectedBy(t, c.iwarp, twoNICs)
			s := newStream(w)
			s.begin()
			if err := breaking(c.line)(w); err != nil {
				t.Fatal(err)
			}
			s.mustEnd(t)
			w.a.until("the other NICs", goBy(c.left...))
			w.b.until("the other NIC, in each link", goBy(slices.Repeat([]string{"d0"}, len(c.left))...))
			if err := w.rdma.Script(); err != nil {
				t.Fatal(err)
			}
			s.begin()
			s.mustEnd(t)
			w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
			w.a.until("both NICs", goBy("a0", "c0"))
			w.b.until("both NICs", goBy("b0", "d0"))
			s.begin()
			s.mustEnd(t)
		})
	}
}

// goBy reports whether the links of a group use the named NICs.
func goBy(nics ...string) func(*QPGroup) bool {
	return func(s *QPGroup) bool {
		var have []string
		for _, l := range s.links {
			have = append(have, s.nics[l.ours].name)
		}
		return s.phase == running && s.reconnects > 0 && slices.Equal(have, nics)
	}
}

// TestReturningPortIsUsedAgain demands that a group uses a NIC again whose port has returned and
// stays, without another fault, and does not use a port that fails again.
func TestReturningPortIsUsedAgain(t *testing.T) {
	eachKind(t, func(t *testing.T, iwarp bool) {
		w := connectedBy(t, iwarp, twoNICs)
		s := newStream(w)
		goes := func(c softdevice.Device, down bool) {
			t.Helper()
			c.Down = down
			if err := w.rdma.Set(ofKind(iwarp, deviceA, deviceB, c, deviceD)...); err != nil {
				t.Fatal(err)
			}
		}
		w.a.loop.Call(func() { w.a.fabric.back = time.Hour })
		goes(deviceC, true)
		w.a.until("one NIC", goBy("a0", "a0"))
		goes(deviceC, false)
		w.a.until("the port", func(s *QPGroup) bool { return s.fabric.ports[s.fabric.nics[1]] == 2 })
		s.begin()
		s.mustEnd(t)
		reconnects := 0
		w.a.loop.Call(func() {
			f := w.a.fabric
			f.back, reconnects = time.Millisecond, w.a.set.reconnects
			f.cameBack(f.nics[1], 1) // the port has failed since
		})
		time.Sleep(100 * time.Millisecond)
		w.a.until("one NIC", func(s *QPGroup) bool {
			if s.reconnects != reconnects {
				t.Error("the queue pairs were given up for a port that has gone since")
			}
			return goBy("a0", "a0")(s)
		})
		goes(deviceC, true)
		w.a.until("the port", func(s *QPGroup) bool { return s.fabric.ports[s.fabric.nics[1]] == 3 })
		goes(deviceC, false)
		w.a.until("both NICs", goBy("a0", "c0"))
		w.b.until("both NICs", goBy("b0", "d0"))
		for _, e := range []*side{w.a, w.b} {
			e.loop.Call(func() {
				if !strings.Contains(e.set.lastFault, "c0 of host") || !strings.Contains(e.set.lastFault,
					"port 1 is active again") {
					t.Errorf("the fault is said to be %s", e.set.lastFault)
				}
			})
		}
		s.begin()
		s.mustEnd(t)
	})
}

// TestFailedTriesReleaseRegistrations demands that memory stays registered only with the NICs of
// the earlier writes and of the last try.
func TestFailedTriesReleaseRegistrations(t *testing.T) {
	eachKind(t, failedTriesReleaseRegistrations)
}

func failedTriesReleaseRegistrations(t *testing.T, iwarp bool) {
	w := connectedBy(t, iwarp)
	s := newStream(w)
	s.begin()
	if err := breaking("send status=12 device=b0")(w); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*side{w.a, w.b} {
		e.until("few domains after many tries", func(s *QPGroup) bool {
			e.fabric.mu.Lock()
			defer e.fabric.mu.Unlock()
			return s.protocol.epoch > 5 && len(e.fabric.renewed) <= 2
		})
	}
	if err := w.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	s.mustEnd(t)
}

func demand(t *testing.T, err error, words []string) {
	t.Helper()
	for _, word := range append(slices.Clone(words), "host "+hostname()) {
		if wire.StatusOf(err) != wire.StatusPeerRelayDied || !strings.Contains(reason(err), word) {
			t.Errorf("the error says nothing of %q: %v", word, err)
		}
	}
}

// TestLateDuplicateIsRejected demands that a late earlier write changes no memory: the new queue
// pairs reject its key.
func TestLateDuplicateIsRejected(t *testing.T) {
	eachKind(t, lateDuplicateIsRejected)
}

func lateDuplicateIsRejected(t *testing.T, iwarp bool) {
	w := connectedBy(t, iwarp)
	s := newStream(w)
	s.begin()
	s.mustEnd(t)
	for round := range 3 {
		var before regionKeys
		w.a.loop.Call(func() {
			before = *w.link.regions[7]
			w.a.set.fault(w.a.set.nics[0], "a test's fault")
		})
		w.a.until("others in place of the queue pairs", func(s *QPGroup) bool {
			return s.phase == running && s.reconnects > 2*round && w.link.regions[7].Keys != before.Keys
		})
		want := bytes.Clone(s.to.HostBytes())
		clear(s.from.HostBytes())
		w.a.loop.Call(func() {
			p := w.a.set.pairs[0]
			own := w.a.fabric.at(s.from.At(0), streamBytes).region(p.queue.nic)
			if _, err := p.PostSend([]verbs.Send{{
				Op: verbs.Write, Flags: verbs.Signaled, ID: 1 << 40, Length: streamBytes,
				Address: uint64(uintptr(s.from.At(0).Host)), LKey: own.LKey(),
				Remote: before.Address, RKey: before.Keys[0],
			}}); err != nil {
				t.Error(err)
			}
		})
		// The NIC of the receiver reports an error, and both sides reconnect once more.
		w.b.until("the other NIC's refusal", func(s *QPGroup) bool { return s.phase == running && s.reconnects > 2*round+1 })
		if !bytes.Equal(s.to.HostBytes(), want) {
			t.Fatal("a write of before has landed")
		}
		s.begin()
		s.mustEnd(t)
	}
	domains, err := w.rdma.Calls("ibv_alloc_pd", "ibv_dealloc_pd")
	if err != nil {
		t.Fatal(err)
	}
	if len(domains) < 12 {
		t.Errorf("only %d domains were made and given back", len(domains))
	}
}

// TestFailedCompletionQueueEndsItsGroups demands that an error of a completion queue ends the
// groups that use the queue, with the cause, and no other group.
func TestFailedCompletionQueueEndsItsGroups(t *testing.T) {
	eachKind(t, failedCompletionQueueEndsItsGroups)
}

func failedCompletionQueueEndsItsGroups(t *testing.T, iwarp bool) {
	w, other := connectedBy(t, iwarp), connectedBy(t, iwarp)
	w.a.loop.Call(func() { w.a.fabric.event(w.a.fabric.nics[0], verbs.Event{Kind: verbs.QueueFailed}) })
	s := newStream(w)
	s.begin()
	s.mustEnd(t) // the group does not use the queue
	w.a.loop.Call(func() { w.a.fabric.event(w.a.fabric.nics[0], w.a.set.queues[0].Failure()) })
	for _, e := range []*side{w.a, w.b} {
		if err := receive(t, e.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusPeerRelayDied ||
			!strings.Contains(reason(err), "a0") || !strings.Contains(reason(err), "CQ error") {
			t.Errorf("the Peer ended with %v", err)
		}
	}
	so := newStream(other)
	so.begin()
	so.mustEnd(t)
}

// TestReconnectedGroupHasAnotherNICsVersion demands that results for replaced NICs do not apply to
// later NICs.
func TestReconnectedGroupHasAnotherNICsVersion(t *testing.T) {
	w := connected(t)
	before := w.a.set.NICsVersion()
	if w.a.set.NICsVersion() != before {
		t.Error("the version changes without a change")
	}
	w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
	w.a.until("others in place of the queue pairs", func(s *QPGroup) bool {
		return s.reconnects == 1 && s.phase == running
	})
	if w.a.set.NICsVersion() == before {
		t.Error("the version is the one of before")
	}
}
