package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// sided is a one-sided operation of the model: by a connection's sender, on a separate range of the
// receiver's memory.
type sided struct {
	name        string
	reads       bool
	here, there uint64 // where the ranges begin
	n           uint64
	pattern     []byte
	op          *client.Operation
	hold        *hold
	signal      *client.Timeline
	bad         wire.Status
	cancel      bool
	withdrawn   bool
	// entries are the entries of a list, with a begin and a length in both ranges; nil of a single
	// one.
	entries [][2]uint64
	moved   uint64
	err     error
	// seen has, at the end, the read bytes, or the bytes written at the remote side; frozen is that
	// once the offer was withdrawn.
	seen, frozen []byte
}

// oneSided posts an operation on a separate region.
func (w *world) oneSided(t *rapid.T) {
	var open []*link
	for _, p := range w.pipes {
		if p.ended == "" && p.from.gone == "" && p.to.gone == "" && !p.to.unexported {
			open = append(open, p)
		}
	}
	if len(open) == 0 {
		t.Skip("no connection")
	}
	p := one(t, open, "connection")
	n := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64Range(0, modelLargest),
		rapid.SampledFrom([]uint64{modelSlot - 1, modelSlot, modelSlot + 1})).Draw(t, "bytes")
	const guard = 17
	if from, to := p.from, p.to; max(from.used, to.used)+n+2*guard > modelBytes || from.timelines+2 > wire.Timelines {
		t.Skip("its memory is full")
	}
	o := &sided{reads: rapid.Bool().Draw(t, "reads"), here: p.from.used, there: p.to.used, n: n,
		pattern: pattern(len(w.program), n)}
	p.from.used += n + guard
	p.to.used += n + 2*guard
	o.name = fmt.Sprintf("one-sided %d of %s (reads: %v), %d bytes at %d from or to %d", len(p.sided), p.name, o.reads,
		n, o.here, o.there)
	source, at := p.from, o.here
	if o.reads {
		source, at = p.to, o.there
	}
	copy(source.place.view[at:], o.pattern)
	copy(source.want[at:], o.pattern)

	ctx, cancel := soon()
	defer cancel()
	// The region extends behind the range, so that an offset can lead there.
	offer, err := p.receiving.Expose(ctx, p.to.memory, o.there, n+guard, wire.RemoteRead|wire.RemoteWrite)
	if err != nil {
		t.Fatalf("offer: %v", err)
	}
	key, place := offer.Key(), uint64(0)
	switch rapid.IntRange(0, 11).Draw(t, "kind") {
	case 0:
		o.bad, place = wire.StatusOutOfRange, guard+1
	case 1:
		o.bad, key = wire.StatusBadKey, wire.NewRemoteKey(wire.UUID{1}, n, wire.RemoteRead)
	}
	if p.from.unexported {
		o.bad = wire.StatusUnknownMemory
	}
	timeline := func() *client.Timeline {
		line, err := p.from.session.Timeline(p.from.timelines)
		if err != nil {
			t.Fatal(err)
		}
		p.from.timelines++
		return line
	}
	var options []client.Option
	if rapid.IntRange(0, 5).Draw(t, "waits") == 0 {
		o.hold = &hold{timeline: timeline(), opens: 1}
		options = append(options, client.After(o.hold.timeline, 1))
	}
	if rapid.IntRange(0, 3).Draw(t, "signals") == 0 {
		o.signal = timeline()
		options = append(options, client.Signal(o.signal, 1))
	}
	w.say(t, "%s (waits: %v, must end as %v)", o.name, o.hold != nil, o.bad)
	if o.entries = entriesOf(t, n); o.entries != nil {
		w.say(t, "%s is a list: %v", o.name, o.entries)
	}
	if err := o.post(ctx, p, key, place, options); err != nil {
		t.Fatalf("%s: %v", o.name, err)
	}
	p.sided = append(p.sided, o)
	if rapid.IntRange(0, 7).Draw(t, "cancels") == 0 {
		w.say(t, "cancel %s", o.name)
		o.cancel = true
		if err := o.op.Cancel(); err != nil {
			t.Fatal(err)
		}
	}
	if rapid.IntRange(0, 3).Draw(t, "withdraws") == 0 {
		w.say(t, "withdraw the offer of %s", o.name)
		o.withdrawn = true
		if err := offer.Revoke(ctx); err != nil {
			t.Fatal(err)
		}
		o.frozen = slices.Clone(p.to.place.view[o.there : o.there+n])
	}
}

