package rdmatest

import (
	"strconv"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

const serverBusID = "0000:65:00.0"

// triple tests the triple of both GPUs, or of one, and a NIC.
func triple(t *testing.T, nic softdevice.Device, server string, script ...string) (launch.Triple, softdevice.Host) {
	t.Helper()
	return tripleWith(t, launch.DefaultVerbs, nic, server, script...)
}

func tripleWith(
	t *testing.T,
	config launch.Verbs,
	nic softdevice.Device,
	server string,
	script ...string,
) (launch.Triple, softdevice.Host) {
	t.Helper()
	h, err := softdevice.New(t.TempDir(), nic)
	check(t, err)
	check(t, h.Script(script...))
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	var got []launch.Triple
	name := launch.TripleName{
		PairName: launch.PairName{GPU: launch.GPU{BusID: busID}, Server: launch.GPU{BusID: server, Index: 1}},
		NIC:      nic.Name,
	}
	triples(l, openCUDA, []launch.TripleName{name}, &config, func(r launch.Triple) { got = append(got, r) })
	if len(got) != 1 || got[0].TripleName != name {
		t.Fatalf("results %+v", got)
	}
	if err := got[0].Check(); err != nil {
		t.Errorf("%+v: %v", got[0], err)
	}
	return got[0], h
}

func TestTripleOfGoodDevicePasses(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*softdevice.Device)
		server string
		memory string
	}{
		{"far GPU", func(*softdevice.Device) {}, serverBusID, launch.MemoryDMABuf},
		{"near GPU", func(d *softdevice.Device) { d.Holds = false }, busID, launch.MemoryDMABuf},
		{"peermem", func(d *softdevice.Device) { d.NoDMABuf, d.Peermem = true, "yes" }, serverBusID, launch.MemoryPeermem},
		{"peermem of cuMemAlloc", func(d *softdevice.Device) {
			d.NoDMABuf, d.Peermem = true, "alloc"
		}, serverBusID, launch.MemoryPeermem},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Holds: the device needs the flush. Relays flush no writes into a near GPU's memory.
			nic := softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Holds: true}
			c.change(&nic)
			r, h := triple(t, nic, c.server)
			if r.Verdict != launch.VerdictGood || r.Rounds < minRounds || r.Bytes == 0 || r.Memory != c.memory ||
				r.Flushed != nic.Holds {
				t.Errorf("%+v", r)
			}
			for made, given := range map[string]string{"ibv_create_qp": "ibv_destroy_qp", "ibv_alloc_pd": "ibv_dealloc_pd",
				"ibv_open_device": "ibv_close_device"} {
				a, err := h.Calls(made)
				check(t, err)
				b, err := h.Calls(given)
				check(t, err)
				if len(a) != len(b) || len(a) == 0 {
					t.Errorf("%d calls of %s, %d of %s", len(a), made, len(b), given)
				}
			}
		})
	}
}

// TestTripleFollowsConfiguration demands that NICs write and flush in the test as they do for relays.
func TestTripleFollowsConfiguration(t *testing.T) {
	for _, c := range []struct {
		name             string
		ordering, server string // the GPU's attribute
		device           bool   // it has Data Direct
		relaxed, direct  bool   // configuration
		flushed          bool
	}{
		{"unordered", "0", busID, false, true, true, true},
		{"ordered for its owner, near", "100", busID, false, true, true, false},
		{"ordered for its owner, far", "100", serverBusID, false, true, true, true},
		{"ordered for all", "200", serverBusID, false, true, true, false},
		{"Data Direct", "200", serverBusID, true, true, true, true},
		{"Data Direct, near", "200", busID, true, true, true, true},
		{"Data Direct off", "200", serverBusID, true, true, false, false},
		{"relaxed ordering off", "200", serverBusID, false, false, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("PEERLANE_SIM_WRITES_ORDERING", c.ordering)
			config := launch.DefaultVerbs
			config.RelaxedOrdering, config.DataDirect = c.relaxed, c.direct
			r, h := tripleWith(
				t,
				config,
				softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Holds: c.flushed, DataDirect: c.device},
				c.server,
			)
			if r.Verdict != launch.VerdictGood || r.Flushed != c.flushed {
				t.Errorf("%+v, want good, flushed %t", r, c.flushed)
			}
			direct, err := h.Calls("mlx5dv_reg_dmabuf_mr")
			check(t, err)
			if want := c.device && c.direct && c.server != busID; (len(direct) > 0) != want {
				t.Errorf("%d registrations by Data Direct, want some: %t", len(direct), want)
			}
			calls, err := h.Calls("ibv_reg_dmabuf_mr")
			check(t, err)
			if len(calls) == 0 {
				t.Fatal("no memory is registered by DMA-BUF")
			}
			for _, call := range calls {
				access, err := strconv.ParseUint(call.Arguments["access"], 0, 32)
				check(t, err)
				if relaxed := verbs.Access(access)&verbs.RelaxedOrdering != 0; relaxed != c.relaxed {
					t.Errorf("memory is registered with %#x, relaxed ordering %t", access, relaxed)
				}
			}
		})
	}
}

func TestTripleOfFaultyDeviceIsWrong(t *testing.T) {
	for _, fault := range softdevice.Faults() {
		t.Run(fault, func(t *testing.T) {
			r, _ := triple(
				t,
				softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Holds: true, Fault: fault},
				serverBusID,
			)
			by := "read behind writes of mlx5_0"
			if fault == softdevice.FaultStaleRead {
				by = "read behind a copy of GPU"
			}
			if r.Verdict != launch.VerdictWrong || !strings.Contains(r.Reason, by) ||
				!strings.Contains(r.Reason, "are wrong in round") {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestUntestableTripleHasReason(t *testing.T) {
	good := softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1"}
	with := func(change func(*softdevice.Device)) softdevice.Device { d := good; change(&d); return d }
	for _, c := range []struct {
		name   string
		nic    softdevice.Device
		script string
		says   string
	}{
		{"port down", with(func(d *softdevice.Device) { d.Down = true }), "", "is DOWN"},
		{"no registration", with(func(d *softdevice.Device) { d.NoDMABuf = true }), "", "no registration"},
		{"iWARP", with(func(d *softdevice.Device) { d.IWARP = true }), "", "iWARP"},
		{"write fails", good, "send status=10 call=3", "remote access error"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := triple(t, c.nic, serverBusID, c.script)
			if r.Verdict != launch.VerdictUntested || !strings.Contains(r.Reason, c.says) {
				t.Errorf("%+v, want %q", r, c.says)
			}
		})
	}
}

// A software device with a rate moves no more bytes a second.
func TestRateOfDeviceBoundsWrites(t *testing.T) {
	h, err := softdevice.New(t.TempDir(), softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Rate: 40e6})
	check(t, err)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	var r launch.RDMAResult
	Run(l, openCUDA, launch.RDMAJob{NICs: []launch.RDMANIC{{Name: "mlx5_0"}}}, 0, func(of launch.RDMAResult) { r = of })
	// The first of four pieces may go at once.
	if most := 40e-3 * depth / (depth - 1); r.Write <= 0 || r.Write > most || r.Read > most {
		t.Errorf("%.3f GB/s are written and %.3f read at a rate of 0.04", r.Write, r.Read)
	}
}
