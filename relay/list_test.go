package relay_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// Lists by every way.
func TestListOperationsMoveEachEntry(t *testing.T) {
	for _, way := range ways {
		t.Run(way, func(t *testing.T) {
			p := byWay(t, way)
			t.Run("every byte", p.listsMoveEveryByte)
			t.Run("failures", p.listsEndWithTheFirstFailure)
			t.Run("many at once", p.listsAtOnce)
			t.Run("revoke", func(t *testing.T) {
				r := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth)
				p.listsUnderRevocation(t, r)
			})
			t.Run("connection ends", p.listsEndWithTheirConnection)
		})
	}
}

// listSide is a memory at one end, with the expected content.
type listSide struct {
	memory *client.Memory
	key    wire.RemoteKey // of a range that begins at base
	base   uint64
	write  func(offset uint64, b []byte)
	read   func(offset, n uint64) []byte
	model  []byte
}

func (p *pair) listSides(t *testing.T, n uint64) (here, there []*listSide) {
	t.Helper()
	gpu := func(m *memory) *listSide {
		return &listSide{memory: m.Memory, write: m.write, read: m.read}
	}
	host := func(m *client.Memory) *listSide {
		return &listSide{
			memory: m, write: func(at uint64, b []byte) { copy(m.Data[at:], b) },
			read: func(at, n uint64) []byte { return bytes.Clone(m.Data[at : at+n]) },
		}
	}
	here = []*listSide{gpu(p.source), host(hostMemory(t, p.a, 0, n))}
	there = []*listSide{gpu(p.target), host(hostMemory(t, p.b, 3, n))}
	for i, s := range there {
		s.base = uint64(i+1) * 100
		s.key = p.offer(t, s.memory, s.base, n-2*s.base, remoteBoth).Key()
	}
	for _, s := range append(append([]*listSide(nil), here...), there...) {
		s.model = random(t, n)
		s.write(0, s.model)
	}
	return here, there
}

// listOf returns n entries whose destinations do not overlap; some are adjacent at one or both ends.
// listOf applies the entries to the expected contents.
func listOf(random *rand.Rand, n int, longest uint64, reads bool, here, there []*listSide) []client.ListEntry {
	// Destinations are given out in order, sources anywhere.
	to, from := there, here
	if reads {
		to, from = here, there
	}
	next := make([]uint64, len(to))
	for i := range next {
		next[i] = to[i].base
	}
	before := make([][]byte, len(from))
	for i, s := range from {
		before[i] = bytes.Clone(s.model)
	}
	var list []client.ListEntry
	var source uint64
	i, k := 0, 0
	for len(list) < n {
		length := 1 + random.Uint64N(longest)
		switch random.IntN(4) {
		case 0: // adjacent entries at both ends
		case 1:
			next[i] += random.Uint64N(100)
		case 2:
			source = random.Uint64N(longest)
		default:
			i, k = random.IntN(len(to)), random.IntN(len(from))
			source = random.Uint64N(uint64(len(from[k].model)) / 2)
		}
		d, s := to[i], from[k]
		if limit := uint64(len(s.model)) - s.base; source < s.base || source+length > limit {
			source = s.base
		}
		if next[i]+length > uint64(len(d.model))-d.base {
			break
		}
		e := client.ListEntry{Length: length}
		local, remote, at := s, d, next[i]
		e.Offset = source
		if reads {
			local, remote, at, e.Offset = d, s, source, next[i]
		}
		e.Memory, e.Key, e.At = local.memory, remote.key, at-remote.base
		copy(d.model[next[i]:], before[k][source:source+length])
		next[i] += length
		source += length
		list = append(list, e)
	}
	return list
}

func checkSides(t *testing.T, what string, sides ...[]*listSide) {
	t.Helper()
	for _, all := range sides {
		for i, s := range all {
			if got := s.read(0, uint64(len(s.model))); !bytes.Equal(got, s.model) {
				t.Fatalf("%s: byte %d of memory %d differs", what, firstDifference(got, s.model), i)
			}
		}
	}
}

func listBytes(list []client.ListEntry) (n uint64) {
	for _, e := range list {
		n += e.Length
	}
	return n
}

func (p *pair) listsMoveEveryByte(t *testing.T) {
	const n = 1 << 20
	here, there := p.listSides(t, n)
	random := rand.New(rand.NewPCG(1, 2))
	for _, shape := range []struct {
		entries int
		longest uint64
	}{{1, 1}, {2, 300 << 10}, {40, 16 << 10}, {2*wire.PartEntries + 1, 300}} {
		for _, reads := range []bool{true, false} {
			list := listOf(random, shape.entries, shape.longest, reads, here, there)
			post := p.sending.WriteList
			if reads {
				post = p.sending.ReadList
			}
			op, err := post(within(t), list)
			if moved, err := wait(t, op, err); err != nil || moved != listBytes(list) {
				t.Fatalf("%d entries of up to %d bytes (reads: %v): %d of %d bytes, %v at entry %d", len(list), shape.longest,
					reads, moved, listBytes(list), err, op.Failed())
			}
			checkSides(t, "a list", here, there)
		}
	}
}

