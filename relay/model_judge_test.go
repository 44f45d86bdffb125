package relay_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/peerlane/peerlane/relay/wire"
)

// finish ends open operations of the program, and judges.
func (w *world) finish(t *rapid.T) {
	for _, o := range w.posts() {
		if s, _ := o.pipe.end(o.sends); o.hold != nil && !o.hold.released && s.gone == "" {
			o.hold.release()
		}
	}
	w.finishSided(t)
	for _, p := range w.pipes {
		w.complete(t, p)
	}
	for _, p := range w.pipes {
		w.judge(t, p)
		w.judgeSided(t, p)
	}
	for _, s := range w.sessions {
		w.look(t, s)
	}
}

// complete gives every message a receive and every receive a message, and waits for the ends.
func (w *world) complete(t *rapid.T, p *link) {
	for _, o := range p.posts {
		if o.cancel || o.bad != wire.StatusOK || p.ended != "" {
			w.result(t, o)
		}
	}
	if p.ended == "" {
		for tag := range uint64(3) {
			sends, receives := p.meeting(tag)
			for i := len(receives); i < len(sends); i++ {
				w.partner(t, sends[i])
			}
			for i := len(sends); i < len(receives); i++ {
				w.partner(t, receives[i])
			}
		}
	}
	for _, o := range p.posts {
		w.result(t, o)
	}
}

// partner posts the counterpart of an operation, or cancels the operation if the remote memory is
// gone.
func (w *world) partner(t *rapid.T, o *post) {
	if s, _ := o.pipe.end(!o.sends); !s.unexported {
		w.place(t, o.pipe, !o.sends, o.tag, o.n, false, false, wire.StatusOK)
		return
	}
	w.say(t, "cancel %s, which nobody can meet", o.name)
	o.cancel = true
	if err := o.op.Cancel(); err != nil {
		t.Fatal(err)
	}
}

// meeting returns the operations of a tag that take part in matching, in order.
func (p *link) meeting(tag uint64) (sends, receives []*post) {
	for _, o := range p.posts {
		switch {
		case o.tag != tag || o.bad != wire.StatusOK || o.over && is(o.err, wire.StatusCanceled):
		case o.sends:
			sends = append(sends, o)
		default:
			receives = append(receives, o)
		}
	}
	return sends, receives
}

func is(err error, status wire.Status) bool { return errors.Is(err, &wire.Error{Status: status}) }

func (w *world) judge(t *rapid.T, p *link) {
	for _, o := range p.posts {
		switch {
		case is(o.err, wire.StatusCanceled) && !o.cancel && p.ended == "":
			t.Fatalf("%s was canceled by nobody", o.name)
		case o.bad != wire.StatusOK && o.err == nil, o.bad != wire.StatusOK && p.ended == "" && !is(o.err, o.bad):
			t.Fatalf("%s ended as %v, not as %v", o.name, o.err, o.bad)
		}
		if o.hold != nil && o.hold.opens == wire.TurnRelay && o.err == nil {
			if v := o.hold.timeline.Value(); v != wire.TurnStream && v != wire.TimelineEnd {
				t.Fatalf("%s has ended well and the turn is %d's", o.name, v)
			}
		}
		if o.signal != nil && !o.signal.Reached(1) {
			t.Fatalf("%s has ended and its timeline stands at %d", o.name, o.signal.Value())
		}
	}
	for tag := range uint64(3) {
		sends, receives := p.meeting(tag)
		if p.ended == "" && len(sends) != len(receives) {
			t.Fatalf("%s, tag %d: %d messages and %d receives ended", p.name, tag, len(sends), len(receives))
		}
		for i := range min(len(sends), len(receives)) {
			w.met(t, p, sends[i], receives[i])
		}
		for _, o := range append(sends[min(len(sends), len(receives)):], receives[min(len(sends), len(receives)):]...) {
			if o.err == nil {
				t.Fatalf("%s ended well and had nobody to meet", o.name)
			}
		}
	}
}

