package relay_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
)

// The sizes of the deadlock test: a communicator is a connection per direction, with messages of up
// to three and a half slots.
const (
	communicators   = 16 // 64 where PEERLANE_DEADLOCK_ROUNDS is set
	deadlockSlot    = 64 << 10
	deadlockLargest = deadlockSlot*7/2 + 5
	eachSends       = 2 // messages, in each direction
)

// attachment is a connection of a communicator.
type attachment struct {
	sending, receiving *client.Connection
	source, target     *memory
}

// parcel is one message.
type parcel struct {
	*attachment
	at, n, tag uint64
	received   *client.Operation
}

// Many communicators share a pair of relays with two slots per direction: every message arrives,
// for any order of posted receives.
//
// PEERLANE_DEADLOCK_ROUNDS says how many orders are tried; PEERLANE_DEADLOCK_SEED repeats an order.
func TestCommunicatorsOverTwoSlotsDoNotDeadlock(t *testing.T) {
	rounds, communicators := 3, communicators
	if wanted := os.Getenv("PEERLANE_DEADLOCK_ROUNDS"); wanted != "" {
		var err error
		if rounds, err = strconv.Atoi(wanted); err != nil {
			t.Fatal(err)
		}
		communicators = 64
	}
	seed := rand.Uint64()
	if wanted := os.Getenv("PEERLANE_DEADLOCK_SEED"); wanted != "" {
		var err error
		if seed, err = strconv.ParseUint(wanted, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	h := newHost(t)
	h.change = func(c *launch.Config) { c.Slots, c.SlotBytes = 2, deadlockSlot }
	h.nic("nic0")
	h.nic("nic1")
	a := attach(t, h.relay("a", launch.RouteStaged, far(0, 1, "nic0")))
	b := attach(t, h.relay("b", launch.RouteStaged, far(3, 2, "nic1")))
	half := (uint64(communicators)*eachSends*deadlockLargest + 2<<20 - 1) &^ (2<<20 - 1)
	atA, atB := exported(t, a, 0, 2*half), exported(t, b, 3, 2*half)
	var ways []*attachment
	for range communicators {
		there, back := &attachment{source: atA, target: atB}, &attachment{source: atB, target: atA}
		there.sending, there.receiving, _ = join(t, a, 0, b, 3)
		back.sending, back.receiving, _ = join(t, b, 3, a, 0)
		ways = append(ways, there, back)
	}
	for i := range rounds {
		seed := seed + uint64(i)
		t.Logf("PEERLANE_DEADLOCK_SEED=%d", seed)
		exchangeAll(t, ways, half, int(seed%3), rand.New(rand.NewPCG(seed, 0)))
	}
}

// exchangeAll sends messages on every connection. Sends lie in the first half of a memory, receives
// in the second.
func exchangeAll(t *testing.T, ways []*attachment, half uint64, order int, draw *rand.Rand) {
	t.Helper()
	// Long: an emulated machine is ten times slower, and the test waits once for the whole.
	ctx, cancel := testutil.WithLimit(t.Context(), 5*time.Minute)
	defer cancel()
	want := map[*memory][]byte{ways[0].source: make([]byte, half), ways[0].target: make([]byte, half)}
	for m, content := range want {
		var seed [32]byte
		binary.LittleEndian.PutUint64(seed[:], draw.Uint64())
		_, _ = rand.NewChaCha8(seed).Read(content) // cannot fail
		m.write(0, content)
		m.write(half, make([]byte, half))
	}
	used := map[*memory]uint64{}
	var parcels []*parcel
	for _, w := range ways {
		for tag := range uint64(eachSends) {
			p := &parcel{attachment: w, at: used[w.source], n: 1 + draw.Uint64N(deadlockLargest), tag: tag}
			used[w.source] += p.n
			parcels = append(parcels, p)
		}
	}
	var all []*client.Operation
	send := func(p *parcel) {
		op, err := p.sending.Send(p.source.Memory, p.at, p.n, client.Tag(p.tag))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, op)
	}
	receive := func(p *parcel) {
		var err error
		if p.received, err = p.receiving.Receive(p.target.Memory, half+p.at, p.n, client.Tag(p.tag)); err != nil {
			t.Fatal(err)
		}
		all = append(all, p.received)
	}
	shuffled := func() []*parcel {
		list := append([]*parcel(nil), parcels...)
		draw.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		return list
	}
	switch sends, receives := shuffled(), shuffled(); order {
	case 0: // in any order of both
		for i := range parcels {
			send(sends[i])
			receive(receives[i])
		}
	case 1: // every message waits for the slots, before the first send
		for _, p := range receives {
			receive(p)
		}
		for _, p := range sends {
			send(p)
		}
	case 2: // a receive waits for the previous receive: no later message may get the slots
		for _, p := range sends {
			send(p)
		}
		for i, p := range receives {
			receive(p)
			if _, err := p.received.Wait(ctx); err != nil {
				t.Fatalf("receive %d of %d, each after the one before: %v", i+1, len(receives), err)
			}
		}
	}
	for i, op := range all {
		if _, err := op.Wait(ctx); err != nil {
			t.Fatalf("operation %d of %d: %v", i+1, len(all), err)
		}
	}
	got := map[*memory][]byte{}
	for m := range want {
		got[m] = m.read(half, half)
	}
	for _, p := range parcels {
		if !bytes.Equal(got[p.target][p.at:p.at+p.n], want[p.source][p.at:p.at+p.n]) {
			t.Errorf("%d bytes from byte %d on arrived wrong", p.n, p.at)
		}
	}
}
