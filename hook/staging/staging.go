package staging

import (
	"cmp"
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

// Staging memory is limited per host, and relays share no file that they can open, so the
// supervisors keep the account: a supervisor records the relay's share in the generation's
// directory, under a lock of the host. A record counts while the recorded relay runs, so a killed
// relay or supervisor does not have to release memory.
//
// The limits bind relays that follow the protocol. A compromised relay has devices open, and can
// allocate more from the driver. The account protects other containers: a claim is limited to the
// relay's configuration, and a false memory size affects only claims of the same relay.

// share is the staging memory of a relay.
type share struct {
	Relay process.Process `json:"relay"`
	// Container is the runtime's id.
	Container string `json:"container"`
	// GPUs maps PCI addresses to bytes.
	GPUs map[string]uint64 `json:"gpus"`
	// Host is host memory in bytes.
	Host uint64 `json:"host,omitempty"`
}

func shareFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "staging.json")
}

// readShare reads the share of a generation's relay; empty before the first claim.
func readShare(l paths.Layout, id string) (share, error) {
	var s share
	err := generation.ReadJSON(shareFile(l, id), &s)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, generation.ErrTorn) { // a torn share is of an earlier boot
		return share{}, nil
	}
	return s, err
}

// lockStaging takes the lock for counting and writing shares. Closing the file releases the lock.
func lockStaging(l paths.Layout) (*os.File, error) {
	return generation.LockDirectory(l.State(), generation.LockTimeout)
}

// lockShare locks the shares of the host until the returned file is closed, and returns the share
// of a relay, empty for a new relay of a container: the share of the previous relay is free.
func lockShare(l paths.Layout, g *generation.Generation, relay process.Process) (held *os.File, own share, err error) {
	if held, err = lockStaging(l); err != nil {
		return nil, own, err
	}
	if own, err = readShare(l, g.ID); err != nil {
		held.Close()
		return nil, own, err
	}
	if own.Relay != relay {
		own = share{Relay: relay, Container: g.Container.ID, GPUs: map[string]uint64{}}
	}
	return held, own, nil
}

// Admit decides on a claim of a relay and records the result.
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
	if admitted := granted(g.Config, gpu.BusID); c.Bytes > admitted {
		return launch.Admission{}, fmt.Errorf(
			"%s requested on GPU %d (%s), but the relay's configuration permits %s",
			config.Size(c.Bytes),
			gpu.Index,
			gpu.BusID,
			config.Size(admitted),
		)
	}
	conf, err := hostconfig.Read(l)
	if err != nil {
		return launch.Admission{}, err
	}
	limit, key := stagingLimit(conf.Staging, gpu, c.Memory)
	return resource{
		asked: fmt.Sprintf("%s of staging requested on GPU %d (%s)", config.Size(c.Bytes), gpu.Index, gpu.BusID),
		limit: limit, key: key, tenants: conf.CDI.Tenancy == config.TenancyMulti,
		of: func(s share) uint64 { return s.GPUs[gpu.BusID] },
		set: func(s *share, bytes uint64) {
			s.GPUs[gpu.BusID] = bytes
			if bytes == 0 {
				delete(s.GPUs, gpu.BusID)
			}
		},
	}.admit(l, g, relay, c)
}

// resource is memory that the relays of a host share.
type resource struct {
	asked   string // for the error of a refused claim
	limit   uint64 // bytes
	key     string // sets the limit
	tenants bool   // the refusal does not name the holders
	of      func(share) uint64
	set     func(s *share, bytes uint64)
}

// admit admits claims within the limit of r and claims not above the present share, and records the
// result.
func (r resource) admit(
	l paths.Layout,
	g *generation.Generation,
	relay process.Process,
	c launch.Claim,
) (launch.Admission, error) {
	held, own, err := lockShare(l, g, relay)
	if err != nil {
		return launch.Admission{}, err
	}
	defer held.Close()
	holders, err := holdersOf(l, g.ID, r.of)
	if err != nil {
		return launch.Admission{}, err
	}
	taken := uint64(0)
	for _, h := range holders {
		taken += h.bytes
	}
	free := r.limit - min(r.limit, taken)
	if c.Bytes > free && c.Bytes > r.of(own) {
		text := full(r.asked, r.limit, r.key, taken, holders, r.tenants)
		return launch.Admission{Claim: c.Claim, Free: free, Error: text}, nil
	}
	r.set(&own, c.Bytes)
	if err := generation.WriteJSON(shareFile(l, g.ID), own); err != nil {
		return launch.Admission{}, err
	}
	return launch.Admission{Claim: c.Claim, OK: true, Free: free - min(free, c.Bytes)}, nil
}