// post posts the operation, with entries as a list.
func (o *sided) post(ctx context.Context, p *link, key wire.RemoteKey, place uint64,
	options []client.Option) (err error) {
	post, postList := p.sending.Write, p.sending.WriteList
	if o.reads {
		post, postList = p.sending.Read, p.sending.ReadList
	}
	if o.entries == nil {
		o.op, err = post(p.from.memory, o.here, o.n, key, place, options...)
		return err
	}
	var list []client.ListEntry
	for _, e := range o.entries {
		list = append(list, client.ListEntry{Memory: p.from.memory, Offset: o.here + e[0], Length: e[1], Key: key,
			At: place + e[0]})
	}
	o.op, err = postList(ctx, list, options...)
	return err
}

// entriesOf cuts so many bytes into the entries of a list, in any order; nil for no list.
func entriesOf(t *rapid.T, n uint64) (list [][2]uint64) {
	if n == 0 || rapid.Bool().Draw(t, "single") {
		return nil
	}
	// Most have few entries, some more than a part.
	length := max(1, n/rapid.SampledFrom([]uint64{1, 2, 7, 60, 1500}).Draw(t, "cuts"))
	for at := uint64(0); at < n; at += length {
		list = append(list, [2]uint64{at, min(length, n-at)})
	}
	switch rapid.IntRange(0, 2).Draw(t, "order") {
	case 1:
		slices.Reverse(list)
	case 2: // pairs of neighbours that change places
		for i := 0; i+3 < len(list); i += 4 {
			list[i], list[i+1], list[i+2], list[i+3] = list[i+2], list[i+3], list[i], list[i+1]
		}
	}
	return list
}

// finishSided starts waiting operations.
func (w *world) finishSided(t *rapid.T) {
	for _, p := range w.pipes {
		for _, o := range p.sided {
			if o.hold != nil && p.from.gone == "" {
				o.hold.release()
			}
		}
	}
}

func (w *world) judgeSided(t *rapid.T, p *link) {
	for _, o := range p.sided {
		w.await(t, o.op.Done(), "the end of "+o.name)
		ctx, cancel := soon()
		o.moved, o.err = o.op.Wait(ctx)
		cancel()
		s, at := p.to, o.there
		if o.reads {
			s, at = p.from, o.here
		}
		o.seen = slices.Clone(s.place.view[at : at+o.n])
		switch {
		case o.err == nil:
			if o.bad != wire.StatusOK {
				t.Fatalf("%s ended well, not as %v", o.name, o.bad)
			}
			if o.moved != o.n || !s.freed() && !bytes.Equal(o.seen, o.pattern) {
				t.Fatalf("%s moved %d, and the bytes differ from byte %d on", o.name, o.moved, firstDifference(o.seen, o.pattern))
			}
		case p.ended != "":
		case o.bad != wire.StatusOK && is(o.err, o.bad):
			o.checkFailedEntry(t, p)
		case is(o.err, wire.StatusCanceled) && o.cancel:
		case is(o.err, wire.StatusBadKey) && (o.withdrawn || p.to.unexported):
		// The relay looks up a list's memory only at the begin of the entries.
		case is(o.err, wire.StatusUnknownMemory) && o.entries != nil && p.from.unexported:
		default:
			t.Fatalf("%s ended as %v, not as %v", o.name, o.err, o.bad)
		}
		if o.signal != nil && !o.signal.Reached(1) {
			t.Fatalf("%s has ended and its timeline stands at %d", o.name, o.signal.Value())
		}
	}
}

// checkFailedEntry demands that a list beyond the bounds of its region failed at the entry that has the
// last byte of the range: only that byte is outside.
func (o *sided) checkFailedEntry(t *rapid.T, p *link) {
	if o.bad != wire.StatusOutOfRange || o.entries == nil || o.cancel || o.withdrawn || p.to.unexported {
		return
	}
	if e := o.entries[o.op.Failed()]; e[0]+e[1] != o.n {
		t.Fatalf("entry %d of %s failed, not the one at the end of the range", o.op.Failed(), o.name)
	}
}

// lookSided adds the bytes of one-sided operations to a memory's expected content, and returns the
// undefined ranges.
func (w *world) lookSided(s *attached) (loose []*post) {
	for _, p := range w.pipes {
		for _, o := range p.sided {
			switch {
			case o.reads && p.from == s && s.abrupt && is(o.err, wire.StatusRelayDied):
				loose = append(loose, &post{at: o.here, n: o.n})
			case o.reads && p.from == s:
				copy(s.want[o.here:], o.seen)
			case o.reads || p.to != s:
			case o.frozen != nil:
				copy(s.want[o.there:], o.frozen)
			case o.err == nil:
				copy(s.want[o.there:], o.seen)
			default: // the remote side may get the end later than the writer
				loose = append(loose, &post{at: o.there, n: o.n})
			}
		}
	}
	return loose
}
