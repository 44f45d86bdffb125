package hook

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo/planner"
)

// checkNICNetworks warns of RoCE NICs whose network interface is outside the container's network
// namespace: the kernel then gives the container's processes no GID, and no queue pair connects.
func checkNICNetworks(plan *planner.Plan, pid int, nics []string) error {
	if len(nics) == 0 {
		return nil
	}
	shared, err := sharesNetwork(pid)
	if err != nil || shared {
		return err
	}
	var warning error
	for _, n := range plan.NICs {
		if !slices.Contains(nics, n.Name) || n.Protocol != "RoCE" {
			continue
		}
		// The host's sysfs shows only the interfaces in the host's network namespace.
		found, err := filepath.Glob(filepath.Join(plan.Source.Sysfs, "class/infiniband", n.Name, "device/net/*"))
		if err != nil || len(found) == 0 {
			continue
		}
		warning = errors.Join(warning, &fault.Error{Operation: "check the network of RoCE NIC", Object: n.Name,
			Cause:  &hostInterfaceError{filepath.Base(found[0])},
			Remedy: "give the container the host's network, or move the interface into the container's namespace"})
	}
	return warning
}

// hostInterfaceError is the cause of a RoCE NIC without a GID in a container.
type hostInterfaceError struct{ name string } // of the network interface

func (e *hostInterfaceError) Error() string {
	return fmt.Sprintf("its network interface %s is in the host's network namespace, so the NIC has no GID in the "+
		"container", e.name)
}

// sharesNetwork reports whether a process is in this process's network namespace.
func sharesNetwork(pid int) (bool, error) {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return false, err
	}
	its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	return its == own, err
}