// admitHost is Admit for host memory.
func admitHost(
	l paths.Layout,
	g *generation.Generation,
	relay process.Process,
	c launch.Claim,
) (launch.Admission, error) {
	if admitted := grantedHost(g); c.Bytes > admitted {
		return launch.Admission{}, fmt.Errorf(
			"%s of host memory requested, but the relay's configuration permits %s",
			config.Size(c.Bytes),
			config.Size(admitted),
		)
	}
	conf, err := hostconfig.Read(l)
	if err != nil {
		return launch.Admission{}, err
	}
	limit, key, err := hostLimit(conf.Staging)
	if err != nil {
		return launch.Admission{}, err
	}
	return resource{
		asked: fmt.Sprintf("%s of host memory requested", config.Size(c.Bytes)),
		limit: limit, key: key, tenants: conf.CDI.Tenancy == config.TenancyMulti,
		of:  func(s share) uint64 { return s.Host },
		set: func(s *share, bytes uint64) { s.Host = bytes },
	}.admit(l, g, relay, c)
}

// hostLimit returns the limit of host memory for the relays together, and the key that sets the
// limit.
func hostLimit(s config.Staging) (limit uint64, key string, err error) {
	if s.HostLimit != nil {
		return uint64(*s.HostLimit), "staging.host_limit", nil
	}
	var system unix.Sysinfo_t
	if err := unix.Sysinfo(&system); err != nil {
		return 0, "", os.NewSyscallError("sysinfo", err)
	}
	return uint64(
		system.Totalram,
	) * uint64(
		system.Unit,
	) / 4, "a quarter of the host's memory, the default of staging.host_limit", nil
}

// grantedHost returns the maximum host memory, in bytes, that a relay's configuration permits.
func grantedHost(g *generation.Generation) uint64 {
	if own := g.Config.OwnHostMemory; own > 0 {
		return own + maxGranule
	}
	return g.Config.Limits.WithDefaults().HostMemory + g.Config.Bounce + g.NetworkMemory + maxGranule
}

// serverOf returns the server GPU at a PCI address, among the servers and spares of lanes.
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

// maxGranule is above the allocation granule of drivers, 2 MiB.
const maxGranule = 32 << 20

// granted returns the number of bytes on a GPU that a relay's configuration permits: the slots of
// both directions of every lane that the GPU serves, even as a spare, and the staging memory of
// clients that copy themselves.
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

// holder is a relay of another generation that holds a part of a resource.
type holder struct {
	container string
	bytes     uint64
}

// holdersOf lists the relays of other generations that hold a resource, largest first. The caller
// holds the lock.
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
		// A process of unknown state counts: admitting too little is safer than admitting too much.
		if lives, _ := s.Relay.Lives(); lives {
			list = append(list, holder{s.Container, bytes(s)})
		}
	}
	slices.SortFunc(list, func(a, b holder) int {
		return cmp.Or(cmp.Compare(b.bytes, a.bytes), strings.Compare(a.container, b.container))
	})
	return list, nil
}

// unlimited is the limit of a GPU of unknown size without a configured limit.
const unlimited = ^uint64(0)

// stagingLimit returns the limit of the relays together on a GPU with this memory, and the key
// that sets the limit.
func stagingLimit(s config.Staging, gpu launch.GPU, memory uint64) (limit uint64, key string) {
	for _, name := range slices.Sorted(maps.Keys(s.GPUs)) {
		if name == strconv.Itoa(gpu.Index) || gpu.UUID != "" && strings.EqualFold(name, gpu.UUID) ||
			strings.EqualFold(name, gpu.BusID) {
			return uint64(s.GPUs[name]), fmt.Sprintf("staging.gpus.%q", name)
		}
	}
	switch {
	case s.Limit != nil:
		return uint64(*s.Limit), "staging.limit"
	case memory > 0:
		return memory / 4, "a quarter of the GPU's memory, the default of staging.limit"
	}
	return unlimited, ""
}

// maxHolders limits the number of holders in an error.
const maxHolders = 4

// full returns the text of a refusal. With several tenants the text does not name the holders.
func full(asked string, limit uint64, key string, taken uint64, holders []holder, tenants bool) string {
	text := fmt.Sprintf("%s: the limit of all relays of this host is %s (%s)", asked, config.Size(limit), key)
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

// StagingByGPU returns the staging memory of relays in bytes, by the PCI address of the GPU. The sum
// may lack a concurrent claim.
func StagingByGPU(l paths.Layout) (map[string]uint64, error) {
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
