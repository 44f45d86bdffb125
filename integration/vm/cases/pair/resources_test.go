//go:build vm

package pair_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/relay/launch"
)

// resource is a line of `rdma resource show`: a queue pair, a completion queue or a region.
type resource struct {
	Device    string `json:"ifname"`
	Thread    int    `json:"pid"` // the creator; 0 for the kernel
	Type      string `json:"type"`
	State     string `json:"state"`
	Number    uint32 `json:"lqpn"`
	Remote    uint32 `json:"rqpn"`
	RegionLen uint64 `json:"mrlen"`
}

// resources returns the RDMA resources of programs, by the kernel's name of the kind.
func resources(t *testing.T, run func(name string, arguments ...string) string) map[string][]resource {
	t.Helper()
	of := map[string][]resource{}
	for _, kind := range []string{"qp", "cq", "mr"} {
		text := run("rdma", "-j", "resource", "show", kind)
		var list []resource
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			t.Fatalf("rdma resource show %s: %v: %s", kind, err, text)
		}
		for _, r := range list {
			if r.Thread != 0 {
				of[kind] = append(of[kind], r)
			}
		}
	}
	return of
}

// A relay's report on a NIC equals the kernel's list: reliable connected queue pairs in state RTS,
// each connected to a queue pair of the other relay, completion queues, and memory regions. After
// the relay's end the list is empty.
func TestRelayResourcesMatchKernel(t *testing.T) {
	agent := rdma(t, inside.RoCE)
	known(t)
	ctx, cancel := context.WithTimeout(t.Context(), speedTimeout)
	defer cancel()
	const pairs = 3
	talk, other := talking(t, ctx, agent, pairs, 1<<20)
	other.order("stream", 2, 1<<20)
	if err := talk.stream(ctx, true, 2, 1<<20, func() {}); err != nil {
		t.Fatal(err)
	}
	local := func(name string, arguments ...string) string { return inside.Command(t, name, arguments...) }
	onOther := func(name string, arguments ...string) string { return inside.OnOther(t, agent, name, arguments...) }
	var output string
	own := map[string][]resource{}
	// host memory is registered beside the stream
	inside.Eventually(t, "the kernel has what the relay says", func() (bool, string) {
		v := talk.relay.Report().Network.Verbs
		if v == nil || len(v.Resources) != 1 {
			t.Fatalf("the relay says %+v", v)
		}
		own = resources(t, local)
		kernel := launch.NICResources{NIC: "mlx5_0", QueuePairs: len(own["qp"]), CompletionQueues: len(own["cq"]),
			Regions: len(own["mr"])}
		for _, m := range own["mr"] {
			kernel.Bytes += m.RegionLen
		}
		output = v.Resources[0].String()
		return v.Resources[0] == kernel, fmt.Sprintf("%v, and the kernel has %v", v.Resources[0], kernel)
	})
	t.Log("the relay and the kernel: ", output)
	theirs := resources(t, onOther)
	// One group of queue pairs, or two if both relays dialed at the same time.
	if n := len(own["qp"]); n == 0 || n%pairs != 0 || n != len(theirs["qp"]) {
		t.Fatalf("%d queue pairs here and %d there, %d to a set", n, len(theirs["qp"]), pairs)
	}
	ends := map[uint32]uint32{}
	for _, q := range theirs["qp"] {
		ends[q.Number] = q.Remote
	}
	for _, q := range own["qp"] {
		if q.Type != "RC" || q.State != "RTS" || q.Device != "mlx5_0" || ends[q.Remote] != q.Number {
			t.Errorf("queue pair %+v; queue pairs of the other relay: %+v", q, theirs["qp"])
		}
	}
	other.over()
	if left := resources(t, onOther); len(left) > 0 {
		t.Errorf("remaining resources of the other relay: %+v", left)
	}
	if err := talk.end(); err != nil {
		t.Error(err)
	}
	// This process continues, and would keep a leaked resource of its relay.
	if left := resources(t, local); len(left) > 0 {
		t.Errorf("the relay has not given back %+v", left)
	}
}
