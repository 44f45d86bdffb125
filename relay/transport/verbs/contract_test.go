package verbs

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// of returns the calls of a device.
func (w *two) of(t *testing.T, device string, names ...string) (list []softdevice.Call) {
	t.Helper()
	calls, err := w.rdma.Calls(names...)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range calls {
		if c.Arguments["device"] == device {
			list = append(list, c)
		}
	}
	return list
}

// fabricOf makes devices a0 and b0 of a fabric.
func fabricOf(change func(a, b *softdevice.Device)) []softdevice.Device {
	a, b := deviceA, deviceB
	a.LID, b.LID = 1, 2
	a.InfiniBand, b.InfiniBand = true, true
	a.Address, b.Address = "", ""
	if change != nil {
		change(&a, &b)
	}
	return []softdevice.Device{a, b}
}

// TestAdaptiveRoutingSplitsLongWrites demands that a long write on InfiniBand has its immediate in a
// second write of 0 bytes, as NCCL's ncclIbMultiSend has.
func TestAdaptiveRoutingSplitsLongWrites(t *testing.T) {
	roce := []softdevice.Device{deviceA, deviceB}
	for _, c := range []struct {
		name    string
		devices []softdevice.Device
		change  func(*launch.Verbs)
		split   bool
	}{
		{"InfiniBand", fabricOf(nil), func(*launch.Verbs) {}, true},
		{"InfiniBand, a threshold of the length", fabricOf(nil), func(v *launch.Verbs) { v.ARThreshold = slot }, false},
		{"InfiniBand, off", fabricOf(nil), func(v *launch.Verbs) { v.AdaptiveRouting = launch.AdaptiveRoutingOff }, false},
		{"RoCE", roce, func(*launch.Verbs) {}, false},
		{"RoCE, on", roce, func(v *launch.Verbs) { v.AdaptiveRouting = launch.AdaptiveRoutingOn }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := connectedOf(t, c.devices, func(_ string, config *Config) { c.change(&config.Verbs) })
			write := w.granted(t, 1)
			before := len(w.of(t, "a0", "ibv_post_send"))
			done := make(chan error, 1)
			w.a.loop.Call(func() { write(func(err error) { done <- err }) })
			if err := receive(t, done, "the write's end"); err != nil {
				t.Fatal(err)
			}
			receive(t, w.arrived, "the arrival")
			var got []string
			for _, call := range w.of(t, "a0", "ibv_post_send")[before:] {
				got = append(got, call.Arguments["op"]+" "+call.Arguments["length"])
			}
			want := []string{"1 32768", "1 32768"} // a part on each of two queue pairs
			if c.split {
				want = []string{"0 32768", "0 32768", "1 0", "1 0"}
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("posted, as operation and length: %q, want %q", got, want)
			}
		})
	}
}

