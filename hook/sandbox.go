package hook

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// Sandbox is what a relay is to be kept in. What could be had of it the status
// says.
type Sandbox struct {
	Mode string `json:"mode"` // auto or off
	// UID is the relay's own, on this host, for as long as the generation is there;
	// 0 where it runs as whoever started it.
	UID int `json:"uid,omitempty"`
	// Group is that of all relays, who may connect to each other; 0 for none.
	Group  int      `json:"group,omitempty"`
	Read   []string `json:"read,omitempty"`
	Write  []string `json:"write,omitempty"`
	Limits Limits   `json:"limits"`
}

// Limits are those of the control group.
type Limits struct {
	Memory uint64 `json:"memory"` // bytes
	CPUs   int    `json:"cpus"`
	Tasks  int    `json:"tasks"`
}

// openLimit returns a relay's limit of open files, from a directory of the sysctls fs.nr_open
// and fs.file-max. The kernel refuses a relay's message with a descriptor while more
// descriptors of the relay's uid are in flight than this limit, and a process of a container
// that takes the uid has up to its own limit in flight. So a relay has the kernel's maximum,
// unless a compromised relay could use up a noticeable part of the host's files.
func openLimit(sysctls string) uint64 {
	const least, part = 65536, 64
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

func newSandbox(c config.Relay) (Sandbox, error) {
	s := Sandbox{
		Mode: c.Sandbox, Read: c.SandboxRead, Write: c.SandboxWrite,
		Limits: Limits{uint64(c.Memory), c.CPUs, c.Tasks},
	}
	first, _, err := c.UIDRange()
	if err != nil || os.Geteuid() != 0 {
		return s, err
	}
	if err := sandbox.Mapped(first); err == nil { // else in a user namespace, which has not so many
		s.Group = first
	}
	return s, nil
}

// claimUID takes a uid that no other generation of this root has. The caller holds the
// host's lock, and the generation's directory exists.
//
// The mark of a uid is a second name of the generation's supervisorLock, so two facts
// about it survive the deletion of the rest: a supervisor that lives holds its lock, and
// the file names the supervisor's last relay.
func (g *Generation) claimUID(l paths.Layout, c config.Relay) error {
	if g.Sandbox.Mode != config.SandboxAuto || g.Sandbox.Group == 0 {
		return nil
	}
	first, last, err := c.UIDRange()
	if err != nil {
		return err
	}
	uid, err := linkUID(l, g.ID, first+1, last)
	if err == nil && uid == 0 { // some marks may have lost their generation
		if err = sweep(l); err == nil {
			uid, err = linkUID(l, g.ID, first+1, last)
		}
	}
	if err == nil && uid == 0 {
		err = &fault.Error{Code: fault.NoRelayUID, Operation: fmt.Sprintf("all %d uids of relays are taken", last-first), Remedy: "raise relay.uids in config.toml, which is " + c.UIDs}
	}
	g.Sandbox.UID = uid
	return err
}

// linkUID marks a free uid of first to last as a generation's; 0 where none is free.
//
// The search begins at a random uid, which follows from no published name: a process that
// can take any uid must not be able to compute a relay's.
func linkUID(l paths.Layout, id string, first, last int) (int, error) {
	count := uint64(last - first + 1)
	start := random() % count
	for i := range count {
		uid := first + int((start+i)%count)
		err := os.Link(supervisorLock(l, id), uidMark(l, uid))
		if !errors.Is(err, fs.ErrExist) {
			return uid, err
		}
	}
	return 0, nil
}

// random returns 64 random bits of the kernel. Package crypto/rand would have its
// algorithms test themselves in every hook.
func random() uint64 {
	var bits [8]byte
	if _, err := unix.Getrandom(bits[:], 0); err != nil { // so few bytes are never interrupted
		panic(os.NewSyscallError("getrandom", err))
	}
	return binary.NativeEndian.Uint64(bits[:])
}

// uidMark says that a generation has a uid.
func uidMark(l paths.Layout, uid int) string {
	return filepath.Join(l.UIDs(), strconv.Itoa(uid))
}

// hasUID reports whether the generation of this lock has its uid's mark; else
// somebody has deleted that, or the uid is given back.
func (g *Generation) hasUID(l paths.Layout, lock os.FileInfo) (bool, error) {
	if g.Sandbox.UID == 0 {
		return false, nil
	}
	mark, err := os.Lstat(uidMark(l, g.Sandbox.UID))
	return err == nil && os.SameFile(mark, lock), unlessGone(err)
}

// releaseUID removes the mark of the uid. Only the supervisor may, when it has reaped its
// relay and starts none any more: a relay cannot make processes, so nothing else of it is
// left. Where the sandbox lacks the filter of system calls, the control group is emptied
// first.
func (g *Generation) releaseUID(l paths.Layout, lock *os.File) error {
	own, err := lock.Stat()
	if err != nil {
		return err
	}
	if has, err := g.hasUID(l, own); err != nil || !has {
		return err
	}
	return unlessGone(os.Remove(uidMark(l, g.Sandbox.UID)))
}

// unlessGone drops the error that says that a file is not there.
func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// sweepUIDs removes the marks of generations that are gone: of a hook that was
// killed, or where somebody has deleted the state.
func sweepUIDs(l paths.Layout) error {
	if left, err := orphans(l); err != nil || len(left) == 0 {
		return err
	}
	host, err := lockHost(l) // which hooks hold that claim one
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no hook claims a uid here, so the marks may stay
	}
	if err != nil {
		return err
	}
	defer host.Close()
	return sweep(l)
}

