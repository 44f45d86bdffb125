package rdmatest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
	"unicode"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/verbs"
)

const (
	// tripleRounds is the number of rounds of a triple in each direction.
	tripleRounds = 2048
	// tripleDuration ends the rounds of a triple early, after minRounds: 8 GPUs and 4 NICs are to
	// be tested within 10 s.
	tripleDuration = 250 * time.Millisecond
	minRounds      = 256
	// slot is the size of the tested memory, and largest that of a write, bytes.
	slot    = 2 << 20
	largest = 256 << 10
	// guard is the number of bytes around a write that must stay as they were.
	guard = 64
	// reasonBytes bounds a reason.
	reasonBytes = 400
	// spins is the number of polls without a completion before a pause.
	spins = 1000
	// receives is the number of posted receives for immediates.
	receives = 16
)

// triples tests triples in sequence and reports every result. openCUDA opens the driver.
func triples(
	l *verbs.Library,
	openCUDA func() (*cuda.Driver, error),
	names []launch.TripleName,
	config *launch.Verbs,
	tell func(launch.Triple),
) {
	for _, n := range names {
		t := launch.Triple{TripleName: n}
		begun := time.Now()
		err := testTriple(l, openCUDA, &t, config)
		t.Milliseconds = time.Since(begun).Milliseconds()
		var not untested
		var bad wrong
		switch {
		case err == nil:
			t.Verdict = launch.VerdictGood
		case errors.As(err, &bad):
			t.Verdict, t.Reason = launch.VerdictWrong, string(bad)
		case errors.As(err, &not):
			t.Verdict, t.Reason = launch.VerdictUntested, cut(string(not))
		default:
			t.Verdict, t.Reason = launch.VerdictUntested, cut(err.Error())
		}
		tell(t)
	}
}

// cut shortens a reason to one that a Triple can have.
func cut(text string) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > reasonBytes {
		text = strings.ToValidUTF8(text[:reasonBytes], "") + "..."
	}
	return text
}

// wrong is the finding that bytes arrived wrong.
type wrong string

func (w wrong) Error() string { return string(w) }

// slots allocates memory as relays allocate slots: on the server GPU, with access for the
// client's GPU alone.
type slots struct {
	client *device.Device
	on     cuda.Device
	own    *device.Device // made for memory of cuMemAlloc
}

func (s *slots) Make(kind registration.Kind, bytes uint64) (registration.Memory, error) {
	if kind == registration.VMM {
		return memoryOf(device.Create(s.client.Driver, s.on, bytes, cuda.Access{Device: s.client.Ordinal, Write: true}))
	}
	if s.on == s.client.Ordinal {
		return memoryOf(s.client.Allocate(bytes))
	}
	if s.own == nil {
		bus, err := s.client.Driver.DevicePCIBusID(s.on)
		if err != nil {
			return nil, err
		}
		if s.own, err = device.Open(s.client.Driver, bus); err != nil {
			return nil, err
		}
	}
	err := s.client.On(func() error { return s.client.Driver.CtxEnablePeerAccess(s.own.Context()) })
	if err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
		return nil, err
	}
	return memoryOf(s.own.Allocate(bytes))
}

func (s *slots) Capable(m registration.Memory) (bool, error) {
	return s.client.RDMACapable(m.(*device.Memory))
}

func (s *slots) close() error {
	if s.own == nil {
		return nil
	}
	return s.own.Close()
}

// memoryOf keeps a nil pointer from becoming a Memory.
func memoryOf(m *device.Memory, err error) (registration.Memory, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}

// tripleTest is the test of a triple.
type tripleTest struct {
	*bench
	result *launch.Triple
	client *device.Device
	stream cuda.Stream
	event  cuda.Event
	queue  *verbs.Queue
	// pairs has two connected queue pairs, and a loopback queue pair for flushes.
	pairs  []*verbs.Pair
	posted int // receives of pairs[1]
	flush  bool
	target *registration.Registered // the NIC writes into it
	source *registration.Registered // the NIC reads it
	// own is memory of the client's GPU, out of which and into which it copies.
	own    *device.Memory
	random *rand.Rand
}