func (p *pair) listsEndWithTheFirstFailure(t *testing.T) {
	const n, each, entries = 256 << 10, 64, 1500
	key := p.offer(t, p.target.Memory, 0, n, remoteBoth).Key()
	toRead, toWrite := p.offer(t, p.target.Memory, 0, n, wire.RemoteRead).Key(), p.offer(t, p.target.Memory, 0, n,
		wire.RemoteWrite).Key()
	list := func() []client.ListEntry {
		all := make([]client.ListEntry, entries)
		for i := range all { // no neighbours
			all[i] = client.ListEntry{Memory: p.source.Memory, Offset: uint64(i) * 2 * each, Length: each, Key: key,
				At: uint64(i) * 2 * each}
		}
		return all
	}
	for name, c := range map[string]struct {
		status wire.Status
		spoil  func(reads bool, all []client.ListEntry)
		failed int
	}{
		"range here": {wire.StatusOutOfRange, func(_ bool, all []client.ListEntry) {
			all[1200].Offset = pairBytes - each + 1
		}, 1200},
		"overflow here":  {wire.StatusOutOfRange, func(_ bool, all []client.ListEntry) { all[7].Offset = ^uint64(0) - 3 }, 7},
		"length":         {wire.StatusOutOfRange, func(_ bool, all []client.ListEntry) { all[3].Length = ^uint64(0) }, 3},
		"range there":    {wire.StatusOutOfRange, func(_ bool, all []client.ListEntry) { all[1101].At = n - each + 1 }, 1101},
		"overflow there": {wire.StatusOutOfRange, func(_ bool, all []client.ListEntry) { all[0].At = ^uint64(0) - each }, 0},
		"key": {wire.StatusBadKey, func(_ bool, all []client.ListEntry) {
			all[500].Key = wire.NewRemoteKey(wire.UUID{1}, n, remoteBoth)
		}, 500},
		"access": {wire.StatusNotPermitted, func(reads bool, all []client.ListEntry) {
			all[9].Key = toRead
			if reads {
				all[9].Key = toWrite
			}
		}, 9},
		"two": {wire.StatusBadKey, func(_ bool, all []client.ListEntry) {
			all[100].Key = wire.NewRemoteKey(wire.UUID{1}, n, remoteBoth)
			all[1400].Offset = pairBytes
		}, 100},
		// An entry after the previous one, whose end alone is out of range.
		"adjacent": {wire.StatusOutOfRange, func(_ bool, all []client.ListEntry) {
			all[20].At, all[21].At, all[22].At = n-each-each/2, n-each/2, n+each/2
			all[21].Offset, all[22].Offset = all[20].Offset+each, all[20].Offset+2*each
		}, 21},
	} {
		for _, reads := range []bool{true, false} {
			post, kind := p.sending.WriteList, "write"
			if reads {
				post, kind = p.sending.ReadList, "read"
			}
			t.Run(name+" "+kind, func(t *testing.T) {
				p.source.write(0, bytes.Repeat([]byte{1}, n))
				p.target.write(0, bytes.Repeat([]byte{2}, n))
				all := list()
				c.spoil(reads, all)
				op, err := post(within(t), all)
				moved, err := wait(t, op, err)
				demand(t, err, c.status)
				if op.Failed() != c.failed {
					t.Errorf("entry %d failed, not %d", op.Failed(), c.failed)
				}
				to, want := p.target, byte(1)
				if reads {
					to, want = p.source, 2
				}
				got, done := to.read(0, n), uint64(0)
				for i := range all { // whole, or not at all
					at := uint64(i) * 2 * each
					b := got[at : at+each]
					switch {
					case i == c.failed || b[0] != want:
						if i != 21 && i != 22 && bytes.IndexByte(b, want) >= 0 && name != "adjacent" {
							t.Fatalf("entry %d was moved in part", i)
						}
					case !bytes.Equal(b, bytes.Repeat([]byte{want}, each)):
						t.Fatalf("entry %d was moved in part", i)
					default:
						done += each
					}
				}
				if name != "adjacent" && done != moved {
					t.Errorf("%d bytes were moved, and the list says %d", done, moved)
				}
			})
		}
	}
	// The side that accepted has no lists, and a list has entries.
	op, err := p.receiving.ReadList(within(t), []client.ListEntry{{Memory: p.target.Memory, Length: 8, Key: key}})
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusMalformed)
	_, err = p.sending.ReadList(within(t), nil)
	demand(t, err, wire.StatusOutOfRange)
	_, err = p.sending.ReadList(within(t), []client.ListEntry{{Memory: p.source.Memory, Length: 8}})
	demand(t, err, wire.StatusBadKey)
	flush, err := p.sending.Flush() // which reports the first of these failures
	if _, err = wait(t, flush, err); err == nil {
		t.Error("a flush knows of no failed list")
	}
	p.sided(t, key, 0, 8) // the connection goes on
}

