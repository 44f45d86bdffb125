package relay_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/wire"
)

// slotsOfLane is the size of a test lane's slots on the server GPU per direction, bytes.
const slotsOfLane = "4194304"

// inOrder looks in the software device's record whether slots on GPUs were registered until no queue
// pair was there any more, and the memory there until they were not.
func inOrder(t *testing.T, rdma softdevice.Host) {
	t.Helper()
	calls, err := rdma.Calls("ibv_reg_dmabuf_mr", "ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_dereg_mr")
	if err != nil {
		t.Fatal(err)
	}
	length := map[string]string{}
	for _, c := range calls {
		if c.Name != "ibv_dereg_mr" {
			length[c.Arguments["lkey"]] = c.Arguments["length"]
			continue
		}
		if c.Arguments["gpu"] == "0" {
			continue
		}
		if !realGPUs && c.Arguments["there"] != "1" || length[c.Arguments["lkey"]] == slotsOfLane &&
			c.Arguments["pairs"] != "0" {
			t.Errorf("a registration of %s bytes of a GPU ended too late or too early: %v", length[c.Arguments["lkey"]],
				c.Arguments)
		}
	}
}

// throughSlots are the bytes that came into slots on a GPU, and into the host's.
func throughSlots(t *testing.T, s *client.Session, server int) (gpu, host uint64) {
	t.Helper()
	m, err := s.Statistics(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range m.Server[:m.Servers] {
		switch one.GPU {
		case uuid(t, server):
			gpu = one.In
		case wire.UUID{}:
			host = one.In
		}
	}
	return gpu, host
}

// Bytes travel from a far GPU through slots of the server GPU and both NICs to the remote GPU, and
// the NIC's writes are flushed before the copy. After any error of DMA-BUF the relay tries
// nvidia-peermem, if necessary with memory of cuMemAlloc, and then host memory; both relays report
// the method and the reason.
func TestServerGPUSlotsAreRegisteredWithNICs(t *testing.T) {
	// The NIC of both sides, with the report.
	type nic struct {
		noDMABuf bool
		peermem  string
		word     string
		said     []string
	}
	dmabuf := nic{false, "no", "dmabuf", []string{"memory of cuMemCreate, registered by DMA-BUF: GPUDirect RDMA"}}
	peermem := nic{true, "yes", "peermem", []string{"memory of cuMemCreate, registered by nvidia-peermem",
		"ibv_reg_dmabuf_mr", "EOPNOTSUPP"}}
	alloc := nic{true, "alloc", "peermem", []string{"memory of cuMemAlloc, registered by nvidia-peermem", "EOPNOTSUPP"}}
	none := nic{true, "no", "bounce", []string{"host memory", "without GPUDirect RDMA", "DMA-BUF, memory of cuMemCreate",
		"EOPNOTSUPP", "nvidia-peermem, memory of cuMemAlloc", "EFAULT"}}
	refused := func(n nic, name string) nic {
		n.said = append(slices.Clone(n.said[:1]), "ibv_reg_dmabuf_mr", name)
		return n
	}
	willing := dmabuf
	willing.peermem, willing.word, willing.said = "yes", peermem.word, peermem.said
	for _, c := range []struct {
		name   string
		a, b   nic
		script []string
	}{
		{"DMA-BUF", dmabuf, dmabuf, nil},
		{"nvidia-peermem", peermem, peermem, nil},
		{"nvidia-peermem that takes cuMemAlloc alone", alloc, alloc, nil},
		{"neither", none, none, nil},
		{"each side its own", dmabuf, none, nil},
		{"EINVAL", refused(willing, "EINVAL"), refused(willing, "EINVAL"), []string{"ibv_reg_dmabuf_mr errno=22"}},
		{"EPERM at one side", refused(willing, "EPERM"), dmabuf, []string{"ibv_reg_dmabuf_mr errno=1 device=mlx5_0"}},
		{"ENOMEM of the slots alone", dmabuf, nic{false, "no", "bounce", []string{"host memory", "slots on GPU", "ENOMEM",
			"cannot be registered"}}, []string{"ibv_reg_dmabuf_mr errno=12 device=rocep1 bytes=4194304",
			"ibv_reg_mr errno=12 device=rocep1 from=100"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a, b := ofA[0], ofB[0]
			a.NoDMABuf, a.Peermem = c.a.noDMABuf, c.a.peermem
			b.NoDMABuf, b.Peermem = c.b.noDMABuf, c.b.peermem
			p := &byRDMA{devices: []softdevice.Device{a, b}}
			p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 2)
			if err := p.rdma.Script(c.script...); err != nil {
				t.Fatal(err)
			}
			p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
			const n = 2<<20 + 5
			p.arrive(t, n)
			for _, side := range []struct {
				*client.Session
				report *launch.Report
				nic
				server int
			}{{p.a, p.relayA.Report(), c.a, 1}, {p.b, p.relayB.Report(), c.b, 2}} {
				gdr := side.word != "bounce"
				if len(side.report.Connections) != 1 {
					t.Fatalf("inspect shows %+v", side.report.Connections)
				}
				is := side.report.Connections[0]
				if is.Transport != launch.TransportVerbs || !strings.HasPrefix(is.Registration, side.word+": ") || is.GDR != gdr ||
					strings.Contains(is.Path, "GPU "+devices[side.server].BusID) != gdr ||
					strings.Contains(is.Path, "host memory") == gdr {
					t.Errorf("inspect shows %+v; it was to be %s", is, side.word)
				}
				for _, word := range side.said {
					if !strings.Contains(is.Registration, word) {
						t.Errorf("inspect says %q, and nothing of %q", is.Registration, word)
					}
				}
				if gpu, host := throughSlots(t, side.Session, side.server); gdr && (gpu != n || host != 0) ||
					!gdr && (gpu != 0 || host != n) {
					t.Errorf("%d bytes went through slots on the server GPU and %d through the host's", gpu, host)
				}
				if own := slices.Contains(side.report.Contexts, devices[side.server].BusID); own != (side.peermem == "alloc") {
					t.Errorf("the relay has contexts on %v", side.report.Contexts)
				}
			}
			flushed(t, p.rdma, "rocep1", c.b.word != "bounce")
			flushed(t, p.rdma, "mlx5_0", false)
		})
	}
}

