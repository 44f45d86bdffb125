package relay_test

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// A client without the library posts invalid lists, and changes entries during the relay's copies.
// A list ends once, only the exposed range is written, and the relay and further clients continue.
func TestHostileListsEndAndWriteNothingElse(t *testing.T) {
	const exposed, bytesThere = 64 << 10, 2 << 20
	h := newHost(t)
	b := attach(t, h.relay("b", launch.RouteDirect, far(3, 2, "nic1")))
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	target := exported(t, b, 3, bytesThere)
	before := random(t, bytesThere)
	target.write(0, before)
	region, err := listener.Expose(within(t), target.Memory, exposed, exposed, remoteBoth)
	if err != nil {
		t.Fatal(err)
	}
	opaque := region.Key()
	key, _ := opaque.Layout()
	socket := h.relay("a", launch.RouteDirect, far(0, 1, "nic0"))
	c := newListAttacker(t, socket, listener)
	// there is no list memory
	c.demandEnd(wire.Descriptor{Operation: wire.OpReadList, Length: 1}, wire.StatusUnknownMemory)

	data := c.listMemory()
	size := uint64(len(data))
	entries := unsafe.Slice((*wire.ListEntryLayout)(unsafe.Pointer(&data[0])), wire.MaxListEntries)
	const entryBytes = uint64(unsafe.Sizeof(wire.ListEntryLayout{}))
	for _, d := range []wire.Descriptor{
		{Operation: wire.OpReadList},
		{Operation: wire.OpWriteList, Length: wire.MaxListEntries + 1},
		{Operation: wire.OpReadList, Length: ^uint64(0)},
		{Operation: wire.OpReadList, Length: 2, Offset: size - entryBytes},
		{Operation: wire.OpWriteList, Length: 1, Offset: size},
		{Operation: wire.OpWriteList, Length: 1, Offset: ^uint64(0) - 7},
	} {
		c.demandEnd(d, wire.StatusOutOfRange)
	}
	// zeros
	c.demandEnd(wire.Descriptor{Operation: wire.OpReadList, Length: 1, Offset: size - entryBytes},
		wire.StatusUnknownMemory)

	good := func(i int) wire.ListEntryLayout {
		return wire.ListEntryLayout{Memory: c.memory, Offset: uint64(i) * 17, Length: 16, At: uint64(i) * 16, Key: key.Key}
	}
	const used = 3000
	for i := range used {
		entries[i] = good(i)
	}
	// A goroutine writes the entries continuously: valid and invalid entries, and words of any
	// value.
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		random := rand.New(rand.NewPCG(3, 4))
		for {
			select {
			case <-stop:
				return
			default:
			}
			i := random.IntN(used)
			words := unsafe.Slice((*uint64)(unsafe.Pointer(&data[uint64(i)*entryBytes])), entryBytes/8)
			words[random.IntN(len(words))] = []uint64{0, random.Uint64(), exposed - 8, 1 << 40}[random.IntN(4)]
			time.Sleep(time.Microsecond)
			entries[i] = good(i)
		}
	}()
	moved := uint64(0)
	for range 100 {
		moved += c.fourLists(entryBytes)
	}
	close(stop)
	<-stopped
	if moved == 0 {
		t.Error("no list moved anything")
	}
	got := target.read(0, bytesThere)
	if !bytes.Equal(got[:exposed], before[:exposed]) || !bytes.Equal(got[2*exposed:], before[2*exposed:]) {
		t.Error("a list wrote beside the exposed range")
	}
	attach(t, socket)
}

// listAttacker is a client without the library that posts lists.
type listAttacker struct {
	raw
	t                  *testing.T
	memory, connection uint32
	cookie             uint64
	ended              map[uint64]bool
}

