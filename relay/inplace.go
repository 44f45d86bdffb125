package relay

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Memory of a GPU near the NICs needs no slots: the client passes a DMA-BUF descriptor of the
// memory, and NICs read and write the memory in place. The memory is registered from the first use
// after the descriptor's arrival until unexport; no operation on the memory is in flight then, as
// with copied memory. Memory without a DMA-BUF, or refused by NICs, bounces through slots in host
// memory: never through slots on the same GPU, to which a copy would wait for the client's kernels.

// wanted reports whether the relay would have NICs know a client's memory in place.
func (m *memory) wanted() bool {
	return m.lane.spec.Direct && m.mapped != nil && !m.mapped.Host() && m.staged == nil &&
		m.session.relay.offRDMA() == "" && m.session.relay.fabric != nil
}

// registerInPlace takes a client's DMA-BUF descriptor of exported memory, or the client's reason
// for its absence. Unrequested and repeated descriptors are closed.
func (s *session) registerInPlace(m *wire.DMABuf, fds []int) {
	memory := s.memories[m.Memory]
	if memory == nil || memory.state.ended() || !memory.wanted() || memory.inPlace != nil || memory.notInPlace != "" {
		s.port.CloseAll(fds)
		return
	}
	var err error
	switch {
	case len(fds) == 0 && s.port.Hanging():
		err = errHanging
	case len(fds) == 0:
		err = fmt.Errorf("the client has no DMA-BUF of the memory: %s", wire.Text(m.Reason[:]))
	case len(fds) > 1:
		err = wire.Errorf(wire.StatusMalformed, "a DMA-BUF with %d descriptors", len(fds))
	default:
		if err = checkDMABuf(fds[0], memory.lane.device.Driver.Simulated()); err == nil {
			err = memory.lane.allowsInPlace(memory.length)
		}
		if err == nil {
			err = s.relay.reserve(ofPart)
		}
	}
	if err != nil {
		s.port.CloseAll(fds)
		memory.notInPlace = err.Error()
		return
	}
	memory.takes.descriptors += ofPart.descriptors
	memory.lane.inPlaceBytes += memory.length
	memory.inPlace = memory.mapped.Lent(fds[0], memory.offset, memory.length)
}

// inPlaceFactor limits registrations to a multiple of a GPU's memory: registrations use memory of NICs,
// which tenants share, and a client can export a range any number of times.
const inPlaceFactor = 2

// allowsInPlace returns an error if registering so many more bytes with NICs would exceed the limit.
func (l *lane) allowsInPlace(bytes uint64) error {
	if limit := l.maxInPlace; bytes > limit || l.inPlaceBytes > limit-bytes {
		return wire.Errorf(wire.StatusLimit,
			"%s of memory of GPU %s are registered with NICs, and the limit is %s, %d times the GPU's memory; "+
				"export no range twice, and unexport unused memory",
			humanize.IBytes(l.inPlaceBytes), l.spec.GPU.BusID, humanize.IBytes(limit), inPlaceFactor)
	}
	return nil
}

// checkDMABuf looks at a descriptor that is said to be a DMA-BUF of a GPU's memory, as checkForeign
// does: the kernel returns the exporter without a call to a file system.
func checkDMABuf(fd int, simulated bool) error {
	if simulated { // there it is the memory's own
		return checkForeign(fd, true)
	}
	return checkProcDMABuf("/proc/self", fd)
}

// maxInfo is more than the kernel tells of a DMA-BUF, bytes.
const maxInfo = 4096

// errOtherExporter is the cause of a refused DMA-BUF.
var errOtherExporter = errors.New("the descriptor is no DMA-BUF of the NVIDIA driver")

// descriptorError is the cause of a refused descriptor that is not a DMA-BUF.
type descriptorError struct{ link string } // of /proc/self/fd

func (e *descriptorError) Error() string { return "the descriptor is no DMA-BUF, but " + e.link }

// checkProcDMABuf looks at a descriptor below a process's directory in /proc. The link is first,
// which needs only the file's path ("/dmabuf:" of dmabuffs_dname): fdinfo calls the file's
// show_fdinfo, which for an epoll descriptor waits for a lock that the owner can hold for ever.
func checkProcDMABuf(proc string, fd int) error {
	link, err := os.Readlink(fmt.Sprintf("%s/fd/%d", proc, fd))
	switch {
	case err != nil:
		return wire.Errorf(wire.StatusBadDescriptor, "read the kind of the descriptor: %v", err)
	case !strings.HasPrefix(link, "/dmabuf:"):
		return wire.Errorf(wire.StatusBadDescriptor, "%w", &descriptorError{wire.Text([]byte(link))})
	}
	file, err := os.Open(fmt.Sprintf("%s/fdinfo/%d", proc, fd))
	if err != nil {
		return wire.Errorf(wire.StatusBadDescriptor, "read the kind of the descriptor: %v", err)
	}
	info, err := io.ReadAll(io.LimitReader(file, maxInfo))
	switch err := errors.Join(err, file.Close()); {
	case err != nil:
		return wire.Errorf(wire.StatusBadDescriptor, "read the kind of the descriptor: %v", err)
	case !ofGPU(info):
		return wire.Errorf(wire.StatusBadDescriptor, "%w", errOtherExporter)
	}
	return nil
}