func testTriple(
	l *verbs.Library,
	openCUDA func() (*cuda.Driver, error),
	result *launch.Triple,
	config *launch.Verbs,
) (err error) {
	driver, err := openCUDA()
	if err != nil {
		return untested(err.Error())
	}
	b, err := newBench(l, result.NIC, config, 0)
	if err != nil {
		return err
	}
	t := &tripleTest{bench: b, result: result, random: rand.New(rand.NewPCG(1, uint64(len(result.NIC))))}
	defer func() { err = errors.Join(err, t.close()) }()
	if t.client, err = device.Open(driver, result.GPU.BusID); err != nil {
		return err
	}
	t.later(t.client.Close)
	on, err := driver.DeviceByPCIBusID(result.Server.BusID)
	if err != nil {
		return err
	}
	if on != t.client.Ordinal {
		can, err := driver.DeviceCanAccessPeer(t.client.Ordinal, on)
		if err == nil && !can {
			err = fmt.Errorf("GPU %s cannot access GPU %s (cuDeviceCanAccessPeer is 0)", result.GPU.BusID, result.Server.BusID)
		}
		if err != nil {
			return untested(err.Error())
		}
	}
	if err := t.prepare(on); err != nil {
		return err
	}
	return t.client.On(t.rounds)
}

// prepare allocates and registers memory, and connects queue pairs.
func (t *tripleTest) prepare(on cuda.Device) (err error) {
	// Relays know a client's own memory by the client's descriptor, which is none for Data Direct.
	own := on == t.client.Ordinal
	direct := t.config.DataDirect && t.context.DataDirect()
	ordering, err := t.client.Driver.DeviceAttribute(on, cuda.AttributeRDMAWritesOrdering)
	t.flush = direct || registration.NeedsFlush(ordering, err, own)
	from := &slots{client: t.client, on: on}
	t.later(from.close)
	nic := []registration.NIC{{Name: t.result.NIC, Domain: t.domain, DataDirect: direct && !own}}
	access := registration.Access(true, t.config.RelaxedOrdering)
	if t.flush {
		access |= verbs.RemoteRead
	}
	for _, m := range []struct {
		to     **registration.Registered
		access verbs.Access
	}{{&t.target, access}, {&t.source, registration.Access(false, t.config.RelaxedOrdering)}} {
		// The driver makes a DMA-BUF only with a current context.
		if err = t.client.On(func() (err error) {
			*m.to, err = registration.Make(from, slot, nic, m.access)
			return err
		}); err != nil {
			return err
		}
		t.later((*m.to).Close)
		if (*m.to).Way() == registration.Bounce {
			return untested("no registration: " + (*m.to).String())
		}
	}
	t.result.Memory, t.result.Flushed = launch.MemoryDMABuf, t.flush
	if t.target.Way() == registration.Peermem {
		t.result.Memory = launch.MemoryPeermem
	}
	if t.own, err = device.Create(t.client.Driver, t.client.Ordinal, slot, cuda.Access{Device: t.client.Ordinal,
		Write: true}); err != nil {
		return err
	}
	t.later(t.own.Close)
	if t.queue, err = t.context.NewQueue(4 * receives); err != nil {
		return err
	}
	t.later(t.queue.Close)
	at, err := t.endpoint()
	if err != nil {
		return err
	}
	for i := range 3 {
		pair, err := t.domain.NewPair(verbs.PairConfig{Send: t.queue, Recv: t.queue, SendDepth: depth, RecvDepth: receives})
		if err != nil {
			return err
		}
		t.later(pair.Close)
		t.pairs = append(t.pairs, pair)
		may := verbs.RemoteWrite
		if i == 2 {
			may = verbs.RemoteRead
		}
		if err := pair.Init(at.number, uint16(t.config.PKey), may); err != nil {
			return err
		}
	}
	for i, to := range []int{1, 0, 2} {
		if err := t.lead(t.pairs[i], t.pairs[to], at); err != nil {
			return err
		}
	}
	return nil
}

