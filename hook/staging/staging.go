package staging

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/hostconfig"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/relay/launch"
)

// Staging is admitted per host, and relays can open nothing that they have in
// common. So their supervisors keep the account: each writes down what its relay
// has, in its generation's directory, under one lock of the host. An entry counts
// for as long as the process lives that it names, so that nothing has to be given
// back for a relay, or a supervisor, that is killed.
//
// What is bounded is what relays take that keep to the protocol. One that was
// taken over has its devices open, and can ask the driver for more. It cannot take
// the account away from others: what it claims counts no further than its
// configuration goes, and the memory that it states bounds its own claims alone.

// share is what one relay has of the server GPUs.
type share struct {
	Relay     process.Process   `json:"relay"`
	Container string            `json:"container"` // the runtime's id
	GPUs      map[string]uint64 `json:"gpus"`      // bytes by PCI address
	// Host is the host's memory, bytes.
	Host uint64 `json:"host,omitempty"`
}

func shareFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "staging.json")
}

// readShare reads what a generation's relay has: nothing, where it has asked for
// nothing.
func readShare(l paths.Layout, id string) (share, error) {
	var s share
	err := generation.ReadJSON(shareFile(l, id), &s)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, generation.ErrTorn) { // which is of an earlier boot
		return share{}, nil
	}
	return s, err
}

