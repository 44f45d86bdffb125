package hook

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

// Rootless reports whether this process is in a user namespace that does not map all users of the
// host, like a hook of a rootless engine: root of the namespace has no rights on the host.
func Rootless() bool { return paths.InUserNamespace() }

// withoutRoot refuses the devices that require the host's root, under a rootless engine. Lanes
// work, because only the relay registers memory; a container with the nodes of a NIC registers
// memory itself.
func (d Devices) withoutRoot() error {
	if len(d.GPUs)+len(d.NICs) == 0 || !Rootless() {
		return nil
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	limitText := "unlimited"
	if limit.Max != unix.RLIM_INFINITY {
		limitText = fmt.Sprintf("%d KiB", limit.Max>>10)
	}
	return &fault.Error{
		Code:      fault.LockedMemory,
		Operation: "inject peerlane.dev/gpu= or peerlane.dev/nic= with an engine that runs without root",
		Cause: errors.New(
			"only the host's root may raise the limit of locked memory for memory that a program registers (it is " +
				limitText + " here)",
		),
		Remedy: "request peerlane.dev/lane= and nvidia.com/gpu=",
	}
}
