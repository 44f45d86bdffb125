package relay_test

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// Errors of the driver reach a client with the status of the failed step, and name the call.
func TestDriverErrorsReachClientAsStatus(t *testing.T) {
	for _, c := range []struct {
		fault  string
		status wire.Status
		call   string
	}{
		{"cuInit:times=1:error=100", wire.StatusNoCUDA, "cuInit"},
		{"cuMemHostRegister:times=1:error=304", wire.StatusCUDA, "cuMemHostRegister"},
		{"cuMemcpyAsync:times=1:error=304", wire.StatusCUDA, "cuMemcpyAsync"},
		{"cuMemImportFromShareableHandle:times=1:error=304", wire.StatusBadDescriptor, "cuMemImportFromShareableHandle"},
	} {
		t.Run(c.fault, func(t *testing.T) {
			s := newStage(t, launch.RouteStaged)
			p, err := s.begin(filepath.Join(t.TempDir(), "log"), "PEERLANE_SIM_FAULT="+c.fault)
			if err != nil {
				t.Fatal(err)
			}
			demandOf(t, s.exercise(), c.status, c.call)
			if said, err := p.stop(); err != nil || p.err != nil {
				t.Errorf("%v, %v: %s", err, p.err, said)
			}
		})
	}
}

// A relay at the limit of open files returns that error, and serves requests below the limit.
func TestRelayWithoutDescriptorsFailsRequestsAndRecovers(t *testing.T) {
	s := newStage(t, launch.RouteDirect)
	p, err := s.begin(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	a := attach(t, s.a)
	ask := func() error {
		m, err := a.HostMemory(within(t), client.HostMemory{Bytes: 1 << 20, GPU: s.uuidA})
		if err == nil {
			err = m.Unexport(within(t))
		}
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	var before unix.Rlimit
	none := unix.Rlimit{}
	pid := p.cmd.Process.Pid
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
		t.Fatal(err)
	}
	none.Max = before.Max
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &none, nil); err != nil {
		t.Fatal(err)
	}
	demandOf(t, ask(), wire.StatusInternal, "memfd_create")
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &before, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if said, err := p.stop(); err != nil || p.err != nil {
		t.Errorf("%v, %v: %s", err, p.err, said)
	}
}

// Objects closed by this process report Closed, regardless of the remote side.
func TestLocallyClosedConnectionReportsClosed(t *testing.T) {
	s := attach(t, newHost(t).relay("a", launch.RouteDirect, far(0, 1, "nic0")))
	sending, receiving, _ := join(t, s, 0, s, 0)
	m := exported(t, s, 0, 2<<20)
	receive, err := receiving.Receive(m.Memory, 0, 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = wait(t, receive, nil)
	demand(t, err, wire.StatusClosed)
	_, err = sending.Send(m.Memory, 0, 8)
	demand(t, err, wire.StatusClosed)
}

// An operation waits for no event that is not open.
func TestSendAfterUnknownEventFails(t *testing.T) {
	s := attach(t, newHost(t).relay("a", launch.RouteDirect, far(0, 1, "nic0")))
	sending, _, _ := join(t, s, 0, s, 0)
	m := exported(t, s, 0, 2<<20)
	send, err := sending.Send(m.Memory, 0, 8, func(d *wire.Descriptor) { d.WaitEvent = 7 })
	_, err = wait(t, send, err)
	demand(t, err, wire.StatusUnknownEvent)
	if err := sending.Err(); err != nil {
		t.Errorf("the connection is down: %v", err)
	}
}

// A GPU without a possible context affects only that GPU's lane: lanes of the container's further
// GPUs continue.
func TestFailedGPUEndsNoOtherLane(t *testing.T) {
	needGPUs(t, 4)
	v := newVictim(t, func(c *launch.Config) {
		c.Lanes = append(c.Lanes, far(2, 3, "nic0"))
	}, "PEERLANE_SIM_FAULT=cuCtxCreate:after=1:error=719")
	s := attach(t, v.socket)
	well := hostMemory(t, s, 0, mib)
	for range 3 {
		_, err := s.HostMemory(within(t), client.HostMemory{Bytes: mib, GPU: uuid(t, 2)})
		demandOf(t, err, wire.StatusNoCUDA, "cuCtxCreate")
		if err := well.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
		well = hostMemory(t, s, 0, mib)
	}
}