// flushed checks that a NIC has flushed, after the trial of the queue pairs, by a separate loopback
// queue pair.
func flushed(t *testing.T, rdma softdevice.Host, nic string, want bool) {
	t.Helper()
	calls, err := rdma.Calls("ibv_post_send", "ibv_modify_qp")
	if err != nil {
		t.Fatal(err)
	}
	reads, others, itself := map[string]int{}, map[string]int{}, map[string]bool{}
	for _, c := range calls {
		qp := c.Arguments["qp"]
		switch {
		case c.Arguments["device"] != nic:
		case c.Name == "ibv_modify_qp":
			itself[qp] = itself[qp] || c.Arguments["to"] == qp
		case c.Arguments["op"] == "4":
			reads[qp]++
		default:
			others[qp]++
		}
	}
	if len(reads) != 1 {
		t.Errorf("%s has %d queue pairs for reads", nic, len(reads))
	}
	for qp, n := range reads {
		if n > 1 != want || !itself[qp] || others[qp] > 0 {
			t.Errorf("%s has read %d times by queue pair %s, which leads to itself: %v, and done %d other things by it", nic,
				n, qp, itself[qp], others[qp])
		}
	}
}

// A flush that fails for good ends the operations with an error that says so: their bytes may not be
// there.
func TestFailedFlushEndsOperationsWithError(t *testing.T) {
	p := hostsWithReconnectLimit(t, 1, 1, shortReconnectLimit)
	p.move(t, 1<<20)
	if err := p.rdma.Script("send status=12 device=rocep1"); err != nil { // which writes nothing
		t.Fatal(err)
	}
	receive, err := p.receiving.Receive(p.target.Memory, 0, 3<<20)
	if err != nil {
		t.Fatal(err)
	}
	send, err := p.sending.Send(p.source.Memory, 0, 3<<20)
	for _, op := range []*client.Operation{send, receive} {
		_, err := wait(t, op, err)
		demand(t, err, wire.StatusPeerRelayDied)
	}
	if err := p.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
}

// A NIC that cannot flush receives into the host's memory, and sends from a GPU's.
func TestNICWithoutFlushReceivesIntoHostMemory(t *testing.T) {
	p := &byRDMA{}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	// Before the one for data.
	if err := p.rdma.Script("ibv_create_qp errno=12 device=rocep1 call=1 each=1"); err != nil {
		t.Fatal(err)
	}
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20+3)
	from, to := p.relayA.Report().Connections, p.relayB.Report().Connections
	if len(from) != 1 || !from[0].GDR || len(to) != 1 || to[0].GDR || !strings.Contains(to[0].Registration,
		"writes of rocep1 into memory of a GPU cannot be flushed") {
		t.Errorf("inspect shows %+v and %+v", from, to)
	}
}

// NICs access a client's memory on a server GPU in place after registration, and through slots
// before; the relay deregisters the memory before the free.
func TestStagingMemoryOverRDMAIsUsedInPlace(t *testing.T) {
	p := &byRDMA{lane: copying}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	const n = 1<<20 + 5
	from, to := stagingMemory(t, p.a, 0, n), stagingMemory(t, p.b, 3, n)
	want := random(t, n)
	from.write(0, want)
	// Bytes through a slot enter and leave the server GPU.
	through := func() (in, out uint64) {
		t.Helper()
		sender, err := p.a.Statistics(within(t))
		if err != nil {
			t.Fatal(err)
		}
		receiver, err := p.b.Statistics(within(t))
		if err != nil {
			t.Fatal(err)
		}
		return sender.Server[0].In, receiver.Server[0].Out
	}
	for end := testutil.Begin(); ; {
		to.write(0, make([]byte, n))
		in, out := through()
		receive, err := p.receiving.Receive(to.Memory, 0, n)
		if err != nil {
			t.Fatal(err)
		}
		send, err := p.sending.Send(from.Memory, 0, n)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, err); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(to.read(0, n), want) {
			t.Fatal("wrong bytes")
		}
		if inNow, outNow := through(); inNow == in && outNow == out {
			break
		}
		if end.Over() {
			t.Fatal("it goes through slots for good")
		}
	}
	p.source, p.target = from, to
	p.arrive(t, 1, 4096) // short messages use TCP nevertheless
	for _, m := range []*memory{from, to} {
		if err := m.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
	}
}
