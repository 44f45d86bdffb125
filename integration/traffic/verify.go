package traffic

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
)

// small is the largest message that the CPU compares byte by byte. For larger messages the GPU
// compares the words, and the CPU compares the ends.
const small = 4096

// atOnce is the maximum number of messages of a round in one direction.
const atOnce = 64

const windowBytes = small + 2*margin

// verifier compares received bytes in GPU memory. It uses the context's thread.
type verifier struct {
	driver  *cuda.Driver
	kernels *kernels.Kernels
	stream  cuda.Stream
	scratch cuda.Ptr // as large as the buffers
	windows []byte   // pinned
	pages   []*kernels.Page
	used    uint64 // of the scratch memory
}

func newVerifier(d *cuda.Driver, device cuda.Device, bytes uint64) (*verifier, error) {
	v := &verifier{driver: d}
	var err error
	if v.kernels, err = kernels.Load(d, device); err != nil {
		return nil, err
	}
	if v.stream, err = d.StreamCreate(); err != nil {
		return nil, err
	}
	if v.scratch, err = d.MemAlloc(bytes + 16*atOnce); err != nil {
		return nil, err
	}
	if v.windows, err = measure.HostBuffer(d, atOnce*windowBytes); err != nil {
		return nil, err
	}
	for range atOnce {
		p, err := v.kernels.NewPage()
		if err != nil {
			return nil, err
		}
		v.pages = append(v.pages, p)
	}
	return v, nil
}

// prepare makes the stream write the canary to a buffer.
func (v *verifier) prepare(p cuda.Ptr, bytes uint64, canary kernels.Pattern) error {
	v.used = 0
	return v.kernels.Fill(v.stream, p, bytes/8*8, canary)
}

// read makes the stream read message i, which lies in the buffer at p.
func (v *verifier) read(i int, m message, p cuda.Ptr) error {
	window := v.window(i)
	fetch := func(at int, from, n uint64) error {
		return v.driver.MemcpyDtoHAsync(unsafe.Pointer(&window[at]), p+cuda.Ptr(from), n, v.stream)
	}
	if m.size <= small {
		return fetch(0, m.to-margin, m.size+2*margin)
	}
	// Keep the pattern's alignment, so that words are whole.
	at := v.scratch + cuda.Ptr(v.used)
	v.used += (m.size + 15) / 8 * 8
	first, words := m.words()
	pattern := m.pattern
	pattern.First = first
	return errors.Join(
		v.driver.MemcpyAsync(at+cuda.Ptr(m.shift()), p+cuda.Ptr(m.to), m.size, v.stream),
		v.kernels.Compare(v.stream, at+cuda.Ptr(8*first), 8*words, pattern, v.pages[i]),
		fetch(0, m.to-margin, 2*margin),
		fetch(2*margin, m.to+m.size-margin, 2*margin))
}

func (v *verifier) window(i int) []byte { return v.windows[i*windowBytes : (i+1)*windowBytes] }

// words returns the range of whole pattern words in a message.
func (m message) words() (first, count uint64) {
	first = (m.shift() + 7) / 8
	return first, (m.shift()+m.size)/8 - first
}

// wrong describes the defect of message i after the stream has read the message; empty without a
// defect.
func (v *verifier) wrong(i int, m message, canary kernels.Pattern) string {
	window := v.window(i)
	if m.size <= small {
		return m.compare(window[:m.size+2*margin], m.to-margin, canary)
	}
	if d := v.pages[i].Difference(); d.Words > 0 {
		return fmt.Sprintf("of %d bytes sent from offset %d to %d %v", m.size, m.from, m.to, d)
	}
	if text := m.compare(window[:2*margin], m.to-margin, canary); text != "" {
		return text
	}
	return m.compare(window[2*margin:4*margin], m.to+m.size-margin, canary)
}

// compare describes the defect of bytes of the receiver's buffer from an offset: of the message, or
// of the neighbouring canary.
func (m message) compare(b []byte, offset uint64, canary kernels.Pattern) string {
	for i, got := range b {
		at := offset + uint64(i)
		want, whose := byteOf(canary, at), "beside the message"
		if at >= m.to && at < m.to+m.size {
			want, whose = byteOf(m.pattern, m.shift()+at-m.to), "of the message"
		}
		if got != want {
			return fmt.Sprintf("of %d bytes sent from offset %d to %d: at offset %d, %s, is %#02x instead of %#02x", m.size,
				m.from, m.to, at, whose, got, want)
		}
	}
	return ""
}
