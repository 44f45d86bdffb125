package libpeerlane_test

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// A relay that requests a DMA-BUF of exported memory gets a DMA-BUF of the whole allocation, or the
// reason for the absence; a relay without the request gets neither.
func TestExportedMemoryProvidesDMABuf(t *testing.T) {
	for _, wants := range []uint32{wire.WantsDMABuf, 0} {
		type heard struct {
			memory uint32
			bytes  int64 // of the descriptor; 0 without a descriptor
			why    string
		}
		var lent []heard
		done := make(chan struct{})
		socket := pretend(t, func(f *fake) {
			defer close(done)
			f.welcome(nil)
			defer f.free()
			exports := uint32(0)
			for {
				m, n, fds, err := f.Receive()
				if err != nil {
					f.Error(err)
					return
				}
				switch m := m.(type) {
				case *wire.Goodbye:
					return
				case *wire.Export:
					exports++
					f.raw(wire.Encode(&wire.Exported{Memory: exports, Wants: wants}, n))
				case *wire.DMABuf:
					is := heard{memory: m.Memory, why: wire.Text(m.Reason[:])}
					if len(fds) == 1 {
						if is.bytes, err = unix.Seek(fds[0], 0, 2); err != nil {
							f.Error(err)
						}
					}
					lent = append(lent, is)
				}
				packet.CloseAll(fds)
			}
		})
		p := start(t, program(t, "tests", "dmabuf", plain), socket, devices[0].UUID)
		p.demand("done")
		<-done
		p.end()
		if wants == 0 {
			if len(lent) > 0 {
				t.Errorf("unasked it lends %+v", lent)
			}
			continue
		}
		whys := []string{
			"",
			"without gpuDirectRDMACapable",
			"cuMemGetHandleForAddressRange: CUDA_ERROR_INVALID_VALUE",
			"by its descriptor",
		} // a DMA-BUF of the simulator is of a single allocation
		if len(lent) != len(whys) {
			t.Fatalf("it lends %+v", lent)
		}
		for i, is := range lent {
			if is.memory != uint32(i)+1 || (is.bytes >= 2<<20) != (i == 0) || !strings.Contains(is.why, whys[i]) ||
				(is.why == "") != (i == 0) {
				t.Errorf("of memory %d it lends %+v, where %q was to be said", i+1, is, whys[i])
			}
		}
	}
}
