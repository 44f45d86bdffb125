package control

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
)

// Inspection is the full state of one generation.
type Inspection struct {
	generation.Info
	// ClientSocket, PeerSocket and AdminSocket are the paths, on the host, of the sockets for
	// clients, for peer relays and for the administration.
	ClientSocket string `json:"clientSocket"`
	PeerSocket   string `json:"peerSocket"`
	AdminSocket  string `json:"adminSocket"`
	// Cgroup is the control group of supervisor and relay; empty if they have no group of their
	// own.
	Cgroup string `json:"cgroup,omitempty"`
	Log    string `json:"log"`
	// LogTail is the end of Log, in lines.
	LogTail []string `json:"logTail"`
	// Sandbox describes the relay's sandbox.
	Sandbox Confinement `json:"confinement"`
	// Processes are the supervisor and the relay, if running.
	Processes []Usage `json:"processes"`
	// Pairs are the results of self-tests of the GPUs that the lanes can stage on.
	Pairs []launch.Pair `json:"pairs"`
	// Triples are the results of the tests of the lanes' GPUs with NICs.
	Triples []launch.Triple `json:"triples,omitempty"`
	// NCCLConf is the source of NCCL's variables in the container.
	NCCLConf NCCLConf `json:"ncclConf"`
	// Report is the relay's own report. If it is nil, NoReport is the reason.
	Report   *launch.Report `json:"report,omitempty"`
	NoReport string         `json:"noReport,omitempty"`
}

// Usage describes the resources that a process uses.
type Usage struct {
	PID int `json:"pid"`
	// Role is supervisor or relay.
	Role string `json:"role"`
	// Resident is VmRSS of /proc/PID/status, in bytes.
	Resident uint64 `json:"resident"`
	// CPU is user and system time in seconds, fields 14 and 15 of /proc/PID/stat.
	CPU float64 `json:"cpu"`
	// Devices are the open nodes of GPUs.
	Devices []string `json:"devices"`
}

// Inspect reads the state of one generation, and asks its relay for a report.
func Inspect(l paths.Layout, id string) (Inspection, error) {
	info, err := generation.Look(l, id)
	if err != nil {
		return Inspection{}, err
	}
	i := Inspection{
		Info: info, ClientSocket: filepath.Join(l.SocketDir(id), paths.SocketName), PeerSocket: l.PeerSocket(id),
		AdminSocket: admin.Socket(l, id),
		Log:         filepath.Join(l.GenerationDir(id), generation.LogName), LogTail: []string{}, Processes: []Usage{},
	}
	if group, ok, err := cgroup.Find(l, id); err != nil {
		return i, err
	} else if _, missing := os.Stat(group.Path()); ok && missing == nil {
		i.Cgroup = group.Path()
	}
	if log, err := os.Open(i.Log); err == nil {
		i.LogTail = strings.Split(generation.Tail(log), "\n")
		log.Close()
	}
	i.Sandbox = confinement(info)
	i.NCCLConf = ncclConf(l, info)
	if i.Pairs, err = selftest.PairsOf(&info.Generation, l); err != nil {
		i.LogTail = append(i.LogTail, fmt.Sprintf("ignoring the stored results of self-tests: %v", err))
	}
	if i.Triples, err = selftest.TriplesOf(&info.Generation, l); err != nil {
		i.LogTail = append(i.LogTail, fmt.Sprintf("ignoring the stored results of self-tests: %v", err))
	}
	answer, err := admin.Ask(l, id, admin.Inspect)
	if err != nil {
		i.NoReport = err.Error()
	} else {
		i.Report, i.NoReport = answer.Report, answer.NoReport
		i.Processes = append(i.Processes, usage(answer.Supervisor, "supervisor"))
	}
	if info.Status.Relay != nil {
		if lives, err := info.Status.Relay.Lives(); err == nil && lives {
			i.Processes = append(i.Processes, usage(info.Status.Relay.PID, "relay"))
		}
	}
	return i, nil
}

// Confinement describes a relay's sandbox.
type Confinement struct {
	// Mode is the mode of the configuration: auto or off.
	Mode string `json:"mode"`
	// Relay describes the running relay; nil without one.
	Relay *Confined `json:"relay,omitempty"`
	// Landlock is the version of Landlock's interface in effect; 0 without Landlock.
	Landlock int `json:"landlock"`
	// Missing lists the parts that the host did not offer, with reasons.
	Missing []string `json:"missing"`
}

