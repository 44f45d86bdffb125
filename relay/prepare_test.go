package relay_test

import (
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// called reports whether both NICs had a successful call with the argument; empty for any.
func (p *byRDMA) called(t *testing.T, call, argument, value string) bool {
	t.Helper()
	calls, err := p.rdma.Calls(call)
	if err != nil {
		t.Fatal(err)
	}
	had := map[string]bool{}
	for _, c := range calls {
		if c.Arguments["="] == "0" && (argument == "" || c.Arguments[argument] == value) {
			had[c.Arguments["device"]] = true
		}
	}
	return had["mlx5_0"] && had["rocep1"]
}

func TestClientAttachOpensNICs(t *testing.T) {
	p := &byRDMA{}
	p.begin(t, launch.TransportAuto, launch.TransportAuto, 1, 1)
	testutil.Until(t, "open NICs", func() bool { return p.called(t, "ibv_create_cq", "", "") })
}

func TestSlotsAreRegisteredWhileRelaysConnect(t *testing.T) {
	p := &byRDMA{settle: 10 * time.Minute}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	if err := p.rdma.Script("ibv_modify_qp hold=1"); err != nil {
		t.Fatal(err)
	}
	l, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	connected := make(chan error, 1)
	go func() {
		var err error
		p.sending, err = p.a.Connect(within(t), uuid(t, 0), l.Handle())
		connected <- err
	}()
	testutil.Until(t, "registered slots", func() bool {
		return p.called(t, "ibv_reg_dmabuf_mr", "length", slotsOfLane)
	})
	if err := p.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	if p.receiving, err = l.Accept(within(t)); err != nil {
		t.Fatal(err)
	}
	p.arrive(t, 1<<20+5)
	if c := p.relayB.Report().Connections; len(c) != 1 || !c[0].GDR {
		t.Errorf("inspect shows %+v", c)
	}
}
