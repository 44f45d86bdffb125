package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/hook/layout"
	"github.com/peerlane/peerlane/hook/sandbox"
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

// maxOpen limits a relay's descriptors: some for each of the clients and
// connections that it takes.
const maxOpen = 65536

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

// claimUID takes a uid that no other generation has. The caller holds the host's
// lock, and the generation's directory is there.
//
// A uid's mark is one more name of the generation's supervisorLock. Whether it is
// in use still is so to be seen whatever has become of the rest: its lock is
// held while a supervisor lives, and it has no other name when the generation's
// directory is gone.
func (g *Generation) claimUID(l layout.Layout, c config.Relay) error {
	if g.Sandbox.Mode != config.SandboxAuto || g.Sandbox.Group == 0 {
		return nil
	}
	first, last, err := c.UIDRange()
	if err != nil {
		return err
	}
	uid, err := linkUID(l, g.ID, first+1, last)
	if err == nil && uid == 0 { // some may be nobody's
		if err = sweep(l); err == nil {
			uid, err = linkUID(l, g.ID, first+1, last)
		}
	}
	if err == nil && uid == 0 {
		err = fmt.Errorf("all %d uids of relays are taken; raise relay.uids in config.toml, which is %s", last-first, c.UIDs)
	}
	g.Sandbox.UID = uid
	return err
}

// linkUID marks a free uid of first to last as a generation's; 0 where none is.
func linkUID(l layout.Layout, id string, first, last int) (int, error) {
	// Somewhere, so that one that was given back is not the next one's, and two
	// roots on one host do not begin with the same.
	h := fnv.New32a()
	h.Write([]byte(id)) // a hash's Write never fails
	count := last - first + 1
	start := int(uint64(h.Sum32()) % uint64(count))
	for i := range count {
		uid := first + (start+i)%count
		if inUse(uid) { // by a relay of another root, say, or what one has left
			continue
		}
		err := os.Link(supervisorLock(l, id), uidMark(l, uid))
		if !errors.Is(err, fs.ErrExist) {
			return uid, err
		}
	}
	return 0, nil
}

// uidMark says that a generation has a uid.
func uidMark(l layout.Layout, uid int) string {
	return filepath.Join(l.UIDs(), strconv.Itoa(uid))
}

// hasUID reports whether the generation of this lock has its uid's mark; else
// somebody has deleted that, or the uid is given back.
func (g *Generation) hasUID(l layout.Layout, lock os.FileInfo) (bool, error) {
	if g.Sandbox.UID == 0 {
		return false, nil
	}
	mark, err := os.Lstat(uidMark(l, g.Sandbox.UID))
	return err == nil && os.SameFile(mark, lock), unlessGone(err)
}

