package address

import (
	"strings"
	"testing"
)

func TestVariablesWithoutEffectAreReported(t *testing.T) {
	got := IgnoredVariables([]string{
		"NCCL_SOCKET_IFNAME=eth0", "PATH=/bin", "NCCL_IB_TIMEOUT=22", "NCCL_DEBUG=INFO", "NCCL_IB_HCA=mlx5_0",
		"NCCL_IB_GID_INDEX=", "NCCL_IB", "NCCL_SOCKET_IFNAME=eth1",
		"NCCL_SOCKET_NTHREADS=4", "MY_NCCL_IB_HCA=x", "NCCL_SOCKET_FAMILY=AF_INET6",
	})
	want := []struct{ name, says string }{
		{"NCCL_IB_HCA", "sets plan.exclude.nics, or plan.lane.nics, in config.toml"},
		{"NCCL_IB_TIMEOUT", "sets verbs.timeout in config.toml"},
		{"NCCL_SOCKET_FAMILY", "sets network.family in config.toml; NCCL's own sockets"},
		{"NCCL_SOCKET_IFNAME", "sets network.interfaces in config.toml; NCCL's own sockets"},
		{"NCCL_SOCKET_NTHREADS", "sets network.streams in config.toml"},
	}
	if len(got) != len(want) {
		t.Fatalf("%v", got)
	}
	for n, w := range want {
		if s := got[n].String(); got[n].Name != w.name || !strings.HasPrefix(s, w.name+" has no effect") ||
			!strings.Contains(s, w.says) {
			t.Errorf("%q, want %s: %s", s, w.name, w.says)
		}
	}
}