func newListAttacker(t *testing.T, socket string, listener *client.Listener) *listAttacker {
	t.Helper()
	c := &listAttacker{raw: attachRaw(t, socket), t: t, ended: map[uint64]bool{}}
	own := allocate(t, 0, 2<<20)
	answer, _ := c.ask(&wire.Export{Bytes: own.bytes, Length: own.bytes, GPU: uuid(t, 0),
		Access: wire.AccessSend | wire.AccessReceive}, own.fd)
	c.memory = answer.(*wire.Exported).Memory
	answer, _ = c.ask(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()})
	c.connection = answer.(*wire.Connected).Connection
	return c
}

func (c *listAttacker) ask(m wire.Message, fds ...int) (wire.Message, []int) {
	c.t.Helper()
	answer, received, err := c.Exchange(m, 30*time.Second, fds...)
	if err != nil {
		c.t.Fatal(err)
	}
	return answer, received
}

// listMemory requests and maps the list memory.
func (c *listAttacker) listMemory() []byte {
	c.t.Helper()
	answer, fds := c.ask(&wire.ListMemory{})
	_, again := c.ask(&wire.ListMemory{}) // is the same
	packet.CloseAll(again)
	if len(fds) != 1 || len(again) != 1 {
		c.t.Fatalf("list memory came with %d and %d descriptors", len(fds), len(again))
	}
	defer packet.CloseAll(fds)
	size := int(answer.(*wire.ListMemoryMade).Bytes)
	for _, n := range []int{0, size + 4096} {
		if err := unix.Ftruncate(fds[0], int64(n)); err == nil {
			c.t.Errorf("list memory can have %d bytes", n)
		}
	}
	data, err := unix.Mmap(fds[0], 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { unix.Munmap(data) })
	return data
}

func (c *listAttacker) post(d wire.Descriptor) {
	c.t.Helper()
	c.cookie++
	d.Cookie, d.Connection, d.WaitTimeline, d.SignalTimeline = c.cookie, c.connection, wire.NoTimeline, wire.NoTimeline
	if _, err := c.Post(d); err != nil {
		c.t.Fatal(err)
	}
	one := [8]byte{1}
	if _, err := unix.Write(c.wakeRelay, one[:]); err != nil {
		c.t.Fatal(err)
	}
}

// end waits for the end of a list, which ends once.
func (c *listAttacker) end() wire.Completion {
	c.t.Helper()
	for limit := testutil.Begin(); ; time.Sleep(100 * time.Microsecond) {
		if done, ok := c.Next(); ok {
			if c.ended[done.Cookie] || done.Cookie == 0 || done.Cookie > c.cookie {
				c.t.Fatalf("list %d ended twice, or was never posted", done.Cookie)
			}
			c.ended[done.Cookie] = true
			return done
		}
		if limit.Over() {
			c.t.Fatal("a list does not end")
		}
	}
}

func (c *listAttacker) demandEnd(d wire.Descriptor, status wire.Status) {
	c.t.Helper()
	c.post(d)
	if done := c.end(); wire.Status(done.Status) != status {
		c.t.Errorf("%+v ended as %v, not as %v", d, wire.Status(done.Status), status)
	}
}

// fourLists posts lists of 1500 entries, waits for the ends and returns the moved bytes.
func (c *listAttacker) fourLists(entryBytes uint64) (moved uint64) {
	c.t.Helper()
	const entries = 1500
	for k := range uint64(4) {
		kind := []uint32{wire.OpWriteList, wire.OpReadList}[k%2]
		c.post(wire.Descriptor{Operation: kind, Length: entries, Offset: k * 300 * entryBytes})
	}
	for range 4 {
		done := c.end()
		switch wire.Status(done.Status) {
		case wire.StatusOK, wire.StatusUnknownMemory, wire.StatusOutOfRange, wire.StatusBadKey:
		default:
			c.t.Fatalf("a list ended as %v", wire.Status(done.Status))
		}
		if done.Entry >= entries {
			c.t.Fatalf("entry %d failed", done.Entry)
		}
		moved += done.Length
	}
	return moved
}

