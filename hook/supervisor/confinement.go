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

// openLimit returns a relay's limit of open files, from a directory of the sysctls fs.nr_open and
// fs.file-max. The kernel refuses a relay's message with a descriptor while more descriptors of the
// relay's uid are in flight than this limit, and a container's process that takes the uid can have
// up to its own limit in flight. So a relay has the kernel's maximum: fs.nr_open, at most a 64th of
// fs.file-max. Systemd sets fs.file-max to 2^63-1, where only the memory limit of the control group
// bounds the open files of a compromised relay: without a memory limit the relay gets the minimum.
func openLimit(sysctls string, memoryLimited bool) uint64 {
	const least, part = 65536, 64
	if !memoryLimited {
		return least
	}
	var numbers [2]uint64
	for i, name := range []string{"nr_open", "file-max"} {
		text, err := os.ReadFile(filepath.Join(sysctls, name))
		if err == nil {
			numbers[i], err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		}
		if err != nil {
			return least
		}
	}
	return max(least, min(numbers[0], numbers[1]/part))
}

// lacking returns the error of a part of Report.Missing, for the log: the relay serves
// without that part.
func lacking(missing string) *fault.Error {
	part, cause, _ := strings.Cut(missing, ": ")
	return &fault.Error{Code: fault.NoSandbox, Operation: "the relay's sandbox lacks", Object: part,
		Cause:  missingPart(cause),
		Remedy: fmt.Sprintf("the relay serves without it; peerlane explain %s has the remedies", fault.NoSandbox)}
}

// missingPart is the reason for a part that the sandbox lacks, as sandbox.Report has it.
type missingPart string

func (m missingPart) Error() string { return string(m) }

// confinement returns the sandbox of the relay of a generation. A relay on the network has TCP to
// the ports of relays; other relays have no TCP. Where the control group limits tasks, the
// sandbox does not.
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
	// For connections to the listeners in this directory.
	s.Read = append(s.Read, g.Config.Peers)
	g.Sandbox.AddFiles(&s, g.Relay.Environment)
	// CUDA's IPC creates abstract Unix sockets (cuda-uvmfd-…), which only processes of the same
	// network namespace reach.
	s.HostNetwork = network != nil || g.Config.CUDAIPC
	for _, lane := range g.Config.Lanes {
		nics := slices.Clone(lane.NICs)
		for _, spare := range lane.Spares {
			nics = append(nics, spare.NICs...)
		}
		for _, nic := range nics {
			nodes := sandbox.VerbsNodes(nic)
			s.Devices = append(s.Devices, nodes...)
			// In another namespace the kernel resolves no address of a RoCE port.
			s.HostNetwork = s.HostNetwork || nodes != nil
		}
	}
	slices.Sort(s.Devices)
	s.Devices = slices.Compact(s.Devices)
	return s
}
