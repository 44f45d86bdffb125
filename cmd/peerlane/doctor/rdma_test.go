package doctor

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/relay/launch"
)

// The job pairs each NIC with the GPUs below its switch: servers of far GPUs, and near GPUs.
func TestRDMAJobFollowsLanes(t *testing.T) {
	m := newMade(t)
	job, err := m.host().RDMAJob()
	must(t, err)
	got := map[string][]int{}
	for _, n := range job.NICs {
		for _, g := range n.GPUs {
			if g.BusID == "" || g.UUID == "" {
				t.Errorf("%s: %+v", n.Name, g)
			}
			got[n.Name] = append(got[n.Name], g.Index)
		}
		slices.Sort(got[n.Name])
	}
	if diff := cmp.Diff(map[string][]int{"mlx5_0": {0, 1}, "mlx5_1": {4, 5}}, got); diff != "" {
		t.Errorf("GPUs by NIC (-want +got):\n%s", diff)
	}
}

// The job follows the configuration, like relays.
func TestRDMAJobFollowsConfiguration(t *testing.T) {
	m := newMade(t)
	job, err := m.host().RDMAJob()
	must(t, err)
	if *job.Verbs != launch.DefaultVerbs {
		t.Errorf("%+v, where nothing is configured", job.Verbs)
	}
	m.write("etc/peerlane/config.toml", "[verbs]\ngid_index = 5\npkey = 2\n")
	if job, err = m.host().RDMAJob(); err != nil || job.Verbs.GIDIndex != 5 || job.Verbs.PKey != 2 {
		t.Errorf("%+v, %v", job.Verbs, err)
	}
}

func TestRDMAResultsBecomeFindings(t *testing.T) {
	m := newMade(t)
	h := m.host()
	job, err := h.RDMAJob()
	must(t, err)
	gpu := job.NICs[0].GPUs[0]
	host := launch.RDMAResult{NIC: "mlx5_0", Memory: launch.MemoryHost,
		Way: "port 1, GID 3 (192.0.2.1, RoCE v2), pkey index 2", Tried: "read", Bytes: 4 << 20, Write: 46, Read: 45}
	dmabuf := launch.RDMAResult{NIC: "mlx5_0", GPU: &gpu, Memory: launch.MemoryDMABuf, Tried: "read", Bytes: 4 << 20,
		Write: 40, Read: 41}
	refused := launch.RDMAResult{NIC: "mlx5_0", GPU: &gpu, Memory: launch.MemoryPeermem, Tried: "register",
		Failed: "ibv_reg_mr: bad address (EFAULT)"}
	far := launch.TripleName{PairName: launch.PairName{GPU: gpu, Server: gpu}, NIC: "mlx5_0"}
	three := func(verdict, reason string) launch.RDMAResult {
		return launch.RDMAResult{NIC: "mlx5_0", Triple: &launch.Triple{TripleName: far, Verdict: verdict, Reason: reason,
			Rounds: 2048}}
	}
	with := func(r launch.RDMAResult, change func(*launch.RDMAResult)) launch.RDMAResult { change(&r); return r }
	for _, c := range []struct {
		name    string
		results []launch.RDMAResult
		failed  error
		want    Status
		// says is the worst finding.
		found string
	}{
		{"all is well", []launch.RDMAResult{host, dmabuf}, nil, OK, ""},
		{"it says which way it went", []launch.RDMAResult{with(host,
			func(r *launch.RDMAResult) { r.Failed = "transport retry counter exceeded" })}, nil, Failure, "read by port 1, " +
			"GID 3 (192.0.2.1, RoCE v2), pkey index 2: transport"},
		{"also where all is well", []launch.RDMAResult{host}, nil, OK,
			"by port 1, GID 3 (192.0.2.1, RoCE v2), pkey index 2 are right"},
		{"one way to register is enough", []launch.RDMAResult{host, dmabuf, refused}, nil, OK, ""},
		{"no way to register", []launch.RDMAResult{host, with(refused,
			func(r *launch.RDMAResult) { r.Memory = launch.MemoryDMABuf }), refused}, nil, Warning, "(EFAULT)"},
		{"the port does not connect", []launch.RDMAResult{with(host,
			func(r *launch.RDMAResult) {
				r.Way, r.Tried, r.Failed = "", "connect",
					"port 1 is DOWN"
			})}, nil, Failure, "connect: port 1 is DOWN"},
		{"wrong bytes", []launch.RDMAResult{with(dmabuf, func(r *launch.RDMAResult) { r.Wrong = 7 })}, nil, Failure,
			"7 of 4194304 bytes are wrong"},
		// A 400 Gb/s port carries 50 GB/s and its PCIe slot 48.
		{"slow", []launch.RDMAResult{with(host, func(r *launch.RDMAResult) { r.Read = 23 })}, nil, Warning,
			"48 GB/s are estimated"},
		{"not slow", []launch.RDMAResult{with(host, func(r *launch.RDMAResult) { r.Read = 25 })}, nil, OK, ""},
		{"slow to a GPU", []launch.RDMAResult{with(dmabuf, func(r *launch.RDMAResult) { r.Write = 11 })}, nil, Warning,
			"48 GB/s are estimated"},
		{"not tested", []launch.RDMAResult{with(host, func(r *launch.RDMAResult) { r.Untested = "iWARP" })}, nil, Unknown,
			"iWARP"},
		{"the test failed", []launch.RDMAResult{host}, errors.New("libibverbs.so.1 cannot be loaded"), Unknown,
			"cannot be loaded"},
		{"no NIC", nil, nil, OK, ""},
		{"a triple is good", []launch.RDMAResult{host, three(launch.VerdictGood, "")}, nil, OK, ""},
		{"a triple is wrong", []launch.RDMAResult{host, three(launch.VerdictWrong, "1 of 64 bytes are wrong in round 3")},
			nil, Failure, "1 of 64 bytes are wrong in round 3"},
		{"a triple cannot be tested", []launch.RDMAResult{host, three(launch.VerdictUntested, "port 1 is DOWN")}, nil,
			Unknown, "port 1 is DOWN"},
	} {
		found := Examine(t.Context(), h, []Check{RDMA(c.results, c.failed)})
		worst := slices.MaxFunc(found, func(a, b Finding) int { return int(a.Status) - int(b.Status) })
		if worst.Status != c.want || !strings.Contains(worst.Found, c.found) {
			t.Errorf("%s: %v %q, want %v %q", c.name, worst.Status, worst.Found, c.want, c.found)
		}
		if worst.Status != OK && (worst.Why == "" || worst.Remedy == "" || worst.LookedAt == "") {
			t.Errorf("%s: %+v", c.name, worst)
		}
		if c.results != nil && !slices.Equal(found[0].Lanes, h.lanesOfNIC("mlx5_0")) {
			t.Errorf("%s: lanes %v, want %v", c.name, found[0].Lanes, h.lanesOfNIC("mlx5_0"))
		}
	}
}