// returnUID removes the mark of a generation that the caller has removed. A relay whose
// supervisor was killed dies by its parent-death signal a moment later, and a process that the
// supervisor was forking holds the lock until it dies: so returnUID sweeps until the mark has
// gone, for at most endTimeout. A later collector removes a mark that stays.
func (g *Generation) returnUID(l paths.Layout) error {
	for end := time.Now().Add(endTimeout); ; time.Sleep(2 * time.Millisecond) {
		if err := sweepUIDs(l); err != nil || g.Sandbox.UID == 0 {
			return err
		}
		var mark unix.Stat_t
		err := unix.Lstat(uidMark(l, g.Sandbox.UID), &mark)
		// A mark with a second name belongs to another generation, which has taken the uid.
		if err != nil || mark.Nlink > 1 || time.Now().After(end) {
			return nil
		}
	}
}

// sweep is sweepUIDs for a caller that holds the host's lock. It never removes the mark of
// a relay that lives or that a supervisor may start: such a supervisor holds the lock of
// the mark's file, and the file names the last relay. Other processes of that uid are
// none of Peerlane's, and block nothing.
func sweep(l paths.Layout) error {
	left, err := orphans(l)
	if err != nil {
		return err
	}
	var errs []error
	for _, uid := range left {
		used, err := markInUse(uidMark(l, uid))
		if err == nil && !used {
			err = os.Remove(uidMark(l, uid))
		}
		errs = append(errs, unlessGone(err)) // a supervisor may have removed it just now
	}
	return errors.Join(errs...)
}

// markInUse reports whether the supervisor, or the relay, of a uid's mark lives.
func markInUse(mark string) (bool, error) {
	f, err := os.Open(mark)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := lock(f, unix.LOCK_SH, 0); err != nil {
		if errors.Is(err, errLocked) {
			return true, nil
		}
		return false, err
	}
	relay, err := recordedRelay(f)
	if err != nil || relay == nil {
		return false, err
	}
	lives, err := relay.lives()
	return lives, err
}

// recordRelay writes a relay's process to the file of its supervisor's lock, which the
// mark of its uid is, too.
func recordRelay(lock *os.File, relay Process) error {
	text, err := json.Marshal(relay)
	if err == nil {
		err = lock.Truncate(0)
	}
	if err == nil {
		_, err = lock.WriteAt(text, 0)
	}
	return err
}

// recordedRelay reads the process that recordRelay wrote. It is nil where there is none: no
// relay was started yet, the supervisor is of a release before this record, or the host
// stopped before its disk had caught up.
func recordedRelay(lock *os.File) (*Process, error) {
	const maxRecord = 1 << 10
	text, err := io.ReadAll(io.LimitReader(lock, maxRecord))
	if err != nil {
		return nil, err
	}
	relay := &Process{}
	if json.Unmarshal(text, relay) != nil || relay.PID <= 0 {
		return nil, nil
	}
	return relay, nil
}

// orphans are the uids whose marks have no other name: their generation is gone.
func orphans(l paths.Layout) (uids []int, err error) {
	entries, err := os.ReadDir(l.UIDs())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		uid, err := strconv.Atoi(e.Name())
		if err != nil || uid <= 0 {
			continue // none of ours
		}
		var mark unix.Stat_t
		err = unix.Lstat(uidMark(l, uid), &mark)
		if err == unix.ENOENT {
			continue // given back just now
		}
		if err != nil {
			return nil, &os.PathError{Op: "lstat", Path: uidMark(l, uid), Err: err}
		}
		if mark.Nlink == 1 {
			uids = append(uids, uid)
		}
	}
	return uids, nil
}

