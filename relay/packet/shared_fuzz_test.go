package packet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
)

// For any bytes that the remote relay writes into the shared memory: the reader gets whole messages
// within slots, reads slots once and in order, and returns an error for impossible positions. The
// writer never writes into a slot that the remote side has not read.
func FuzzShared(f *testing.F) {
	seed := func(tail, head uint64, lengths ...uint32) {
		b := binary.LittleEndian.AppendUint64(nil, tail)
		b = binary.LittleEndian.AppendUint64(b, head)
		for _, n := range lengths {
			b = binary.LittleEndian.AppendUint32(b, n)
		}
		f.Add(b)
	}
	seed(2, 0, 8, slotBytes-slotHeader)
	seed(sharedSlots+1, 0, 1)
	seed(1<<63, 1<<40, 4)
	seed(3, sharedSlots, 0, slotBytes-slotHeader+1, 1<<31)
	f.Fuzz(func(t *testing.T, input []byte) {
		memory := make([]byte, sharedBytes)
		s := newShared(memory, true)
		next := func(n int) uint64 {
			var b [8]byte
			v := input[:min(n, len(input))]
			input = input[len(v):]
			copy(b[:], v)
			return binary.LittleEndian.Uint64(b[:])
		}
		*s.in.tail, *s.out.head = next(8), next(8)
		for i := 0; len(input) > 0 && i < sharedSlots; i++ {
			binary.LittleEndian.PutUint32(s.in.slots[i*slotBytes:], uint32(next(4)))
		}
		for {
			var buffer [slotBytes]byte
			waiting, before := *s.in.tail-s.in.at, s.in.at
			length := binary.LittleEndian.Uint32(s.in.slots[before%sharedSlots*slotBytes:])
			data, ok, err := s.in.take(&buffer)
			wrong := waiting > sharedSlots || waiting > 0 && length > slotBytes-slotHeader
			if wrong != errors.Is(err, errShared) || !wrong && err != nil {
				t.Fatalf("%d wait, the first has %d bytes: %v", waiting, length, err)
			}
			if err != nil || waiting == 0 {
				if ok || s.in.at != before {
					t.Fatal("nothing was there, and it read on")
				}
				break
			}
			if !ok || len(data) != int(length) || s.in.at != before+1 {
				t.Fatalf("%d bytes of %d, position %d after %d", len(data), length, s.in.at, before)
			}
		}
		kept := bytes.Clone(s.out.slots)
		unread := s.out.at - *s.out.head
		ok, err := s.out.put([]byte("message"))
		if could := unread < sharedSlots; could != ok || (unread > sharedSlots) != (err != nil) {
			t.Fatalf("%d are unread: %v, %v", unread, ok, err)
		}
		if !ok && !bytes.Equal(kept, s.out.slots) {
			t.Fatal("it wrote into a slot that was not read")
		}
	})
}
