package ring

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/peerlane/peerlane/relay/wire"
)

// A client writes arbitrary bytes to the shared memory, between any two steps of the relay: the
// relay takes no more descriptors than it can answer, taken descriptors do not change, and an
// impossible ring is refused.
func FuzzRing(f *testing.F) {
	f.Fuzz(func(t *testing.T, steps []byte) {
		r, c := pair(t)
		var taken, completed uint64
		word := func(at int) uint64 {
			var b [8]byte
			if at < len(steps) {
				copy(b[:], steps[at:])
			}
			return binary.LittleEndian.Uint64(b[:])
		}
		for at := 0; at < len(steps); at += 9 {
			value := word(at + 1)
			switch steps[at] % 6 {
			case 0:
				atomic.StoreUint64(&c.submitPage.Tail, value)
			case 1:
				atomic.AddUint64(&c.submitPage.Tail, value%wire.RingEntries)
			case 2:
				atomic.StoreUint64(&c.submitPage.CompletedHead, value)
			case 3:
				d := &c.descriptors[value%wire.RingEntries]
				text := unsafe.Slice((*byte)(unsafe.Pointer(d)), unsafe.Sizeof(*d))
				for i := range text {
					text[i] = byte(value >> (i % 8))
				}
			case 4:
				for range 1 + value%(2*wire.RingEntries) {
					ahead := atomic.LoadUint64(&c.submitPage.Tail) - taken
					d, ok, err := r.Take()
					if err != nil {
						if !errors.Is(err, &wire.Error{Status: wire.StatusBadRing}) {
							t.Errorf("an error of another kind: %v", err)
						}
						return // the session ends
					}
					if ahead > wire.RingEntries {
						t.Fatalf("a tail that is %d entries ahead is no error: the ring has %d", ahead, wire.RingEntries)
					}
					if !ok {
						break
					}
					taken++
					if read := c.submitPage.CompletedHead; taken-read > wire.RingEntries {
						t.Fatalf(
							"%d descriptors are taken, and the client says that it has read %d completions: the ring has room for %d",
							taken,
							read,
							wire.RingEntries,
						)
					}
					copied := d
					c.descriptors[(taken-1)%wire.RingEntries] = wire.Descriptor{}
					if copied != d {
						t.Fatal("what was taken has changed")
					}
				}
			case 5:
				for range 1 + value%(2*wire.RingEntries) {
					if completed < taken {
						r.Complete(wire.Completion{})
						completed++
					}
				}
			}
			if r.taken != taken || r.written != completed {
				t.Errorf("the relay counts %d and %d, and did %d and %d", r.taken, r.written, taken, completed)
			}
		}
	})
}