// met judges a message and the receive that it met.
func (w *world) met(t *rapid.T, p *link, send, receive *post) {
	truncated := send.n > receive.n
	if p.ended == "" {
		want := wire.StatusOK
		if truncated {
			want = wire.StatusTruncated
		}
		for _, o := range []*post{send, receive} {
			if want == wire.StatusOK && o.err != nil || want != wire.StatusOK && !is(o.err, want) {
				t.Fatalf("%s ended as %v, not as %v, and met %s and %s", o.name, o.err, want, send.name, receive.name)
			}
		}
	}
	if truncated && (send.err == nil || receive.err == nil) {
		t.Fatalf("%s does not fit into %s, and they ended as %v and %v", send.name, receive.name, send.err, receive.err)
	}
	if send.err == nil && send.moved != send.n {
		t.Fatalf("%s moved %d", send.name, send.moved)
	}
	if receive.err == nil && receive.moved != send.n {
		t.Fatalf("%s moved %d of %s", receive.name, receive.moved, send.name)
	}
	if send.err != nil && receive.err != nil {
		return
	}
	if s := p.to; s.abrupt && receive.abrupt() {
		receive.seen = s.place.view[receive.at : receive.at+receive.n] // it ended before the message came
	}
	if p.to.freed() {
		return
	}
	// An operation reported arrival of the bytes.
	if !bytes.Equal(receive.seen[:send.n], send.pattern) {
		t.Fatalf("%s ended as %v, %s as %v, and the bytes differ from byte %d on",
			send.name, send.err, receive.name, receive.err, firstDifference(receive.seen, send.pattern))
	}
	for i, b := range receive.seen[send.n:] {
		if b != modelBackground {
			t.Fatalf("%s wrote byte %d of %s", send.name, uint64(i)+send.n, receive.name)
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// abrupt: the session ended without the wait for the last write into its memory.
func (o *post) abrupt() bool { return is(o.err, wire.StatusRelayDied) }

// look compares all of a memory: memory outside receives, and received bytes, are unchanged.
func (w *world) look(t *rapid.T, s *attached) {
	if s.freed() {
		return
	}
	loose := w.lookSided(s)
	for _, p := range w.pipes {
		if p.to != s {
			continue
		}
		for _, o := range p.posts {
			switch {
			case o.sends:
			case s.abrupt && o.abrupt():
				// A copy may still be under way (docs/errors.md).
				loose = append(loose, o)
			default:
				copy(s.want[o.at:], o.seen)
			}
		}
	}
	same := func(from, to uint64) bool { return bytes.Equal(s.place.view[from:to], s.want[from:to]) }
	slices.SortFunc(loose, func(a, b *post) int { return cmp.Compare(a.at, b.at) })
	from, equal := uint64(0), true
	for _, o := range loose {
		equal = equal && same(from, o.at)
		from = o.at + o.n
	}
	if !equal || !same(from, modelBytes) {
		at := firstDifference(s.place.view, s.want)
		near := "nothing"
		for _, o := range w.posts() {
			if end, _ := o.pipe.end(o.sends); end == s && uint64(at) >= o.at && uint64(at) < o.at+o.n {
				near = fmt.Sprintf("%s, which ended as %v", o.name, o.err)
			}
		}
		t.Fatalf("byte %d of %s changed late or by nobody's leave: it belongs to %s", at, s.name, near)
	}
}

// leave closes open objects, so that the next program starts from the same state.
func (w *world) leave(t *rapid.T) {
	for _, s := range w.sessions {
		if err := s.session.Close(); err != nil && !is(err, wire.StatusClosed) {
			t.Errorf("closing %s: %v", s.name, err)
		}
	}
	if w.abrupt { // then memory may be written until the remote relay has released it
		for _, c := range w.containers {
			if err := c.quiet(); err != nil {
				t.Error(err)
			}
		}
	}
	for _, s := range w.sessions {
		s.place.used = nil
		// look has checked that unused memory is unchanged; where it did not get there anything may
		// have.
		touched := s.used
		if t.Failed() {
			touched = modelBytes
		}
		copy(s.want, modelEmpty()[:touched])
		s.at.wants = append(s.at.wants, s.want)
		if s.place.mine {
			unmap := unix.Munmap
			if s.place.host { // which that call does not know
				unmap = func(b []byte) error { return unix.MunmapPtr(unsafe.Pointer(&b[0]), uintptr(len(b))) }
			}
			if err := unmap(s.place.view); err != nil {
				t.Error(err)
			}
			continue
		}
		copy(s.place.view, modelEmpty()[:touched])
	}
}
