package selftest

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

func TestMeasuredLoopsTakeTheFastestRegistration(t *testing.T) {
	gpu := func(i int) *launch.GPU {
		return &launch.GPU{BusID: []string{"0000:17:00.0", "0000:18:00.0"}[i], Index: i}
	}
	loops, failed := measuredLoops([]launch.RDMAResult{
		{NIC: "mlx5_0", Memory: launch.MemoryHost, Write: 20, Read: 22},
		{NIC: "mlx5_0", GPU: gpu(0), Memory: launch.MemoryDMABuf, Write: 9, Read: 8},
		{NIC: "mlx5_0", GPU: gpu(0), Memory: launch.MemoryPeermem, Write: 12, Read: 11},
		{NIC: "mlx5_0", GPU: gpu(1), Memory: launch.MemoryDMABuf, Failed: "EOPNOTSUPP"},
		{NIC: "mlx5_0", GPU: gpu(1), Memory: launch.MemoryPeermem, Write: 7, Read: 6},
		{NIC: "mlx5_1", Memory: launch.MemoryHost, Write: 20, Read: 22, Wrong: 1},
		{NIC: "mlx5_1", GPU: gpu(0), Memory: launch.MemoryDMABuf, Failed: "first"},
		{NIC: "mlx5_1", GPU: gpu(0), Memory: launch.MemoryPeermem, Failed: "second"},
		{NIC: "mlx5_2", Memory: launch.MemoryHost, Untested: "iWARP"},
		{NIC: "mlx5_3", Triple: &launch.Triple{}},
	})
	want := []topo.MeasuredLoop{{NIC: "mlx5_0", Out: 22, In: 20}, {NIC: "mlx5_0", GPU: "0000:17:00.0", Out: 11, In: 12},
		{NIC: "mlx5_0", GPU: "0000:18:00.0", Out: 6, In: 7}}
	if diff := cmp.Diff(want, loops); diff != "" {
		t.Errorf("loopbacks: %s", diff)
	}
	if want := []string{"mlx5_1 and host memory: wrong bytes arrived; run peerlane doctor --rdma",
		"mlx5_1 and memory of GPU 0: first",
		"mlx5_2 and host memory: iWARP"}; !slices.Equal(failed, want) {
		t.Errorf("without a rate are %q, want %q", failed, want)
	}
}