// TestGlobalRoutesFollowSubnetsOfInfiniBand demands a GRH if the port requires one and across subnets, with the
// LID of the router if the GID has a FLID, as in NCCL's ncclIbQpRtr.
func TestGlobalRoutesFollowSubnetsOfInfiniBand(t *testing.T) {
	for _, c := range []struct {
		name        string
		change      func(a, b *softdevice.Device)
		global, lid string
	}{
		{"one subnet", nil, "0", "2"},
		{"ports that require a GRH", func(a, b *softdevice.Device) { a.GRH, b.GRH = true, true }, "1", "2"},
		{"two subnets", func(a, b *softdevice.Device) { a.Prefix, b.Prefix = 0xfec0<<48|1, 0xfec0<<48|2 }, "1", "2"},
		{"two subnets with FLIDs", func(a, b *softdevice.Device) {
			a.Prefix, b.Prefix = 0xfec0<<48|8<<16|1, 0xfec0<<48|9<<16|2
		}, "1", "9"},
		{"one subnet with FLIDs", func(a, b *softdevice.Device) {
			a.Prefix, b.Prefix = 0xfec0<<48|8<<16|1, 0xfec0<<48|9<<16|1
		}, "0", "2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := connectedOf(t, fabricOf(c.change))
			calls := slices.DeleteFunc(w.of(t, "a0", "ibv_modify_qp"), func(call softdevice.Call) bool {
				return call.Arguments["state"] != "2"
			})
			if len(calls) != 2 {
				t.Fatalf("%d queue pairs of a0 are ready to receive, want 2", len(calls))
			}
			for _, call := range calls {
				if a := call.Arguments; a["global"] != c.global || a["lid"] != c.lid {
					t.Errorf("global %s with LID %s, want %s with %s", a["global"], a["lid"], c.global, c.lid)
				}
			}
		})
	}
	gids := []verbs.GID{{Index: 0, GID: [16]byte{0xfe, 0x80}}, {Index: 1, GID: [16]byte{0xfe, 0xc0, 0, 0, 0, 9, 0, 1}}}
	if g, ok := routable(gids); !ok || g.Index != 1 {
		t.Errorf("the GID with a FLID is %v (%v), want index 1", g, ok)
	}
	if g, ok := routable(gids[:1]); ok {
		t.Errorf("%v has no FLID, and is chosen", g)
	}
}

// TestECEOptionsAreNegotiated demands that both sides of a connection set the options that both devices
// support, in the order of NCCL: query, set and query on the other side, set.
func TestECEOptionsAreNegotiated(t *testing.T) {
	for _, c := range []struct {
		name         string
		eceA, eceB   uint32
		setA, setB   string // options of ibv_set_ece
		resultA      string
		wantAccepted uint32
	}{
		{"both", 0x7, 0x16, "0x16", "0x6", "0", 0x6},
		{"the answering side alone", 0, 0x16, "0x16", "", "95", 0},
		{"the dialing side alone", 0x7, 0, "", "", "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := deviceA, deviceB
			a.ECE, b.ECE = c.eceA, c.eceB
			w := connectedOf(t, []softdevice.Device{a, b})
			for device, want := range map[string]string{"a0": c.setA, "b0": c.setB} {
				calls := w.of(t, device, "ibv_set_ece")
				if (len(calls) == 0) != (want == "") {
					t.Errorf("%s: %d calls of ibv_set_ece, want options %q", device, len(calls), want)
				}
				for _, call := range calls {
					if call.Arguments["options"] != want || device == "a0" && call.Arguments["="] != c.resultA {
						t.Errorf("%s: ibv_set_ece of %s = %s, want %s", device, call.Arguments["options"], call.Arguments["="], want)
					}
				}
			}
			for _, e := range []*side{w.a, w.b} {
				e.loop.Call(func() {
					for _, p := range e.set.pairs {
						if p.ece.Options != c.wantAccepted {
							t.Errorf("%s: options %#x are accepted, want %#x", e.set.nics[0].name, p.ece.Options, c.wantAccepted)
						}
					}
				})
			}
			w.granted(t, 1)
		})
	}
}

// TestDefaultQueuePairsFollowLinkLayer demands 4 queue pairs for a RoCE link and 1 for other links, and that a
// write uses every queue pair.
func TestDefaultQueuePairsFollowLinkLayer(t *testing.T) {
	for _, c := range []struct {
		name    string
		devices []softdevice.Device
		pairs   int
	}{
		{"RoCE", []softdevice.Device{deviceA, deviceB}, 4},
		{"InfiniBand", fabricOf(nil), 1},
		{"iWARP", ofKind(true, deviceA, deviceB), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := connectedOf(t, c.devices, func(_ string, config *Config) { config.QueuePairs = launch.DefaultVerbs.QueuePairs })
			write := w.granted(t, 1)
			before := len(w.of(t, "a0", "ibv_post_send"))
			done := make(chan error, 1)
			w.a.loop.Call(func() { write(func(err error) { done <- err }) })
			if err := receive(t, done, "the write's end"); err != nil {
				t.Fatal(err)
			}
			used := map[string]bool{}
			for _, call := range w.of(t, "a0", "ibv_post_send")[before:] {
				used[call.Arguments["qp"]] = true
			}
			if len(used) != c.pairs || w.a.set.perLink != c.pairs || w.b.set.perLink != c.pairs {
				t.Errorf("a write goes by %d queue pairs, and a link has %d and %d, want %d", len(used), w.a.set.perLink,
					w.b.set.perLink, c.pairs)
			}
			if way := w.a.way(); !strings.Contains(way, "queue pairs each: ") {
				t.Errorf("the report is %q", way)
			}
		})
	}
}

