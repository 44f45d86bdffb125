package relay_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// writtenBy returns the bytes of writes that the NICs of host a posted since the first skip calls,
// by NIC and memory of host b: "slots", or "memory" that a client lent. The result has the number
// of calls, too.
func writtenBy(t *testing.T, rdma softdevice.Host, skip int) (bytes map[string]uint64, all int) {
	t.Helper()
	calls, err := rdma.Calls("ibv_post_send", "ibv_reg_dmabuf_mr")
	if err != nil {
		t.Fatal(err)
	}
	bytes = map[string]uint64{}
	into := map[string]string{} // memory by device and key
	across := map[string]string{ofA[0].Name: ofB[0].Name, ofA[1].Name: ofB[1].Name}
	for i, c := range calls {
		device := c.Arguments["device"]
		if c.Name == "ibv_reg_dmabuf_mr" {
			into[device+c.Arguments["rkey"]] = map[string]string{slotsOfLane: "slots",
				fmt.Sprint(pairBytes): "memory"}[c.Arguments["length"]]
			continue
		}
		memory := into[across[device]+c.Arguments["rkey"]]
		if i < skip || memory == "" {
			continue
		}
		n, err := strconv.ParseUint(c.Arguments["length"], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		bytes[device+" "+memory] += n
	}
	return bytes, len(calls)
}

// mixedLane makes the lane of host b receive three quarters in client memory by rocep1, and a
// quarter in slots on the server GPU by rocep2.
func mixedLane(l launch.Lane) launch.Lane {
	if l.NICs[0] != ofB[0].Name {
		return l
	}
	l.Direct = true
	l.Members = []launch.Member{{Server: l.GPU.BusID, NIC: ofB[0].Name, Weight: 3},
		{Server: l.Servers[0].BusID, NIC: ofB[1].Name, Weight: 1}}
	return l
}

func TestLaneWithDirectAndStagedMembersReceivesByShares(t *testing.T) {
	p := &byRDMA{lane: mixedLane}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 2, 2)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.target.lend(p.b, 0, pairBytes)
	testutil.Until(t, "a message that comes in place", func() bool {
		p.arrive(t, 1<<20)
		n, _ := inPlace(t, p.relayB)
		return n > 0
	})
	const messages, n = 40, 1 << 20
	_, before := writtenBy(t, p.rdma, 0)
	placed, _ := inPlace(t, p.relayB)
	slots, _ := throughSlots(t, p.b, 2)
	p.arrive(t, slices.Repeat([]uint64{n}, messages)...)
	after, is := inPlace(t, p.relayB)
	staged, host := throughSlots(t, p.b, 2)
	if after-placed != messages*n*3/4 || staged-slots != messages*n/4 || host != 0 || !is.GDR {
		t.Errorf("of %d MiB %d came in place, %d through slots on the server GPU and %d through the host's; inspect "+
			"shows %+v",
			messages, (after-placed)>>20, (staged-slots)>>20, host, is)
	}
	got, _ := writtenBy(t, p.rdma, before)
	if got["mlx5_0 memory"] != messages*n*3/4 || got["mlx5_1 slots"] != messages*n/4 || got["mlx5_1 memory"] > 0 ||
		got["mlx5_0 slots"] > 0 {
		t.Errorf("the NICs have written %v, want three quarters into memory by mlx5_0 and a quarter into slots by mlx5_1",
			got)
	}
	// A message of several grants has both parts.
	placed = after
	p.arrive(t, 12*n)
	if after, _ := inPlace(t, p.relayB); after-placed != 9*n {
		t.Errorf("of one message of 12 MiB %d came in place, want 9", (after-placed)>>20)
	}
	// The remaining NICs get the share of a failed NIC.
	all := slices.Concat(ofA, ofB)
	all[len(ofA)+1].Down = true
	if err := p.rdma.Set(all...); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "queue pairs without rocep2", func() bool {
		p.arrive(t, n)
		_, way := p.data(t)
		return strings.Contains(way, "reconnected ") && !strings.Contains(way, "RDMA reconnects")
	})
	placed, _ = inPlace(t, p.relayB)
	p.arrive(t, slices.Repeat([]uint64{n}, 8)...)
	if after, _ = inPlace(t, p.relayB); after-placed != 8*n {
		t.Errorf("without the staged member's NIC %d of 8 MiB came in place", (after-placed)>>20)
	}
}

func TestLaneWithDirectNICDownReceivesThroughSlots(t *testing.T) {
	p := &byRDMA{lane: mixedLane, devices: slices.Concat(ofA, ofB)}
	p.devices[len(ofA)].Down = true
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 2, 2)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.target.lend(p.b, 0, pairBytes)
	const n = 1 << 20
	p.arrive(t, slices.Repeat([]uint64{n}, 8)...)
	placed, _ := inPlace(t, p.relayB)
	if staged, _ := throughSlots(t, p.b, 2); placed != 0 || staged != 8*n {
		t.Errorf("%d of 8 MiB came in place and %d through slots", placed>>20, staged>>20)
	}
}

// A receiver with few slots grants every part of every message in the end.
func TestMessagesOfMixedLaneWaitForSlots(t *testing.T) {
	p := &byRDMA{lane: func(l launch.Lane) launch.Lane {
		if l = mixedLane(l); l.Members != nil {
			l.Members[0].Weight, l.Members[1].Weight = 1, 3
		}
		return l
	}, change: func(c *launch.Config) { c.Slots = 2 }}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 2, 2)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.target.lend(p.b, 0, pairBytes)
	p.arrive(t, 12<<20+5, 1, 3<<20, 12<<20)
	p.move(t, 12<<20)
}