// lockStaging takes the lock under which shares are counted and written. Closing
// the file lets it go.
func lockStaging(l paths.Layout) (*os.File, error) {
	// The directory itself, so that nothing is left for the lock's sake.
	f, err := os.Open(l.State())
	if err != nil {
		return nil, err
	}
	if err := generation.Lock(f, unix.LOCK_EX, generation.LockTimeout); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Admit decides on a relay's claim, and writes down what it then has.
func Admit(l paths.Layout, id string, relay process.Process, c launch.Claim) (launch.Admission, error) {
	g, err := generation.Read(l, id)
	if err != nil {
		return launch.Admission{}, err
	}
	if c.GPU == launch.HostMemory {
		return admitHost(l, g, relay, c)
	}
	gpu, err := serverOf(g.Config.Lanes, c.GPU)
	if err != nil {
		return launch.Admission{}, err
	}
	if most := granted(g.Config, gpu.BusID); c.Bytes > most {
		return launch.Admission{}, fmt.Errorf("%s asked for on GPU %d (%s), and the relay's configuration comes to %s there",
			config.Size(c.Bytes), gpu.Index, gpu.BusID, config.Size(most))
	}
	conf, err := hostconfig.Read(l)
	if err != nil {
		return launch.Admission{}, err
	}
	held, err := lockStaging(l)
	if err != nil {
		return launch.Admission{}, err
	}
	defer held.Close()
	own, err := readShare(l, id)
	if err != nil {
		return launch.Admission{}, err
	}
	if own.Relay != relay {
		own = share{Relay: relay, Container: g.Container.ID, GPUs: map[string]uint64{}} // its predecessor's is free
	}
	holders, err := holdersOf(l, id, func(s share) uint64 { return s.GPUs[gpu.BusID] })
	if err != nil {
		return launch.Admission{}, err
	}
	limit, key := stagingLimit(conf.Staging, gpu, c.Memory)
	taken := uint64(0)
	for _, h := range holders {
		taken += h.bytes
	}
	free := limit - min(limit, taken)
	if c.Bytes > free && c.Bytes > own.GPUs[gpu.BusID] {
		return launch.Admission{
			Claim: c.Claim, Free: free, Error: full(fmt.Sprintf("%s of staging asked for on GPU %d (%s)", config.Size(c.Bytes), gpu.Index, gpu.BusID),
				limit, key, taken, holders, conf.CDI.Tenancy == config.TenancyMulti),
		}, nil
	}
	own.GPUs[gpu.BusID] = c.Bytes
	if c.Bytes == 0 {
		delete(own.GPUs, gpu.BusID)
	}
	if err := generation.WriteJSON(shareFile(l, id), own); err != nil {
		return launch.Admission{}, err
	}
	return launch.Admission{Claim: c.Claim, OK: true, Free: free - min(free, c.Bytes)}, nil
}

// admitHost is admit for the host's memory.
func admitHost(l paths.Layout, g *generation.Generation, relay process.Process, c launch.Claim) (launch.Admission, error) {
	if most := grantedHost(g); c.Bytes > most {
		return launch.Admission{}, fmt.Errorf("%s of host memory asked for, and the relay's configuration comes to %s", config.Size(c.Bytes), config.Size(most))
	}
	conf, err := hostconfig.Read(l)
	if err != nil {
		return launch.Admission{}, err
	}
	limit, key, err := hostLimit(conf.Staging)
	if err != nil {
		return launch.Admission{}, err
	}
	held, err := lockStaging(l)
	if err != nil {
		return launch.Admission{}, err
	}
	defer held.Close()
	own, err := readShare(l, g.ID)
	if err != nil {
		return launch.Admission{}, err
	}
	if own.Relay != relay {
		own = share{Relay: relay, Container: g.Container.ID, GPUs: map[string]uint64{}} // its predecessor's is free
	}
	holders, err := holdersOf(l, g.ID, func(s share) uint64 { return s.Host })
	if err != nil {
		return launch.Admission{}, err
	}
	taken := uint64(0)
	for _, h := range holders {
		taken += h.bytes
	}
	free := limit - min(limit, taken)
	if c.Bytes > free && c.Bytes > own.Host {
		return launch.Admission{
			Claim: c.Claim, Free: free,
			Error: full(fmt.Sprintf("%s of host memory asked for", config.Size(c.Bytes)), limit, key, taken, holders, conf.CDI.Tenancy == config.TenancyMulti),
		}, nil
	}
	own.Host = c.Bytes
	if err := generation.WriteJSON(shareFile(l, g.ID), own); err != nil {
		return launch.Admission{}, err
	}
	return launch.Admission{Claim: c.Claim, OK: true, Free: free - min(free, c.Bytes)}, nil
}

// hostLimit is the most host memory that all relays together may have, and the key that
// says so.
func hostLimit(s config.Staging) (limit uint64, key string, err error) {
	if s.HostLimit != nil {
		return uint64(*s.HostLimit), "staging.host_limit", nil
	}
	var system unix.Sysinfo_t
	if err := unix.Sysinfo(&system); err != nil {
		return 0, "", os.NewSyscallError("sysinfo", err)
	}
	return uint64(system.Totalram) * uint64(system.Unit) / 4, "a quarter of its memory, as staging.host_limit states nothing else", nil
}

// grantedHost is the most host memory, bytes, that a relay's configuration comes to.
func grantedHost(g *generation.Generation) uint64 {
	if own := g.Config.OwnHostMemory; own > 0 {
		return own + maxGranule
	}
	return g.Config.Limits.WithDefaults().HostMemory + g.Config.Bounce + g.NetworkMemory + maxGranule
}

// serverOf is the server GPU at a PCI address: of these lanes, or a spare.
func serverOf(lanes []launch.Lane, busID string) (launch.GPU, error) {
	for _, lane := range lanes {
		servers := slices.Clone(lane.Servers)
		for _, spare := range lane.Spares {
			servers = append(servers, spare.GPU)
		}
		if i := slices.IndexFunc(servers, func(g launch.GPU) bool { return g.BusID == busID }); i >= 0 {
			return servers[i], nil
		}
	}
	return launch.GPU{}, fmt.Errorf("GPU %q serves no lane of this container", busID)
}

// maxGranule is more than what drivers round allocations up to: 2 MiB.
const maxGranule = 32 << 20

// granted is the most that a relay's configuration comes to on a GPU, bytes: of each
// lane that it serves, all of it or as a spare, the slots of both directions, and
// what clients have there that copy themselves.
func granted(c launch.Config, busID string) uint64 {
	bytes, copies := uint64(0), false
	for _, lane := range c.Lanes {
		if _, err := serverOf([]launch.Lane{lane}, busID); err == nil {
			bytes += 2 * (uint64(c.Slots)*c.SlotBytes + maxGranule)
			copies = copies || lane.Copy
		}
	}
	if copies {
		bytes += c.Limits.WithDefaults().Staging
	}
	return bytes
}

// holder is another relay that has staging on a GPU.
type holder struct {
	container string
	bytes     uint64
}

// holdersOf are the relays, but one generation's, that have something of which their
// share tells the bytes, the greatest first. The lock is held.
func holdersOf(l paths.Layout, but string, bytes func(share) uint64) ([]holder, error) {
	all, err := generation.IDs(l)
	if err != nil {
		return nil, err
	}
	var list []holder
	for _, id := range all {
		if id == but {
			continue
		}
		s, err := readShare(l, id)
		if err != nil {
			return nil, err
		}
		if bytes(s) == 0 {
			continue
		}
		// Where that cannot be found out it counts: too little is admitted then, and
		// not too much.
		if lives, err := s.Relay.Lives(); lives || err != nil {
			list = append(list, holder{s.Container, bytes(s)})
		}
	}
	slices.SortFunc(list, func(a, b holder) int {
		if a.bytes != b.bytes {
			return map[bool]int{true: -1, false: 1}[a.bytes > b.bytes]
		}
		return strings.Compare(a.container, b.container)
	})
	return list, nil
}

// unlimited is the limit of a GPU of which neither configuration nor relay says
// anything.
const unlimited = ^uint64(0)

// stagingLimit is what all relays together may take from a GPU that has so much
// memory, and what says so.
func stagingLimit(s config.Staging, gpu launch.GPU, memory uint64) (limit uint64, key string) {
	for _, name := range slices.Sorted(maps.Keys(s.GPUs)) {
		if name == strconv.Itoa(gpu.Index) || gpu.UUID != "" && strings.EqualFold(name, gpu.UUID) || strings.EqualFold(name, gpu.BusID) {
			return uint64(s.GPUs[name]), fmt.Sprintf("staging.gpus.%q", name)
		}
	}
	switch {
	case s.Limit != nil:
		return uint64(*s.Limit), "staging.limit"
	case memory > 0:
		return memory / 4, "a quarter of its memory, as staging.limit states nothing else"
	}
	return unlimited, ""
}

// maxHolders bounds those that a sentence names.
const maxHolders = 4

// full is the sentence for a claim that is not admitted. Tenants are not told of
// each other.
func full(asked string, limit uint64, key string, taken uint64, holders []holder, tenants bool) string {
	text := fmt.Sprintf("%s: all relays of this host may have %s (%s)", asked, config.Size(limit), key)
	switch {
	case len(holders) == 0:
		return text
	case tenants:
		return fmt.Sprintf("%s, and %d others have %s", text, len(holders), config.Size(taken))
	}
	var names []string
	for _, h := range holders[:min(len(holders), maxHolders)] {
		names = append(names, fmt.Sprintf("container %s %s", h.container, config.Size(h.bytes)))
	}
	if more := len(holders) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("%s, and others have %s: %s", text, config.Size(taken), strings.Join(names, ", "))
}

// Staged is what the relays of a host have of each GPU by its PCI address, bytes.
// Relays that take or give back meanwhile are counted as before or after.
func Staged(l paths.Layout) (map[string]uint64, error) {
	all, err := generation.IDs(l)
	if err != nil {
		return nil, err
	}
	sum := map[string]uint64{}
	for _, id := range all {
		s, err := readShare(l, id)
		if err != nil {
			return nil, err
		}
		if lives, err := s.Relay.Lives(); err == nil && !lives {
			continue
		}
		for gpu, bytes := range s.GPUs {
			sum[gpu] += bytes
		}
	}
	return sum, nil
}