func (e *side) way() (way string) {
	e.loop.Call(func() { way = e.set.Way() })
	return way
}

// TestRelaxedOrderingFollowsConfiguration demands that verbs.relaxed_ordering decides about the access flag of all
// memory.
func TestRelaxedOrderingFollowsConfiguration(t *testing.T) {
	for _, on := range []bool{true, false} {
		w := connected(t, func(_ string, c *Config) { c.RelaxedOrdering = on })
		w.granted(t, 1)
		calls := w.of(t, "b0", "ibv_reg_mr", "ibv_reg_mr_iova2")
		if len(calls) == 0 {
			t.Fatal("b0 has registered nothing")
		}
		for _, call := range calls {
			access, err := strconv.ParseUint(call.Arguments["access"], 0, 32)
			if err != nil {
				t.Fatal(err)
			}
			if has := verbs.Access(access)&verbs.RelaxedOrdering != 0; has != on {
				t.Errorf("relaxed ordering %v: memory is registered with %#x", on, access)
			}
		}
	}
}

// TestDataDirectNeedsFlush demands that the relay finds a NIC with Data Direct, unless
// verbs.data_direct is off, and then flushes memory of GPUs with any ordering, as NCCL's
// ncclTopoNeedFlush does.
func TestDataDirectNeedsFlush(t *testing.T) {
	for _, on := range []bool{true, false} {
		a := deviceA
		a.DataDirect = true
		w := connectedOf(t, []softdevice.Device{a, deviceB}, func(_ string, c *Config) {
			c.DataDirect = on
			c.Flush = func(*device.Memory) bool { return false }
		})
		if n := w.a.fabric.nics[0]; n.direct != on || n.registrar().DataDirect != on {
			t.Errorf("data_direct %v: a0 has Data Direct: %v", on, n.direct)
		}
		if needs := w.a.fabric.flushes(purpose{&device.Memory{}, true}); needs != on {
			t.Errorf("data_direct %v: a GPU's memory is flushed: %v", on, needs)
		}
		if w.b.fabric.flushes(purpose{&device.Memory{}, true}) {
			t.Error("b0 has no Data Direct, and its writes are flushed")
		}
	}
}

// TestCompletionsKeepLoopFromSleep demands that the loop of a host with many processors spins for longer
// after a completion.
func TestCompletionsKeepLoopFromSleep(t *testing.T) {
	w := connected(t)
	f := w.a.fabric
	for processors, want := range map[int]time.Duration{2: 0, manyProcessors: activeSpin} {
		before, after := time.Duration(-1), time.Duration(-1)
		w.a.loop.Call(func() { f.processors, f.completed = processors, 0; before = f.Spin() })
		write := w.granted(t, uint64(processors))
		done := make(chan error, 1)
		w.a.loop.Call(func() { write(func(err error) { after = f.Spin(); done <- err }) })
		if err := receive(t, done, "the write's end"); err != nil {
			t.Fatal(err)
		}
		receive(t, w.arrived, "the arrival")
		if before != 0 || after != want {
			t.Errorf("%d processors: the loop spins for %v without completions and for %v with one, want %v", processors,
				before, after, want)
		}
	}
}
