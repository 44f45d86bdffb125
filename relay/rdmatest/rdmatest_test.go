package rdmatest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

const busID = "0000:17:00.0"

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "peerlane-rdmatest-*")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := sim.Use(dir, []sim.Device{{UUID: "GPU-5eed0000-0000-4000-8000-000000000000", BusID: busID,
		Memory: 256 << 20, Name: "Simulated GPU"},
		{Index: 1, Minor: 1, UUID: "GPU-5eed0000-0000-4000-8000-000000000001", BusID: serverBusID, Memory: 256 << 20,
			Name: "Simulated GPU"}}); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

var openCUDA = sync.OnceValues(cuda.Open)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestNICTestReportsDeviceState(t *testing.T) {
	good := softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Peermem: "yes"}
	with := func(change func(*softdevice.Device)) softdevice.Device {
		d := good
		change(&d)
		return d
	}
	const all = "ok"
	for _, c := range []struct {
		name   string
		device softdevice.Device
		script string
		// host, dmabuf and peermem are the expected results: ok, or the last step and a part of the
		// reason.
		want [3]string
	}{
		{"all is well", good, "", [3]string{all, all, all}},
		{"no DMA-BUF", with(func(d *softdevice.Device) { d.NoDMABuf = true }), "", [3]string{all, "register: EOPNOTSUPP",
			all}},
		{"no nvidia-peermem", with(func(d *softdevice.Device) { d.Peermem = "no" }), "",
			[3]string{all, all, "register: EFAULT"}},
		{"an old nvidia-peermem", with(func(d *softdevice.Device) { d.Peermem = "alloc" }), "", [3]string{all, all, all}},
		{"the port is down", with(func(d *softdevice.Device) { d.Down = true }), "",
			[3]string{"connect: port 1 of mlx5_0 is DOWN", "connect: is DOWN", "connect: is DOWN"}},
		{"little locked memory", good, "ibv_reg_mr errno=12", [3]string{"open: ulimit -l"}},
		{"the node may not be opened", good, "ibv_open_device errno=13", [3]string{"open: /dev/infiniband"}},
		{"writes fail", good, "send status=10 call=1", [3]string{"write: remote access error", all, all}},
		// The first one is compared, and four are timed; then it reads.
		{"writes bring wrong bytes", good, "send corrupt=1 call=1", [3]string{"write: wrong", all, all}},
		{"reads bring wrong bytes", good, "send corrupt=1 call=6", [3]string{"read: wrong", all, all}},
		{"iWARP", with(func(d *softdevice.Device) { d.IWARP = true }), "", [3]string{"untested: iWARP"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, err := softdevice.New(t.TempDir(), c.device)
			check(t, err)
			check(t, h.Script(c.script))
			l, err := verbs.OpenLibrary(h.Library())
			check(t, err)
			var got []launch.RDMAResult
			Run(
				l,
				openCUDA,
				launch.RDMAJob{NICs: []launch.RDMANIC{{Name: "mlx5_0", GPUs: []launch.GPU{{BusID: busID}}}}},
				0,
				func(r launch.RDMAResult) { got = append(got, r) },
			)
			for i, want := range c.want {
				if want == "" {
					if i < len(got) {
						t.Errorf("one more: %+v", got[i])
					}
					break
				}
				if i >= len(got) {
					t.Fatalf("%d results", len(got))
				}
				r := got[i]
				if r.Memory != []string{launch.MemoryHost, launch.MemoryDMABuf, launch.MemoryPeermem}[i] ||
					(r.GPU != nil) != (i > 0) {
					t.Errorf("result %d is of %s, %v", i, r.Memory, r.GPU)
				}
				is := r.Tried + ": " + r.Failed
				switch {
				case r.Untested != "":
					is = "untested: " + r.Untested
				case r.Wrong > 0:
					is = r.Tried + ": wrong"
				case r.Failed == "":
					is = all
					if r.Bytes != 2*memory || r.Write <= 0 || r.Read <= 0 {
						t.Errorf("%+v", r)
					}
				}
				step, reason, _ := strings.Cut(want, ": ")
				if !strings.HasPrefix(is, step) || !strings.Contains(is, reason) {
					t.Errorf("%s: %q, want %q", r.Memory, is, want)
				}
			}
			// Nothing is left: opened objects are closed.
			opened, err := h.Calls("ibv_open_device")
			check(t, err)
			closed, err := h.Calls("ibv_close_device")
			check(t, err)
			worked := 0
			for _, o := range opened {
				if o.Arguments["="] == "0" {
					worked++
				}
			}
			if worked != len(closed) || len(closed) > 0 && closed[0].Arguments["="] != "0" {
				t.Errorf("%d opened, closed: %v", worked, closed)
			}
		})
	}
}

// The test connects the pairs by the configured method of relays, and reports the method.
func TestNICTestUsesConfiguredConnection(t *testing.T) {
	for _, c := range []struct {
		change func(*launch.Verbs)
		way    string            // in the result
		asked  map[string]string // of the driver; nil where it does not come to that
		failed string
	}{
		{func(*launch.Verbs) {}, "port 1, GID 3 (192.0.2.1, RoCE v2), pkey index 0",
			map[string]string{"gid": "3", "class": "0", "level": "0"}, ""},
		{func(v *launch.Verbs) { v.GIDIndex = 2 }, "port 1, GID 2 (192.0.2.1, RoCE v1), pkey index 0",
			map[string]string{"gid": "2"}, ""},
		{func(v *launch.Verbs) {
			v.TrafficClass, v.ServiceLevel = 104, 3
		}, "GID 3", map[string]string{"class": "104", "level": "3"}, ""},
		{func(v *launch.Verbs) { v.MTU = 512 }, "GID 3", map[string]string{"mtu": "2"}, ""}, // IBV_MTU_512
		{func(v *launch.Verbs) { v.GIDIndex = 9 }, "", nil, "GID index 9 is empty"},
		{func(v *launch.Verbs) { v.PKey = 1 }, "pkey index 1", nil, "EINVAL"}, // the software device has one
	} {
		h, err := softdevice.New(t.TempDir(), softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1"})
		check(t, err)
		l, err := verbs.OpenLibrary(h.Library())
		check(t, err)
		config := launch.DefaultVerbs
		c.change(&config)
		var r launch.RDMAResult
		Run(
			l,
			openCUDA,
			launch.RDMAJob{NICs: []launch.RDMANIC{{Name: "mlx5_0"}}, Verbs: &config},
			0,
			func(of launch.RDMAResult) { r = of },
		)
		if !strings.Contains(r.Way, c.way) || c.way == "" && r.Way != "" || (r.Failed == "") != (c.failed == "") ||
			!strings.Contains(r.Failed, c.failed) {
			t.Errorf("%+v: %+v", config, r)
		}
		calls, err := h.Calls("ibv_modify_qp")
		check(t, err)
		for name, value := range c.asked {
			if !slices.ContainsFunc(calls, func(call softdevice.Call) bool {
				return call.Arguments["state"] == "2" && call.Arguments[name] == value
			}) {
				t.Errorf("%+v: no %s=%s in %v", config, name, value, calls)
			}
		}
	}
}