// rounds runs the rounds of both directions in turn, with the client's context.
func (t *tripleTest) rounds() (err error) {
	d := t.client.Driver
	if t.stream, err = d.StreamCreate(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.StreamDestroy(t.stream)) }()
	if t.event, err = d.EventCreate(cuda.EventOptions{}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.EventDestroy(t.event)) }()
	// Both sides begin with the same content, so that bytes beside a write have a known value.
	out, back := t.bytes[:slot], t.bytes[slot:]
	pattern(out)
	for _, m := range []registration.Memory{t.target.Memory, t.source.Memory} {
		if err := t.copies(func() error {
			return d.MemcpyHtoDAsync(cuda.Ptr(m.Address()), unsafe.Pointer(unsafe.SliceData(out)), slot, t.stream)
		}); err != nil {
			return err
		}
	}
	copy(back, out)
	inside, found := make([]byte, slot), make([]byte, slot)
	copy(inside, out) // the content of the target
	sent := make([]byte, slot)
	copy(sent, out) // the content of the source
	begun := time.Now()
	for t.result.Rounds < tripleRounds && (t.result.Rounds < minRounds || time.Since(begun) < tripleDuration) {
		n, at := t.span()
		if err := t.inbound(inside, found, at, n); err != nil {
			return err
		}
		n, at = t.span()
		if err := t.outbound(sent, found, at, n); err != nil {
			return err
		}
		t.result.Rounds++
	}
	return nil
}

// span picks length and offset of a write: few bytes, around the limits of cache lines and
// packets, and up to the largest; at any offset.
func (t *tripleTest) span() (n, at int) {
	sizes := []int{1, 8, 63, 64, 65, 256, 1000, 4096, 4097, 16 << 10, 64<<10 + 8}
	n = sizes[t.random.IntN(len(sizes))]
	if t.random.IntN(32) == 0 {
		n = t.random.IntN(largest) + 1
	}
	return n, guard + t.random.IntN(slot-n-2*guard)
}

// fill gives n bytes at an offset of b new content: no eight bytes are as they were before.
func (t *tripleTest) fill(b []byte) {
	var word [8]byte
	for i := 0; i < len(b); i += 8 {
		binary.NativeEndian.PutUint64(word[:], t.random.Uint64())
		for j := range b[i:min(i+8, len(b))] {
			if word[j] == b[i+j] {
				word[j]++
			}
			b[i+j] = word[j]
		}
	}
}

// inbound is the way into the client's memory: the NIC writes into the slot and says so by an
// immediate, its writes are flushed, and the client's GPU copies the slot.
func (t *tripleTest) inbound(inside, found []byte, at, n int) error {
	out := t.bytes[:slot]
	t.fill(inside[at : at+n])
	copy(out[at:], inside[at:at+n])
	base := uint64(t.target.Memory.Address())
	if err := t.write(uint64(address(out))+uint64(at), t.region.LKey(), base+uint64(at), t.target.Regions[0].RKey(),
		n); err != nil {
		return err
	}
	if t.flush {
		// One byte, to the host's memory, of any place: a relay flushes all writes of a region by a read of
		// one of their places.
		place := uint64(t.random.IntN(slot))
		read := verbs.Send{
			Op:      verbs.Read,
			Flags:   verbs.Signaled,
			Length:  1,
			Address: uint64(address(t.bytes[slot:])),
			LKey:    t.region.LKey(),
			Remote:  base + place,
			RKey:    t.target.Regions[0].RKey(),
		}
		if err := t.do(t.pairs[2], read, false); err != nil {
			return err
		}
	}
	from, length := at-guard, n+2*guard
	d := t.client.Driver
	if err := t.copies(func() error {
		err := d.MemcpyAsync(t.own.Ptr+cuda.Ptr(from), cuda.Ptr(base)+cuda.Ptr(from), uint64(length), t.stream)
		if err == nil {
			err = d.MemcpyDtoHAsync(unsafe.Pointer(&found[from]), t.own.Ptr+cuda.Ptr(from), uint64(length), t.stream)
		}
		return err
	}); err != nil {
		return err
	}
	return t.compare(
		"GPU "+t.result.GPU.BusID+" read behind writes of "+t.result.NIC,
		inside[from:from+length],
		found[from:from+length],
		n,
	)
}