// releaseUID gives the uid back. Only the supervisor may, which has the lock of the
// mark's file, and knows that no process has the uid any more and that none will.
func (g *Generation) releaseUID(l layout.Layout, lock *os.File) error {
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
func sweepUIDs(l layout.Layout) error {
	if left, err := orphans(l); err != nil || len(left) == 0 {
		return err
	}
	host, err := lockHost(l) // which is held by who claims one
	if errors.Is(err, fs.ErrNotExist) {
		return nil // and a relay may live, and nobody will claim one here
	}
	if err != nil {
		return err
	}
	defer host.Close()
	return sweep(l)
}

// sweep is sweepUIDs for who holds the host's lock. It never removes the mark of a
// relay that lives or will: a supervisor that would start it again has the lock of
// the mark's file, and a relay without a supervisor is seen by its uid.
func sweep(l layout.Layout) error {
	left, err := orphans(l)
	if err != nil || len(left) == 0 {
		return err
	}
	var errs []error
	var idle []int
	for _, uid := range left {
		f, err := os.Open(uidMark(l, uid))
		if err == nil {
			err = lock(f, unix.LOCK_SH, 0)
			f.Close()
		}
		switch {
		case err == nil:
			idle = append(idle, uid)
		case !errors.Is(err, errLocked):
			errs = append(errs, unlessGone(err)) // else a supervisor has just given it back
		}
	}
	if len(idle) == 0 {
		return errors.Join(errs...)
	}
	used, err := usedUIDs()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, uid := range idle {
		if !used[uid] {
			errs = append(errs, unlessGone(os.Remove(uidMark(l, uid))))
		}
	}
	return errors.Join(errs...)
}

// orphans are the uids whose marks have no other name: their generation is gone.
func orphans(l layout.Layout) (uids []int, err error) {
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

// usedUIDs are the real uids of all processes, of /proc/PID/status: relays are
// not dumpable, so their directories in /proc are root's.
func usedUIDs() (map[int]bool, error) {
	used := map[int]bool{}
	processes, err := filepath.Glob("/proc/[0-9]*") // the pattern is a good one
	if err != nil {
		return nil, err
	}
	for len(processes) > 0 {
		dir := processes[0]
		processes = processes[1:]
		text, err := os.ReadFile(dir + "/status")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has just ended
		}
		if err != nil {
			return nil, err
		}
		status := string(text)
		if zombie(status) {
			continue
		}
		if uid, ok := realUID(status); ok {
			used[uid] = true
		} else {
			return nil, fmt.Errorf("%s/status names no uid", dir)
		}
		// Only the thread that is to become the relay has its uid yet.
		if !strings.Contains(dir, "/task/") && (strings.HasPrefix(status, "Name:\texe\n") || strings.HasPrefix(status, "Name:\tpeerlane-hook\n")) {
			threads, err := filepath.Glob(dir + "/task/[0-9]*")
			if err != nil {
				return nil, err
			}
			processes = append(processes, threads...)
		}
	}
	return used, nil
}

// zombie reports whether a process of a /proc/PID/status has ended, and nobody has
// asked for its status. Where only its first thread has ended, others are counted.
func zombie(status string) bool {
	return strings.Contains(status, "\nState:\tZ") && (strings.Contains(status, "\nThreads:\t1\n") || strings.Contains(status, "\nThreads:\t0\n"))
}

// realUID finds the real uid in a /proc/PID/status.
func realUID(status string) (int, bool) {
	_, after, _ := strings.Cut(status, "\nUid:\t")
	word, _, ok := strings.Cut(after, "\t")
	uid, err := strconv.Atoi(word)
	return uid, ok && err == nil
}

// confinement is what the relay of a generation is left with. TCP it has where it is on
// the network, and there the ports of relays alone.
func (g *Generation) confinement(network *launch.Network) sandbox.Spec {
	s := sandbox.Standard()
	if network != nil {
		s.TCP = network.Ports
	}
	s.UID, s.Open, s.Tasks = g.Sandbox.UID, maxOpen, uint64(g.Sandbox.Limits.Tasks)
	if s.UID != 0 {
		s.Groups = []int{g.Sandbox.Group}
	}
	// To connect to those who listen there.
	s.Read = append(s.Read, g.Config.Peers, g.Config.NICs)
	g.Sandbox.files(&s, g.Relay.Environment)
	for _, lane := range g.Config.Lanes {
		nics := slices.Clone(lane.NICs)
		for _, spare := range lane.Spares {
			nics = append(nics, spare.NICs...)
		}
		for _, nic := range nics {
			s.Devices = append(s.Devices, verbsNodes(nic)...)
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

// errSilent says that the next try may go well: somebody has killed it.
var errSilent = errors.New("the relay's sandbox ended without a word; the generation's log may have one")

// hearReport waits until the relay is executed.
func hearReport(from *os.File) (*sandbox.Report, error) {
	if err := from.SetReadDeadline(time.Now().Add(confineTimeout)); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(from, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("the relay's sandbox is not made within %v: %w", confineTimeout, err)
	}
	line, failure, _ := strings.Cut(string(text), "\n")
	r := &sandbox.Report{}
	if err := json.Unmarshal([]byte(line), r); err != nil {
		failure = string(text) // instead of a report
	}
	if failure != "" {
		return nil, errors.New(failure)
	}
	if line == "" {
		return nil, errSilent
	}
	return r, nil
}
