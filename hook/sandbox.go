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

	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/hook/layout"
	"github.com/peerlane/peerlane/hook/sandbox"
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
func (g *Generation) claimUID(l layout.Layout, c config.Relay) error {
	if g.Sandbox.Mode != config.SandboxAuto || g.Sandbox.Group == 0 {
		return nil
	}
	first, last, err := c.UIDRange()
	if err != nil {
		return err
	}
	// Somewhere, so that one that was given back is not the next one's, and two
	// roots on one host do not begin with the same.
	h := fnv.New32a()
	h.Write([]byte(g.ID)) // a hash's Write never fails
	count := last - first
	start := int(uint64(h.Sum32()) % uint64(count))
	for i := range count {
		uid := first + 1 + (start+i)%count
		mark := filepath.Join(l.UIDs(), strconv.Itoa(uid))
		err := os.Symlink(g.ID, mark)
		if errors.Is(err, fs.ErrExist) {
			if !stale(l, mark) {
				continue
			}
			if err = os.Remove(mark); err == nil {
				err = os.Symlink(g.ID, mark)
			}
		}
		if err == nil {
			g.Sandbox.UID = uid
		}
		return err
	}
	return fmt.Errorf("all %d uids of relays are taken; raise relay.uids in config.toml, which is %s", count, c.UIDs)
}

// stale reports whether a uid's generation is gone: somebody was killed between
// the two.
func stale(l layout.Layout, mark string) bool {
	id, err := os.Readlink(mark)
	if err != nil || !isID(id) {
		return false
	}
	_, err = os.Lstat(l.GenerationDir(id))
	return errors.Is(err, fs.ErrNotExist)
}

// releaseUID gives the uid back, when no process has it any more.
func (g *Generation) releaseUID(l layout.Layout) error {
	if g.Sandbox.UID == 0 {
		return nil
	}
	mark := filepath.Join(l.UIDs(), strconv.Itoa(g.Sandbox.UID))
	id, err := os.Readlink(mark)
	if err == nil && id == g.ID {
		err = os.Remove(mark)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// confinement is what the relay of a generation is left with.
func (g *Generation) confinement() sandbox.Spec {
	s := sandbox.Standard()
	s.UID, s.Open, s.Tasks = g.Sandbox.UID, maxOpen, uint64(g.Sandbox.Limits.Tasks)
	if s.UID != 0 {
		s.Groups = []int{g.Sandbox.Group}
	}
	// To connect to those who listen there.
	s.Read = append(s.Read, g.Config.Peers, g.Config.NICs)
	s.Read = append(s.Read, g.Sandbox.Read...)
	for _, e := range g.Relay.Environment {
		name, value, _ := strings.Cut(e, "=")
		if name != "PEERLANE_CUDA_LIBRARY" && name != "LD_LIBRARY_PATH" {
			continue
		}
		for _, path := range filepath.SplitList(value) {
			if filepath.IsAbs(path) {
				s.Read = append(s.Read, path)
			}
		}
	}
	s.Write = append(s.Write, g.Sandbox.Write...)
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

// infiniband has the RDMA devices, by name; tests have another.
var infiniband = "/sys/class/infiniband"

// verbsNodes are the device nodes of an RDMA device; none of an emulated one.
func verbsNodes(nic string) []string {
	entries, err := os.ReadDir(filepath.Join(infiniband, nic, "device/infiniband_verbs"))
	if err != nil {
		return nil
	}
	nodes := []string{"/dev/infiniband/rdma_cm"}
	for _, e := range entries {
		nodes = append(nodes, filepath.Join("/dev/infiniband", e.Name()))
	}
	return nodes
}

// confineTimeout is how long a relay's sandbox may take, and the execution of the
// relay: milliseconds, on a host that is not starved.
const confineTimeout = 20 * time.Second

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
		return nil, errors.New("the relay's sandbox ended without a word; the generation's log may have one")
	}
	return r, nil
}