// confinement is what the relay of a generation is left with. TCP it has where it is on
// the network, and there the ports of relays alone.
func (g *Generation) confinement(network *launch.Network) sandbox.Spec {
	s := sandbox.Standard()
	if network != nil {
		s.TCP = network.Ports
	}
	s.UID, s.Open, s.Tasks = g.Sandbox.UID, openLimit("/proc/sys/fs"), uint64(g.Sandbox.Limits.Tasks)
	if s.UID != 0 {
		s.Groups = []int{g.Sandbox.Group}
	}
	// To connect to those who listen there.
	s.Read = append(s.Read, g.Config.Peers, g.Config.NICs)
	g.Sandbox.files(&s, g.Relay.Environment)
	// CUDA's IPC creates abstract Unix sockets (cuda-uvmfd-…), which other processes reach in
	// the same network namespace only.
	s.HostNetwork = network != nil || g.Config.CUDAIPC
	for _, lane := range g.Config.Lanes {
		nics := slices.Clone(lane.NICs)
		for _, spare := range lane.Spares {
			nics = append(nics, spare.NICs...)
		}
		for _, nic := range nics {
			nodes := verbsNodes(nic)
			s.Devices = append(s.Devices, nodes...)
			// In another namespace the kernel resolves no address of a RoCE port.
			s.HostNetwork = s.HostNetwork || nodes != nil
		}
	}
	slices.Sort(s.Devices)
	s.Devices = slices.Compact(s.Devices)
	return s
}

// files adds what the configuration names for all relays of a host, and what their
// environment does.
func (c Sandbox) files(s *sandbox.Spec, environment []string) {
	s.Read = append(s.Read, c.Read...)
	for _, e := range environment {
		name, value, _ := strings.Cut(e, "=")
		if name != libraryVariable && name != verbsVariable && name != "LD_LIBRARY_PATH" {
			continue
		}
		for _, path := range filepath.SplitList(value) {
			if filepath.IsAbs(path) {
				s.Read = append(s.Read, path)
			}
		}
	}
	s.Write = append(s.Write, c.Write...)
}

// uverbs has the character devices of RDMA; tests have another.
var uverbs = "/sys/class/infiniband_verbs"

// verbsNodes are the device nodes of an RDMA device, also of one that no PCI function is
// behind (rxe, siw): those whose uverbsN/ibdev names it. None of an emulated one.
func verbsNodes(nic string) (nodes []string) {
	entries, err := os.ReadDir(uverbs)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		// abi_version lies beside them.
		if is, err := os.ReadFile(filepath.Join(uverbs, e.Name(), "ibdev")); err == nil && strings.TrimSpace(string(is)) == nic {
			nodes = append(nodes, filepath.Join("/dev/infiniband", e.Name()))
		}
	}
	if nodes != nil {
		nodes = append(nodes, "/dev/infiniband/rdma_cm")
	}
	return nodes
}

// confineTimeout is how long a relay's sandbox may take, and the execution of the
// relay: milliseconds, on a host that is not starved.
const confineTimeout = 20 * time.Second

// lacking returns the error of a part of Report.Missing, for the log: the relay serves
// without that part.
func lacking(missing string) *fault.Error {
	part, cause, _ := strings.Cut(missing, ": ")
	return &fault.Error{Code: fault.NoSandbox, Operation: "the relay's sandbox lacks", Object: part, Cause: errors.New(cause),
		Remedy: fmt.Sprintf("the relay serves without it; peerlane explain %s has the remedies", fault.NoSandbox)}
}

// withoutCgroup returns the error of a relay that stays in the container runtime's control
// group, for the log.
func withoutCgroup(container string, cause error) *fault.Error {
	return &fault.Error{Code: fault.NoSandbox, Operation: "make a control group for the relay of container", Object: container, Cause: cause,
		Remedy: "mount cgroup2 where the container runtime starts, or enable peerlane-relay.socket; until then the relay is in the runtime's control group, and relay.memory may not hold"}
}

// errSilent says that the next try may go well: somebody has killed it.
var errSilent error = &fault.Error{Code: fault.NoSandbox, Operation: "the relay's sandbox ended without a word", Remedy: "read the generation's log"}

// hearReport waits until the relay is executed.
func hearReport(from *os.File) (*sandbox.Report, error) {
	if err := from.SetReadDeadline(time.Now().Add(confineTimeout)); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(from, 64<<10))
	if err != nil {
		return nil, &fault.Error{Code: fault.NoSandbox, Operation: "wait for the relay's sandbox for", Object: confineTimeout.String(), Cause: err}
	}
	line, failure, _ := strings.Cut(string(text), "\n")
	r := &sandbox.Report{}
	if err := json.Unmarshal([]byte(line), r); err != nil {
		failure = string(text) // instead of a report
	}
	if failure != "" {
		return nil, &fault.Error{Code: fault.NoSandbox, Operation: "make the relay's sandbox", Cause: errors.New(failure)}
	}
	if line == "" {
		return nil, errSilent
	}
	return r, nil
}