// Confined is the kernel's view of a process: /proc/PID/status, and its root.
type Confined struct {
	// UID and GID are the effective ids.
	UID        int   `json:"uid"`
	GID        int   `json:"gid"`
	Groups     []int `json:"groups"`
	NoNewPrivs bool  `json:"noNewPrivs"`
	// Seccomp reports that a filter of system calls is in effect.
	Seccomp bool `json:"seccomp"`
	// Capabilities is the union of the five sets of capabilities; 0 without capabilities.
	Capabilities uint64 `json:"capabilities"`
	// OwnRoot reports a root directory and mount namespace other than the host's.
	OwnRoot bool `json:"ownRoot"`
	// OwnNetwork reports a network namespace other than the host's.
	OwnNetwork bool `json:"ownNetwork"`
}

func confinement(info generation.Info) Confinement {
	c := Confinement{Mode: info.Sandbox.Mode, Missing: []string{}}
	if r := info.Status.Sandbox; r != nil {
		c.Landlock = r.Landlock
		c.Missing = append(c.Missing, r.Missing...)
	}
	if info.Status.Relay == nil {
		return c
	}
	relay, err := readConfined(info.Status.Relay.PID)
	if lives, gone := info.Status.Relay.Lives(); err == nil && gone == nil && lives {
		c.Relay = relay
	}
	return c
}

func readConfined(pid int) (*Confined, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, err
	}
	c, err := parseStatus(string(status))
	if err != nil {
		return nil, err
	}
	c.OwnRoot, c.OwnNetwork = true, true
	for _, pair := range []struct {
		own, its string
		differs  *bool
	}{
		{"/", fmt.Sprintf("/proc/%d/root", pid), &c.OwnRoot},
		{"/proc/self/ns/mnt", fmt.Sprintf("/proc/%d/ns/mnt", pid), &c.OwnRoot},
		{"/proc/self/ns/net", fmt.Sprintf("/proc/%d/ns/net", pid), &c.OwnNetwork},
	} {
		a, err := os.Stat(pair.own)
		if err != nil {
			return nil, err
		}
		b, err := os.Stat(pair.its)
		if err != nil {
			return nil, err
		}
		*pair.differs = *pair.differs && !os.SameFile(a, b)
	}
	return c, nil
}

// parseStatus parses the text of /proc/PID/status.
func parseStatus(status string) (*Confined, error) {
	c := &Confined{Groups: []int{}}
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		f := strings.Fields(value)
		if len(f) == 0 {
			continue
		}
		switch name {
		case "Uid", "Gid": // real, effective, saved, of the file system
			id, err := strconv.Atoi(f[min(1, len(f)-1)])
			if err != nil {
				return nil, err
			}
			if name == "Uid" {
				c.UID = id
			} else {
				c.GID = id
			}
		case "Groups":
			for _, g := range f {
				id, err := strconv.Atoi(g)
				if err != nil {
					return nil, err
				}
				c.Groups = append(c.Groups, id)
			}
		case "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb":
			set, err := strconv.ParseUint(f[0], 16, 64)
			if err != nil {
				return nil, err
			}
			c.Capabilities |= set
		case "NoNewPrivs":
			c.NoNewPrivs = f[0] == "1"
		case "Seccomp":
			c.Seccomp = f[0] == "2" // SECCOMP_MODE_FILTER
		}
	}
	return c, nil
}

// usage reads the resources that a process uses; unreadable values are 0.
func usage(pid int, role string) Usage {
	u := Usage{PID: pid, Role: role, Devices: openNodes(pid, gpuNodes)}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	u.Resident = resident(string(status))
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	u.CPU = cpuTime(string(stat))
	return u
}

// resident returns the resident memory in the text of /proc/PID/status, in bytes.
func resident(status string) uint64 {
	for line := range strings.Lines(status) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kilobytes, _ := strconv.ParseUint(f[1], 10, 64)
			return kilobytes << 10
		}
	}
	return 0
}

// cpuTime returns the processor time in the text of /proc/PID/stat, in seconds.
func cpuTime(stat string) float64 {
	const utime, ticks = 14 - 3, 100 // USER_HZ, sysconf(_SC_CLK_TCK) on every Linux
	f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(f) <= utime+1 {
		return 0
	}
	user, _ := strconv.ParseUint(f[utime], 10, 64)
	system, _ := strconv.ParseUint(f[utime+1], 10, 64)
	return float64(user+system) / ticks
}

// openNodes returns the open character devices of a process whose names begin with nodes. A
// container can give such a name to any other file.
func openNodes(pid int, nodes string) []string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir) // fails if the process has ended
	list := []string{}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || !strings.HasPrefix(to, nodes) || slices.Contains(list, to) {
			continue
		}
		if info, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			list = append(list, to)
		}
	}
	slices.Sort(list)
	return list
}
