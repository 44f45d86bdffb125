package hook

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
)

// Rootless says that this process is in a user namespace into which not all
// users of the host are mapped, as that of an engine without root: its root has
// no power over the host.
func Rootless() bool { return paths.InUserNamespace() }

// withoutRoot refuses what an engine without root can give no container, where
// there is such an engine: with lanes there is nothing to it, because only the
// relay registers memory, but whoever holds a NIC's nodes does so himself.
func (d Devices) withoutRoot() error {
	if len(d.GPUs)+len(d.NICs) == 0 || !Rootless() {
		return nil
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	has := "unlimited"
	if limit.Max != unix.RLIM_INFINITY {
		has = fmt.Sprintf("%d KiB", limit.Max>>10)
	}
	return errors.New("this engine runs without root, and peerlane.dev/gpu= and peerlane.dev/nic= are for programs that register memory with a NIC themselves: only the host's root may lift the limit of locked memory for that (it is " + has + " here); ask for peerlane.dev/lane= and nvidia.com/gpu=")
}
