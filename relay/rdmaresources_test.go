package relay_test

import (
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// The relays' reports of NIC objects equal the objects that libibverbs made and not destroyed.
func TestRDMAResourcesMatchLibibverbs(t *testing.T) {
	const nics, pairs, n = 2, 3, 1 << 20
	p := hostsByRDMA(t, nics, pairs)
	say := func() (all launch.NICResources) {
		t.Helper()
		for _, r := range []*relay.Relay{p.relayA, p.relayB} {
			v := r.Report().Network.Verbs
			if v == nil || len(v.Resources) != nics {
				t.Fatalf("a relay says %+v", v)
			}
			for _, of := range v.Resources {
				if of.QueuePairs < pairs || of.CompletionQueues != 1 || of.Regions == 0 || of.Bytes < n {
					t.Errorf("a relay says %v", of)
				}
				all.QueuePairs += of.QueuePairs
				all.CompletionQueues += of.CompletionQueues
				all.Regions += of.Regions
			}
		}
		return all
	}
	same := func(when string) {
		t.Helper()
		said := say()
		has := launch.NICResources{
			QueuePairs: outstanding(t, p.rdma, "ibv_destroy_qp", "ibv_create_qp"), CompletionQueues: outstanding(t, p.rdma,
				"ibv_destroy_cq", "ibv_create_cq"),
			Regions: outstanding(t, p.rdma, "ibv_dereg_mr", "ibv_reg_mr_iova2", "ibv_reg_mr", "ibv_reg_dmabuf_mr"),
		}
		if said != has {
			t.Errorf("%s the relays say that they have %v; they have %v", when, said, has)
		}
	}
	p.arrive(t, n)
	same("with a connection")
	m, before := hostMemory(t, p.a, 0, n), say().Regions
	testutil.Until(t, "the relay's next state", func() bool { // the registration runs outside the loop
		receive, err := p.receiving.Receive(p.target.Memory, 0, n)
		if err != nil {
			t.Fatal(err)
		}
		send, err := p.sending.Send(m, 0, n)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, err); err != nil {
				t.Fatal(err)
			}
		}
		return say().Regions == before+nics
	})
	same("with host memory")
	if err := m.Unexport(within(t)); err != nil {
		t.Fatal(err)
	}
	same("without it")
	if after := say().Regions; after != before {
		t.Errorf("%d regions are registered, %d before there was host memory", after, before)
	}
}

// outstanding returns the number of successful creating calls minus successful destroying calls.
func outstanding(t *testing.T, rdma softdevice.Host, given string, made ...string) (left int) {
	t.Helper()
	calls, err := rdma.Calls(append(made, given)...)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range calls {
		switch {
		case c.Arguments["="] != "0":
		case c.Name == given:
			left--
		default:
			left++
		}
	}
	return left
}
