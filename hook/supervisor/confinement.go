package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// openLimit returns a relay's limit of open files. sysctls is the directory of fs.nr_open and
// fs.file-max. The kernel refuses a relay's message with a descriptor while more descriptors of
// the relay's uid than this limit are in flight, and a process of a container that takes the uid
// can have up to its own limit in flight. So a relay has the maximum of the kernel: fs.nr_open,
// but at most a 64th of fs.file-max. systemd sets fs.file-max to 2^63-1. Then only the memory
// limit of the control group limits the open files of a compromised relay, and without a memory
// limit the relay gets the minimum.
func openLimit(sysctls string, memoryLimited bool) uint64 {
	const minFiles, part = 65536, 64
	if !memoryLimited {
		return minFiles
	}
	var numbers [2]uint64
	for i, name := range []string{"nr_open", "file-max"} {
		text, err := os.ReadFile(filepath.Join(sysctls, name))
		if err == nil {
			numbers[i], err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		}
		if err != nil {
			return minFiles
		}
	}
	return max(minFiles, min(numbers[0], numbers[1]/part))
}

// lacking returns the error, for the log, of a part in Report.Missing: the relay works without
// that part.
func lacking(missing string) *fault.Error {
	part, cause, _ := strings.Cut(missing, ": ")
	return &fault.Error{Code: fault.NoSandbox, Operation: "the relay's sandbox lacks", Object: part,
		Cause:  missingPart(cause),
		Remedy: fmt.Sprintf("the relay serves without it; peerlane explain %s has the remedies", fault.NoSandbox)}
}

// missingPart is the reason for a missing part, as sandbox.Report states it.
type missingPart string

func (m missingPart) Error() string { return string(m) }

// confinement returns the sandbox of a generation's relay. A relay on the network has TCP to the
// ports of relays; other relays have no TCP. The sandbox limits tasks only if the control group
// does not.
func confinement(g *generation.Generation, network *launch.Network, limited cgroup.Limited) sandbox.Spec {
	s := sandbox.Standard()
	if network != nil {
		s.TCP = network.Ports
	}
	s.UID, s.Open = g.Sandbox.UID, openLimit("/proc/sys/fs", limited.Memory)
	if !limited.Tasks {
		s.Tasks = uint64(g.Sandbox.Limits.Tasks)
	}
	if s.UID != 0 {
		s.Groups = []int{g.Sandbox.Group}
	}
	// The listeners of other relays are in this directory.
	s.Read = append(s.Read, g.Config.Peers)
	g.Sandbox.AddFiles(&s, g.Relay.Environment)
	// CUDA's IPC creates abstract Unix sockets (cuda-uvmfd-…), which only processes in the same
	// network namespace can reach.
	s.HostNetwork = network != nil || g.Config.CUDAIPC
	for _, lane := range g.Config.Lanes {
		nics := slices.Clone(lane.NICs)
		for _, spare := range lane.Spares {
			nics = append(nics, spare.NICs...)
		}
		for _, nic := range nics {
			nodes := sandbox.VerbsNodes(nic)
			s.Devices = append(s.Devices, nodes...)
			// In another namespace the kernel does not resolve the addresses of a RoCE port.
			s.HostNetwork = s.HostNetwork || nodes != nil
		}
	}
	slices.Sort(s.Devices)
	s.Devices = slices.Compact(s.Devices)
	return s
}