// outbound is the way out of the client's memory: the client's GPU copies into the slot, the
// event behind the copy comes, and the NIC reads the slot and writes to the far end.
func (t *tripleTest) outbound(sent, found []byte, at, n int) error {
	t.fill(sent[at : at+n])
	d := t.client.Driver
	base := uint64(t.source.Memory.Address())
	if err := t.copies(func() error {
		err := d.MemcpyHtoDAsync(t.own.Ptr+cuda.Ptr(at), unsafe.Pointer(&sent[at]), uint64(n), t.stream)
		if err == nil {
			err = d.MemcpyAsync(cuda.Ptr(base)+cuda.Ptr(at), t.own.Ptr+cuda.Ptr(at), uint64(n), t.stream)
		}
		return err
	}); err != nil {
		return err
	}
	far := t.bytes[slot:]
	if err := t.write(base+uint64(at), t.source.Regions[0].LKey(), uint64(address(far))+uint64(at), t.region.RKey(),
		n); err != nil {
		return err
	}
	return t.compare(t.result.NIC+" read behind a copy of GPU "+t.result.GPU.BusID, sent[at:at+n], far[at:at+n], n)
}

// compare checks the received bytes.
func (t *tripleTest) compare(what string, want, found []byte, n int) error {
	t.result.Bytes += uint64(n)
	if bad := differ(want, found); bad > 0 {
		return wrong(
			fmt.Sprintf(
				"%s: %d of %d bytes are wrong in round %d (memory of GPU %s by %s)",
				what,
				bad,
				len(want),
				t.result.Rounds+1,
				t.result.Server.BusID,
				t.result.Memory,
			),
		)
	}
	return nil
}

// copies runs copies of the client's GPU and waits for the event behind them.
func (t *tripleTest) copies(issue func() error) error {
	d := t.client.Driver
	err := issue()
	if err == nil {
		err = d.EventRecord(t.event, t.stream)
	}
	p := newPolls()
	for err == nil {
		var done bool
		if done, err = d.EventQuery(t.event); done || err != nil {
			return err
		}
		err = p.empty("no end of a copy")
	}
	return err
}

// polls waits between polls without a result, until limit.
type polls struct {
	count int // without a result since the last one
	end   time.Time
}

func newPolls() polls { return polls{end: time.Now().Add(limit)} }

// empty follows a poll without a result. The device may need the processor, so the loop pauses
// after spins polls.
func (p *polls) empty(lacks string) error {
	if p.count++; p.count <= spins {
		return nil
	}
	time.Sleep(10 * time.Microsecond)
	if time.Now().After(p.end) {
		return fmt.Errorf("%s within %v", lacks, limit)
	}
	return nil
}

// write writes n bytes with an immediate from the first pair to the second, and waits for the
// completions of both sides.
func (t *tripleTest) write(from uint64, lkey uint32, to uint64, rkey uint32, n int) error {
	if t.posted == 0 {
		if _, err := t.pairs[1].PostRecv(make([]verbs.Recv, receives)); err != nil {
			return err
		}
		t.posted = receives
	}
	t.posted--
	return t.do(
		t.pairs[0],
		verbs.Send{
			Op:        verbs.WriteImmediate,
			Flags:     verbs.Signaled,
			Immediate: 1,
			Length:    uint32(n),
			Address:   from,
			LKey:      lkey,
			Remote:    to,
			RKey:      rkey,
		},
		true,
	)
}

// do posts a request and waits for the completion, and, if requested, for the receive's completion.
func (t *tripleTest) do(p *verbs.Pair, request verbs.Send, receive bool) error {
	left := 1
	if receive {
		left++
	}
	if _, err := p.PostSend([]verbs.Send{request}); err != nil {
		return err
	}
	var done [depth]verbs.Completion
	for p := newPolls(); left > 0; {
		n, err := t.queue.Poll(done[:])
		if err != nil {
			return err
		}
		for _, c := range done[:n] {
			if err := c.Err(); err != nil {
				return err
			}
		}
		left -= n
		if n > 0 {
			p.count = 0
		} else if err := p.empty("no completion"); err != nil {
			return err
		}
	}
	return nil
}