// ofGPU reads the exporter of a DMA-BUF from the kernel's fdinfo (dma_buf_show_fdinfo, Linux 5.3).
// The driver's name is nv_dmabuf, and was the module's name before.
func ofGPU(fdinfo []byte) bool {
	for line := range bytes.Lines(fdinfo) {
		if by, is := bytes.CutPrefix(line, []byte("exp_name:\t")); is {
			name := string(bytes.TrimSuffix(by, []byte("\n")))
			return name == "nv_dmabuf" || name == "nvidia"
		}
	}
	return false
}

// near returns memory for registration with the NICs of a connection over verbs; nil where they
// cannot.
func (c *connection) near(m *memory) *device.Memory {
	switch {
	case m.mapped.Host() || m.staged != nil:
		return m.mapped
	case m.inPlace != nil && c.beside():
		return m.inPlace
	}
	return nil
}

// known reports whether the NICs access memory in place, and records the result for memory of a
// near GPU.
func (c *connection) known(m *memory) bool {
	at, by := c.near(m), verbs.Of(c.remotePeer)
	var unverified string
	if c.lane.spec.Direct && at != nil && !m.mapped.Host() && m.staged == nil {
		unverified = c.unverified(by)
	}
	known := at != nil && unverified == "" && by.Known(at, !c.sends())
	if !c.lane.spec.Direct || m.mapped.Host() || m.staged != nil {
		return known
	}
	var why string
	switch {
	case known:
		c.reportInPlace("")
		return true
	case m.notInPlace != "":
		why = m.notInPlace
	case unverified != "":
		why = unverified
	case m.inPlace == nil && m.wanted():
		why = noDMABufAnswer // it may come
	case m.inPlace == nil:
		why = "NICs cannot register this kind of memory"
	case at == nil:
		why = "the NIC of the connection is not near the GPU"
	default:
		err := by.Refused(at, !c.sends())
		if err == nil {
			return false // it is being registered
		}
		why = err.Error()
	}
	c.reportInPlace(why)
	return false
}

// clientDMABuf is the registration of client memory.
var clientDMABuf = slotsWay{registration.DMABuf,
	"dmabuf: the client's own memory, in place, registered by DMA-BUF: GPUDirect RDMA"}

// noMemoryInPlace describes a near GPU's connection before the first message.
const noMemoryInPlace = "the GPU is near the NICs and has no slots; NICs access a client's memory in place after " +
	"its registration, and no message has been sent yet"

// noDMABufAnswer is the reason for memory whose process has not answered the export's request,
// because the library is too old, or the answer is pending.
const noDMABufAnswer = "the client has not sent a DMA-BUF (libpeerlane too old?)"

// inPlace is the result for the latest memory of a near GPU that a connection has used.
type inPlace uint8

const (
	unused  inPlace = iota // no memory yet
	reached                // NICs reach the memory in place
	bounced                // data bounces through host memory
)

// reportInPlace records the result for the latest memory, and logs a new result.
func (c *connection) reportInPlace(refused string) {
	is := bounced
	if refused == "" {
		is = reached
	}
	if c.inPlace == is && c.notInPlace == refused {
		return
	}
	c.inPlace, c.notInPlace, c.registered = is, refused, clientDMABuf
	if is == reached {
		c.lane.logSlots(c.registered)
		return
	}
	c.registered = bounces("the client's own memory is not reached in place: " + refused)
	if refused == noDMABufAnswer { // which can be over in a moment
		return
	}
	r := c.session.relay
	r.warnings.warn(c.session.log.WithField("gpu", c.lane.spec.GPU.BusID), errors.New(refused),
		"memory of a GPU near the NICs bounces through host memory")
}

// countInPlace counts bytes of an operation that were not copied.
func (c *connection) countInPlace(op *operation, n uint64) {
	if m := op.memory; m.staged != nil || m.inPlace != nil && c.transport == launch.TransportVerbs {
		op.inPlace += n
	}
}