// A list on a connection with a relay of an older release ends with StatusVersion, and the
// connection stays up.
func TestListToAnOlderRelayEndsWithStatusVersion(t *testing.T) {
	s, err := meetOf(t, wire.RouteDirect, wire.ListVersion-1)
	if err != nil {
		t.Fatal(err)
	}
	source := exported(t, s.a, 0, 2<<20)
	key := wire.NewRemoteKey(wire.UUID{1}, 4096, remoteBoth)
	for _, post := range []func() (*client.Operation, error){
		func() (*client.Operation, error) {
			return s.sending.ReadList(within(t), []client.ListEntry{{Memory: source.Memory, Length: 8, Key: key}})
		},
		func() (*client.Operation, error) {
			return s.sending.WriteList(within(t), []client.ListEntry{{Memory: source.Memory, Length: 8, Key: key}})
		},
	} {
		op, err := post()
		_, err = wait(t, op, err)
		demand(t, err, wire.StatusVersion)
	}
	if err := s.sending.Err(); err != nil {
		t.Error(err)
	}
}

// A relay that answers a list with messages that no protocol allows ends the connection.
func TestHostileRelayOfAListEndsTheConnection(t *testing.T) {
	ranges := func(region uint32, list ...wire.Range) *wire.PeerGrantRanges {
		m := &wire.PeerGrantRanges{Region: region, Count: uint32(len(list))}
		copy(m.Range[:], list)
		return m
	}
	grant := &wire.PeerGrant{Send: 1, Grant: 1, Length: 32, Region: wire.ListRegion}
	for name, says := range map[string][]wire.Message{
		"a grant without ranges": {grant},
		"too few bytes":          {ranges(9, wire.Range{Length: 31}), grant},
		"too many bytes":         {ranges(9, wire.Range{Length: 33}), grant},
		"beyond the region":      {ranges(9, wire.Range{At: 2<<20 - 31, Length: 32})},
		"an overflow":            {ranges(9, wire.Range{At: ^uint64(0) - 3, Length: 32})},
		"an unknown region":      {ranges(8, wire.Range{Length: 32})},
		"no range":               {ranges(9)},
		"one range":              {&wire.PeerGrant{Send: 1, Grant: 1, Length: 32, Region: 9}},
		"a part": {ranges(9, wire.Range{Length: 32}), &wire.PeerGrant{Send: 1, Grant: 1, Part: 8,
			Length: 32, Region: wire.ListRegion}},
		"another message": {ranges(9, wire.Range{Length: 32}), &wire.PeerGrant{Send: 2, Grant: 1, Length: 32,
			Region: wire.ListRegion}},
		"too many ranges":       {&wire.PeerGrantRanges{Region: 9, Count: wire.MessageRanges + 1}},
		"a refusal without one": {&wire.PeerListRefused{Number: 1}},
		"a refusal beyond":      {&wire.PeerListRefused{Number: 1, Position: 32, Status: uint32(wire.StatusBadKey)}},
		"a refusal of none":     {&wire.PeerListRefused{Number: 7, Status: uint32(wire.StatusBadKey)}},
		"a read that is none":   {&wire.PeerListRefused{Number: 1, Status: uint32(wire.StatusBadKey), Reads: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := meet(t, wire.RouteDirect)
			if err != nil {
				t.Fatal(err)
			}
			source, target := exported(t, s.a, 0, 2<<20), allocate(t, 3, 2<<20)
			key := wire.NewRemoteKey(wire.UUID{1}, 4096, remoteBoth)
			op, err := s.sending.WriteList(within(t), []client.ListEntry{
				{Memory: source.Memory, Length: 16, Key: key}, {Memory: source.Memory, Offset: 100, Length: 16, Key: key, At: 100},
			})
			if err != nil {
				t.Fatal(err)
			}
			hear[*wire.PeerWriteList](s)
			s.say(&wire.PeerRegion{Region: 9, Bytes: target.bytes}, target.fd)
			for _, m := range says {
				s.say(m)
			}
			_, err = wait(t, op, nil)
			demand(t, err, wire.StatusMalformed)
			attach(t, s.socket)
		})
	}
}
