package hook

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// TestRoCENICOutsideContainerNetworkIsNamed demands a warning for a RoCE NIC whose network
// interface the network namespace of the container does not have, and no warning for another NIC.
func TestRoCENICOutsideContainerNetworkIsNamed(t *testing.T) {
	sysfs := t.TempDir()
	for _, name := range []string{"mlx5_0/device/net/eth2", "mlx5_1/device/net/ib0", "mlx5_2/device",
		"mlx5_3/device/net/eth3"} {
		if err := os.MkdirAll(filepath.Join(sysfs, "class/infiniband", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	plan := &planner.Plan{Source: topo.Source{Sysfs: sysfs}, NICs: []topo.NIC{
		{Name: "mlx5_0", Protocol: "RoCE"}, {Name: "mlx5_1", Protocol: "InfiniBand"},
		{Name: "mlx5_2", Protocol: "RoCE"}, // the interface is in another namespace
		{Name: "mlx5_3", Protocol: "RoCE"}, // not a NIC of the container
	}}
	nics := []string{"mlx5_0", "mlx5_1", "mlx5_2"}
	if err := checkNICNetworks(plan, os.Getpid(), nics); err != nil {
		t.Errorf("in the host's network namespace: %v", err)
	}
	other := exec.Command("sleep", "600")
	other.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		other.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill() // an unreaped process keeps the pid
		_ = other.Wait()         // killed
	}()
	err := checkNICNetworks(plan, other.Process.Pid, nics)
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != 1 {
		t.Fatalf("in another network namespace: %v; want one warning", err)
	}
	if f, ok := errors.AsType[*fault.Error](err); !ok || f.Object != "mlx5_0" || f.Remedy == "" ||
		!testutil.HasError(f.Cause, &hostInterfaceError{"eth2"}) {
		t.Errorf("in another network namespace: %v", err)
	}
	if err := checkNICNetworks(plan, other.Process.Pid, nil); err != nil {
		t.Errorf("without nic=: %v", err)
	}
}