// Lists, single operations and a flush, more parts than may be under way at a time.
func (p *pair) listsAtOnce(t *testing.T) {
	const many, entries, each = 5, 2*wire.PartEntries + 7, 64
	const n = entries * each
	key := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth).Key()
	want := random(t, many*n)
	p.source.write(0, want)
	list := func(k uint64, reversed bool) []client.ListEntry {
		all := make([]client.ListEntry, entries)
		for i := range all {
			at := k*n + uint64(i)*each
			all[i] = client.ListEntry{Memory: p.source.Memory, Offset: at, Length: each, Key: key, At: at}
			if reversed {
				all[i].At = k*n + uint64(entries-1-i)*each
			}
		}
		return all
	}
	var ops []*client.Operation
	for k := range uint64(many) {
		op, err := p.sending.WriteList(within(t), list(k, k%2 == 0))
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	flush, err := p.sending.Flush()
	if _, err := wait(t, flush, err); err != nil {
		t.Fatal(err)
	}
	for _, op := range ops {
		select {
		case <-op.Done():
		default:
			t.Fatal("a flush ended before a list that was posted before it")
		}
	}
	p.source.write(0, make([]byte, many*n))
	ops = nil
	for k := range uint64(many) {
		op, err := p.sending.ReadList(within(t), list(k, k%2 == 0))
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	for _, op := range ops {
		if _, err := wait(t, op, nil); err != nil {
			t.Fatal(err)
		}
	}
	if got := p.source.read(0, many*n); !bytes.Equal(got, want) {
		t.Fatalf("byte %d differs", firstDifference(got, want))
	}
	// The list memory is free again: the longest list fits.
	all := make([]client.ListEntry, wire.MaxListEntries)
	for i := range all {
		all[i] = client.ListEntry{Memory: p.source.Memory, Offset: uint64(i) % n, Length: 1, Key: key, At: uint64(i) % n}
	}
	if _, err := p.sending.WriteList(within(t), append(all, all[0])); wire.StatusOf(err) != wire.StatusOutOfRange {
		t.Errorf("a list that is too long: %v", err)
	}
	op, err := p.sending.WriteList(within(t), all)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.sending.WriteList(within(t), all[:1]); err != nil && !errors.Is(err, client.ErrListsFull) {
		t.Errorf("a list more: %v", err)
	}
	if err := op.Cancel(); err != nil {
		t.Fatal(err)
	}
	if moved, err := op.Wait(within(t)); wire.StatusOf(err) != wire.StatusCanceled && (err != nil ||
		moved != wire.MaxListEntries) {
		t.Errorf("a canceled list moved %d: %v", moved, err)
	}
}

// A region is revoked under lists: each ends, and none writes afterwards.
func (p *pair) listsUnderRevocation(t *testing.T, r *client.Region) {
	const entries, each = 2000, 100
	all := make([]client.ListEntry, entries)
	for i := range all {
		at := uint64(i) * 2 * each
		all[i] = client.ListEntry{Memory: p.source.Memory, Offset: at, Length: each, Key: r.Key(), At: at}
	}
	var ops []*client.Operation
	for i := range 6 {
		post := p.sending.WriteList
		if i%2 == 1 {
			post = p.sending.ReadList
		}
		op, err := post(within(t), all)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	if err := r.Revoke(within(t)); err != nil {
		t.Fatal(err)
	}
	before := p.target.read(0, entries*2*each)
	for i, op := range ops {
		if _, err := op.Wait(within(t)); err != nil && wire.StatusOf(err) != wire.StatusBadKey {
			t.Fatalf("list %d: %v", i, err)
		}
	}
	if !bytes.Equal(p.target.read(0, entries*2*each), before) {
		t.Error("a list wrote after the revocation")
	}
}

// The connection ends under lists: each ends, with its reason.
func (p *pair) listsEndWithTheirConnection(t *testing.T) {
	sending, receiving, _ := join(t, p.a, 0, p.b, 3)
	r, err := receiving.Expose(within(t), p.target.Memory, 0, pairBytes, remoteBoth)
	if err != nil {
		t.Fatal(err)
	}
	all := make([]client.ListEntry, 3*wire.PartEntries)
	for i := range all {
		at := uint64(i) * 2000
		all[i] = client.ListEntry{Memory: p.source.Memory, Offset: at, Length: 1000, Key: r.Key(), At: at}
	}
	var ops []*client.Operation
	for i := range 8 {
		post := sending.WriteList
		if i%2 == 1 {
			post = sending.ReadList
		}
		op, err := post(within(t), all)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	if err := receiving.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	for i, op := range ops {
		moved, err := op.Wait(within(t))
		if err == nil && moved != listBytes(all) || err != nil && wire.StatusOf(err) != wire.StatusPeerClosed {
			t.Errorf("list %d moved %d and ended as %v", i, moved, err)
		}
	}
}
