// Package verbs is the transport between relays of two hosts over RDMA (InfiniBand, RoCE, iWARP).
//
// A tcp.Peer accompanies the RDMA resources and provides trust, channels, messages and detection of
// a dead peer. A QPGroup has reliable connected queue pairs, several for each two NICs, which every
// channel of two relays shares. The sender writes with an immediate: the ticket that the receiver
// sent with a grant. A write has arrived when each queue pair that carries a part has delivered the
// ticket. A sender with a ticket always finds a posted receive: the number of tickets is at most
// the number of receives.
//
// Messages of the peer on the control stream are untrusted. The NIC checks the peer's writes, and
// only by memory and key: a peer with a grant in a memory, or with a guessed key, can write all of
// that memory while the registration and the queue pairs exist. The registration of a pure source
// permits no remote write.
package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/poll"
	gdr "github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Config is the configuration of RDMA.
type Config struct {
	launch.Verbs
	// NICs returns the names of the NICs of the relay's lanes, as in /sys/class/infiniband. Any
	// goroutine calls it.
	NICs func() []string
	// Off is the reason for RDMA being off. The Fabric sends the reason to peers.
	Off string
	// Library is the path of another libibverbs, for tests.
	Library string
	// Slots is the minimum amount of memory that a lane registers, bytes. The Fabric does not use a
	// NIC that cannot register as much.
	Slots uint64
	// Flush reports whether writes of NICs into memory of a GPU need a flush before use; nil
	// without such memory. Any goroutine calls it.
	Flush func(*device.Memory) bool
	// Stages reports whether lanes stage on GPUs, so that NICs may write there. Any goroutine calls
	// it.
	Stages func() bool
	// Current calls a function with a current CUDA context, which a registration of GPU memory
	// needs; nil if no context is necessary. Any goroutine calls it.
	Current func(func() error) error
	// Ports are the ports of listeners of the connection manager; zero for any port.
	Ports address.Ports
	// Addresses returns the addresses of the host, for tests; nil for the real addresses.
	Addresses func() ([]netip.Addr, error)
	// Time is the limit of the negotiation of two sides (SettleTime).
	Time time.Duration
	// Reconnect is the time for new queue pairs after a fault (Verbs.ReconnectLimit).
	Reconnect time.Duration
	// PortWait is the time that a port may lack a link before the group resets its queue pairs (5
	// s).
	PortWait time.Duration
	// minPairPart is the shortest part of a write for one of several queue pairs of a link, bytes;
	// 0 for a MiB. Both relays need the same value. Tests split short writes.
	minPairPart uint64
	// earlier treats the peer as a version before tcp.PartsVersion, for tests.
	earlier bool
}

// SettleTime is the default limit of the negotiation.
const SettleTime = 10 * time.Second

// Fabric has the RDMA state of a relay: NICs, which OpenEarly or the first peer opens, memory that is registered
// with every NIC, and a QPGroup for each Peer.
type Fabric struct {
	loop   *poll.Loop
	config Config

	opening sync.Mutex
	nics    []*nic // under opening; includes dead NICs
	chosen  bool   // under opening: a peer has used the NICs

	mu       sync.Mutex
	closed   bool
	memories map[purpose]*registration
	closing  map[*registration]bool // registrations in release
	places   []*registration        // sources, by address
	// forgotten is closed when Close has released every registration.
	forgotten chan struct{}
	domains
	completions

	direct   atomic.Bool       // a NIC has Data Direct
	beside   chan struct{}     // limits concurrent registrations of Known
	building sync.WaitGroup    // counts registrations outside the loop
	raising  sync.WaitGroup    // counts goroutines that build or release groups
	ending   time.Duration     // maximum wait of Close for raising
	sets     map[*QPGroup]bool // the groups that are not closed; the loop owns the map
	ports    map[*nic]int      // number of port events by NIC; the loop owns the map
	back     time.Duration     // backTime
}

// New creates the Fabric of a relay. The NICs open later.
func New(loop *poll.Loop, config Config) *Fabric {
	if config.Time == 0 {
		config.Time = SettleTime
	}
	if config.Addresses == nil {
		config.Addresses = hostAddresses
	}
	if config.Reconnect == 0 {
		config.Reconnect = time.Duration(cmp.Or(config.ReconnectLimit, launch.DefaultVerbs.ReconnectLimit)) * time.Second
	}
	if config.PortWait == 0 {
		config.PortWait = portWait
	}
	f := &Fabric{
		loop: loop, config: config, ending: endingTime, memories: map[purpose]*registration{},
		closing: map[*registration]bool{}, forgotten: make(chan struct{}),
		domains: domains{renewed: map[*nic]bool{}}, beside: make(chan struct{}, registeringAtOnce), sets: map[*QPGroup]bool{},
		ports: map[*nic]int{}, back: backTime, completions: completions{shared: map[*verbs.Context][]*completionQueue{},
			processors: runtime.NumCPU()},
	}
	loop.Add(f)
	return f
}

// nic is an open NIC and its port.
type nic struct {
	name    string
	index   int // index in the lists of regions
	opened  int // number of NICs opened before, including reopened NICs
	context *verbs.Context
	domain  *verbs.Domain
	life    *life // of the domain
	port    uint8
	is      verbs.Port
	gid     verbs.GID
	limits  verbs.Attributes
	// cm is the state of the connection manager; nil if the relays exchange the numbers of queue
	// pairs.
	cm *managed
	// direct: the NIC has a Data Direct function, which registers memory of GPUs.
	direct bool
	// sends: the NIC has no write with immediate.
	sends bool
	// software: the NIC is a software device of package softdevice.
	software bool
	// dead: the device is gone or was reset. The next open creates another nic.
	dead *atomic.Bool
	// changes counts the events about changed addresses. seen is the count before the query of is
	// and gid.
	changes *atomic.Uint32
	seen    uint32
}

func unreachable(format string, arguments ...any) error {
	return wire.Errorf(wire.StatusUnreachable, format, arguments...)
}

// open opens the NICs of the current lanes once, and reopens dead NICs. A later lane uses the same
// NICs. If no NIC opens, the error has the cause for each NIC, and the next call tries again. A call
// before the first peer is early: the first peer tries NICs again that did not open. It blocks.
func (f *Fabric) open(early bool) ([]*nic, error) {
	f.opening.Lock()
	defer f.opening.Unlock()
	var nics []*nic
	var names []string
	for _, n := range f.nics {
		if !n.dead.Load() {
			nics = append(nics, n)
		} else if !slices.Contains(names, n.name) {
			names = append(names, n.name)
		}
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		return slices.ContainsFunc(nics, func(n *nic) bool { return n.name == name })
	})
	switch {
	case f.config.Off != "":
		return nil, unreachable("%s", f.config.Off)
	case !f.chosen:
		names = slices.DeleteFunc(slices.Clone(f.config.NICs()), func(name string) bool {
			return slices.ContainsFunc(nics, func(n *nic) bool { return n.name == name })
		})
		names = names[:min(len(names), maxCards-len(nics))]
	}
	if len(nics) == 0 && len(names) == 0 {
		return nil, unreachable("the lanes of this container have no NIC")
	}
	if len(names) == 0 {
		f.chosen = f.chosen || !early
		return nics, nil
	}
	library, err := openLibrary(f.config.Library)
	if err != nil {
		return nil, unreachable("%w", err)
	}
	var why []string
	for _, name := range names {
		n, err := openNIC(library, name, f.config)
		if err != nil {
			why = append(why, err.Error())
			continue
		}
		n.index, n.opened = f.newIndex(), len(f.nics)
		f.nics, nics = append(f.nics, n), append(nics, n)
		if n.direct {
			f.direct.Store(true)
		}
		f.loop.Do(func() { f.watch(n) })
	}
	if nics == nil {
		return nil, unreachable("no NIC can be used: %s", strings.Join(why, "; "))
	}
	f.chosen = f.chosen || !early
	for _, text := range why {
		if early {
			logrus.Debugf("RDMA device not opened before the first peer: %s", text)
			continue
		}
		logrus.Warn(&fault.Error{Code: fault.NICLeftOut, Operation: "RDMA goes without a NIC", Cause: errors.New(text)})
	}
	return nics, nil
}

// active returns the NICs with an active port, with the current state of the port. It blocks.
func (f *Fabric) active() (nics []*nic, err error) {
	all, err := f.open(false)
	if err != nil {
		return nil, err
	}
	var why []string
	for _, n := range all {
		now := *n
		now.seen = n.changes.Load()
		now.is, err = n.context.Port(n.port)
		switch {
		case err != nil || now.is.State != verbs.PortActive:
		case n.cm == nil:
			now.gid, err = n.chooseGID(f.config.GIDIndex)
		default:
			now.cm, err = n.cm.now(n.name, f.config)
		}
		switch {
		case err != nil:
			why = append(why, err.Error())
		case now.is.State != verbs.PortActive:
			why = append(why, fmt.Sprintf("%s: %s (%s)", n.name, portInactive, now.is.State))
		default:
			nics = append(nics, &now)
		}
	}
	if nics == nil {
		return nil, unreachable("no NIC can be used: %s", strings.Join(why, "; "))
	}
	return nics, nil
}

// portInactive is the cause of a temporary refusal. The peer sends the cause as text.
const portInactive = "no port is active"

// PortActive reports whether a NIC of this relay has an active port. It blocks.
func (f *Fabric) PortActive() bool {
	nics, err := f.active()
	return err == nil && len(nics) > 0
}

func openLibrary(path string) (*verbs.Library, error) {
	if path == "" {
		return verbs.Open()
	}
	return verbs.OpenLibrary(path)
}

func openNIC(library *verbs.Library, name string, config Config) (_ *nic, err error) {
	devices, err := library.Devices()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	i := slices.IndexFunc(devices, func(d verbs.Device) bool { return d.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%s: no such device, or no rdma-core provider for the device", name)
	}
	n := &nic{name: name, dead: &atomic.Bool{}, changes: &atomic.Uint32{}, life: &life{}, software: library.Software()}
	switch devices[i].Transport {
	case verbs.IB:
		n.context, err = library.OpenDevice(name)
	case verbs.IWARP:
		n.sends = true
		n.cm, n.context, err = openManaged(library, name, config)
	default:
		err = fmt.Errorf("%s: unsupported transport %s; Peerlane supports InfiniBand, RoCE and iWARP", name,
			devices[i].Transport)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	if n.limits, err = n.context.Attributes(); err != nil {
		return nil, err
	}
	var states []string
	for port := uint8(1); int(port) <= n.limits.Ports && n.port == 0; port++ {
		if n.is, err = n.context.Port(port); err != nil {
			return nil, err
		}
		if n.is.State == verbs.PortActive {
			n.port = port
		}
		states = append(states, n.is.State.String())
	}
	if n.port == 0 {
		return nil, fmt.Errorf("%s: %s (%s)", name, portInactive, strings.Join(states, ", "))
	}
	if n.cm == nil {
		if n.gid, err = n.chooseGID(config.GIDIndex); err != nil {
			return nil, err
		}
	}
	if n.domain, err = n.context.NewDomain(); err != nil {
		return nil, err
	}
	n.direct = config.DataDirect && n.context.DataDirect()
	return n, n.try(config.Slots)
}

// chooseGID returns the source GID of packets: the GID with an index, or the best GID for a
// negative index.
func (n *nic) chooseGID(index int) (verbs.GID, error) {
	gids, err := n.context.GIDs(n.port)
	if err != nil {
		return verbs.GID{}, err
	}
	if index < 0 {
		index = verbs.AnyIndex
		if g, ok := routable(gids); ok && n.infiniband() {
			return g, nil
		}
	}
	gid, err := verbs.ChooseGID(gids, verbs.Choice{Index: index})
	if err != nil {
		err = fmt.Errorf("%s port %d: %w", n.name, n.port, err)
	}
	return gid, err
}

// try registers memory with the NIC once, to detect a limit of locked memory early.
func (n *nic) try(bytes uint64) error {
	if bytes == 0 {
		return nil
	}
	memory, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	at := uintptr(unsafe.Pointer(&memory[0]))
	region, err := n.domain.Register(at, bytes, uint64(at), verbs.LocalWrite|verbs.RemoteWrite)
	if err == nil {
		err = region.Close()
	}
	if err != nil {
		err = fmt.Errorf("%s of host memory cannot be registered: %w", humanize.IBytes(bytes), err)
	}
	return errors.Join(err, os.NewSyscallError("munmap", unix.Munmap(memory)))
}

func (n *nic) close() error {
	var err error
	if n.domain != nil {
		err = n.domain.Close()
	}
	err = errors.Join(err, n.context.Close())
	if n.cm != nil {
		err = errors.Join(err, n.cm.close())
	}
	return err
}

func (n *nic) infiniband() bool { return n.is.LinkLayer != verbs.Ethernet }

// Default numbers of queue pairs of a link.
const (
	// roceQueuePairs spreads data over the paths that switches select by hash.
	roceQueuePairs  = 4
	otherQueuePairs = 1
)

// queuePairs returns the number of queue pairs that a link of this NIC may have.
func (n *nic) queuePairs(config launch.Verbs) int {
	switch {
	case config.QueuePairs > 0:
		return config.QueuePairs
	case n.cm == nil && !n.infiniband():
		return roceQueuePairs
	}
	return otherQueuePairs
}

// mtu returns the lesser MTU of port and configuration. The message to the peer has the value,
// because both sides of a link need the same MTU.
func (n *nic) mtu(config launch.Verbs) verbs.MTU {
	if most, ok := verbs.MTUOf(config.MTU); ok {
		return min(n.is.MTU, most)
	}
	return n.is.MTU
}

func (n *nic) portInfo(config launch.Verbs) portInfo {
	c := portInfo{GID: n.gid.GID, LID: n.is.LID, Layer: layerEthernet, MTU: uint8(n.mtu(config))}
	if n.infiniband() {
		c.Layer = layerInfiniBand
	}
	if n.cm != nil {
		c.GID, c.Ways = n.cm.address.As16(), wayManaged
	}
	if n.sends {
		c.Ways |= waySends
	}
	wire.SetText(c.Name[:], n.name)
	return c
}

// at returns the address of the NIC for peers.
func (n *nic) at() string {
	if n.cm != nil {
		return fmt.Sprintf("%s, iWARP by RDMA CM", n.cm.address)
	}
	return n.gid.String()
}

func (n *nic) String() string {
	return fmt.Sprintf("%s port %d, %s, %s, MTU %d, %.0f Gb/s", n.name, n.port, n.is.LinkLayer, n.at(), n.is.MTU.Bytes(),
		n.is.GigabitRate) + n.kind()
}

// kind marks a software device in reports.
func (n *nic) kind() string {
	if n.software {
		return ", software device"
	}
	return ""
}

// Report returns the report for the administrator; nil before the first use of a NIC, and while
// NICs open. Call Report on the event loop.
func (f *Fabric) Report() *launch.VerbsReport {
	if f.config.Off != "" {
		return &launch.VerbsReport{Error: f.config.Off}
	}
	if !f.opening.TryLock() {
		return nil
	}
	defer f.opening.Unlock()
	if f.nics == nil {
		return nil
	}
	r := &launch.VerbsReport{}
	for _, n := range f.nics {
		if !n.dead.Load() {
			r.NICs = append(r.NICs, n.String())
			r.Resources = append(r.Resources, f.resources(n))
		}
	}
	return r
}

// --- memory -------------------------------------------------------------------------

// purpose is memory and the direction of a registration: the peer can write only into granted
// targets.
type purpose struct {
	memory *device.Memory
	target bool
}

// access returns the rights to memory that the other side writes, or that is sent from. The order of
// writes is free, unless Verbs.RelaxedOrdering is off: the immediate tells that all have arrived.
func (f *Fabric) access(target bool) verbs.Access {
	return gdr.Access(target, f.config.RelaxedOrdering)
}

// registration is memory of the host or a GPU that is registered with NICs.
type registration struct {
	what        purpose
	base, bytes uint64
	flush       bool // writes into the memory need a flush
	// regions is indexed by nic.index; nil for a NIC without a registration. The slice is
	// immutable.
	regions atomic.Pointer[[]*verbs.Region]
	asked   map[*life]bool          // NICs that Known has tried; under Fabric.mu
	refused atomic.Pointer[unknown] // last error of a NIC without a registration; nil without an error

	making sync.Mutex            // held during a registration and a release
	over   bool                  // under making
	steps  map[string][]gdr.Step // attempts for memory of a GPU, by NIC; under making
}

// unknown is the error of a failed registration. A NIC with the same name clears the error after a
// reconnect.
type unknown struct {
	by  string
	err error
}

// region returns the registration with a NIC, or nil.
func (r *registration) region(n *nic) *verbs.Region {
	if list := *r.regions.Load(); n.index < len(list) {
		return list[n.index]
	}
	return nil
}

// known reports whether every NIC has a registration.
func (r *registration) known(nics []*nic) bool {
	return !slices.ContainsFunc(nics, func(n *nic) bool { return r.region(n) == nil })
}

// register registers memory with the NICs that lack a registration. It blocks, unless every NIC has
// one.
func (f *Fabric) register(what purpose, nics []*nic) (*registration, error) {
	if err := f.begin(); err != nil {
		return nil, err
	}
	defer f.building.Done()
	f.mu.Lock()
	r := f.registration(what)
	f.mu.Unlock()
	return r, r.fill(f, nics)
}

// errForgotten is the error of a registration after Forget.
var errForgotten = wire.Errorf(wire.StatusInternal, "memory is being taken back")

// fill registers the memory with NICs. After Forget, fill fails, because the memory may be gone. It
// blocks.
func (r *registration) fill(f *Fabric, nics []*nic) error {
	if r.known(nics) {
		return nil
	}
	r.making.Lock()
	defer r.making.Unlock()
	if r.over {
		return errForgotten
	}
	list := slices.Clone(*r.regions.Load())
	defer func() { r.regions.Store(&list) }()
	for _, n := range nics {
		list = append(list, make([]*verbs.Region, max(0, n.index+1-len(list)))...)
		if list[n.index] != nil {
			continue
		}
		err := n.life.use(func() (err error) {
			list[n.index], err = r.with(f, n)
			return err
		})
		if err != nil {
			list[n.index] = nil
			if !errors.Is(err, errRetired) { // errRetired concerns no NIC
				r.refused.Store(&unknown{n.name, err})
			}
			return err
		}
		if why := r.refused.Load(); why != nil && why.by == n.name {
			r.refused.Store(nil)
		}
	}
	return nil
}

// registration returns the registration of memory, and creates an empty registration if necessary.
// The caller holds mu.
func (f *Fabric) registration(what purpose) *registration {
	r := f.memories[what]
	if r != nil {
		return r
	}
	r = &registration{what: what, base: placeOf(what.memory.At(0)), bytes: what.memory.Bytes, asked: map[*life]bool{},
		steps: map[string][]gdr.Step{}}
	r.flush = f.flushes(what)
	r.regions.Store(&[]*verbs.Region{})
	f.memories[what] = r
	if !what.target {
		i, _ := slices.BinarySearchFunc(f.places, r.base, byBase)
		f.places = slices.Insert(f.places, i, r)
	}
	return r
}

func byBase(r *registration, base uint64) int { return cmp.Compare(r.base, base) }

// close releases the regions of every NIC. The error names the regions that a NIC keeps.
func (r *registration) close() (err error) {
	r.making.Lock()
	defer r.making.Unlock()
	r.over = true
	for _, region := range *r.regions.Load() {
		if region == nil {
			continue
		}
		err = errors.Join(err, region.Close())
	}
	r.regions.Store(&[]*verbs.Region{})
	if err != nil {
		err = fmt.Errorf("memory stays registered with a NIC: %w", err)
	}
	return err
}

// Register registers memory with the group's NICs, as a target, which the peer may write, or as a
// source. Any goroutine may call Register after the negotiation. It blocks.
func (s *QPGroup) Register(m *device.Memory, target bool) error {
	what := purpose{m, target}
	return s.registering(target && s.fabric.flushes(what), func(nics []*nic) error {
		_, err := s.fabric.register(what, nics)
		return err
	})
}

// registering calls register with the group's NICs, and again if a reconnect replaces the NICs
// meanwhile.
func (s *QPGroup) registering(flushed bool, register func([]*nic) error) error {
	for {
		if err := s.noFlush(); flushed && err != nil {
			return err
		}
		nics := s.registers.Load()
		err := register(*nics)
		if s.registers.Load() == nics {
			return err
		}
	}
}

// Known reports whether the group's NICs have registered memory, and begins the registration
// otherwise. It does not block. Known does not repeat a failed registration.
func (s *QPGroup) Known(m *device.Memory, target bool) bool {
	f, what := s.fabric, purpose{m, target}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || s.closed {
		return false
	}
	r := f.registration(what)
	if r.flush && s.noFlush() != nil {
		return false
	}
	if r.known(s.nics) {
		return true
	}
	if slices.ContainsFunc(s.nics, func(n *nic) bool { return !r.asked[n.life] }) {
		for _, n := range s.nics {
			r.asked[n.life] = true
		}
		f.building.Add(1)
		go func() {
			defer f.building.Done()
			f.beside <- struct{}{}
			defer func() { <-f.beside }()
			// Fill only this registration: the memory may be forgotten by now.
			err := s.registering(r.flush, func(nics []*nic) error { return r.fill(f, nics) })
			if err != nil && err != errForgotten {
				logrus.WithError(err).Warn("memory of a client goes through slots: the registration with the NICs failed")
			}
		}()
	}
	return false
}

// registeringAtOnce limits the goroutines that register memory for Known: clients decide the number
// of memories.
const registeringAtOnce = 16

// Forget reverses Register and Known. No NIC reads or writes the memory afterwards, unless the
// error names a NIC with a remaining registration. It blocks.
func (f *Fabric) Forget(m *device.Memory) (err error) {
	for _, target := range []bool{false, true} {
		what := purpose{m, target}
		f.mu.Lock()
		r := f.memories[what]
		delete(f.memories, what)
		f.places = slices.DeleteFunc(f.places, func(other *registration) bool { return other == r })
		if r != nil {
			f.building.Add(1)
			f.closing[r] = true
		}
		closed := f.closed
		f.mu.Unlock()
		switch {
		case r != nil:
			err = errors.Join(err, r.close())
			f.mu.Lock()
			delete(f.closing, r)
			f.mu.Unlock()
			f.building.Done()
		case closed: // Close owns the registration; the memory must stay until Close has released it
			<-f.forgotten
		}
	}
	return err
}

// at returns the source that contains n bytes at a place.
func (f *Fabric) at(p device.Place, n uint64) *registration {
	address := placeOf(p)
	f.mu.Lock()
	defer f.mu.Unlock()
	i, found := slices.BinarySearchFunc(f.places, address, byBase)
	if !found {
		i--
	}
	if i < 0 {
		return nil
	}
	if r := f.places[i]; address-r.base <= r.bytes && n <= r.bytes-(address-r.base) {
		return r
	}
	return nil
}

// endingTime is the maximum wait of a relay's end for negotiations: calls of a connection manager
// have no limit. The kernel releases the rest with the process.
const endingTime = 5 * time.Second

// Close ends RDMA, after the loop. When Close returns, no NIC reads or writes memory, except the
// own memory of a group whose negotiation did not end.
func (f *Fabric) Close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.building.Wait()
	f.mu.Lock()
	memories := f.memories
	f.memories, f.places = nil, nil
	f.mu.Unlock()
	f.building.Wait()
	up := f.raised()
	for s := range f.sets {
		if up || !s.working {
			s.resources.close()
		}
	}
	for _, r := range memories {
		logged(r.close())
	}
	close(f.forgotten)
	if !up {
		logrus.Warnf("queue pairs are still being connected or released after %v; the kernel releases the NICs",
			f.ending)
		return
	}
	f.opening.Lock()
	defer f.opening.Unlock()
	for n := range f.renewed {
		logged(n.domain.Close())
	}
	logged(f.closeQueues())
	for _, n := range f.nics {
		if err := n.close(); err != nil {
			logrus.WithError(err).Warnf("RDMA device %s", n.name)
		}
	}
	f.nics = nil
}

// raised cancels the negotiations and reports whether they ended in time.
func (f *Fabric) raised() bool {
	for s := range f.sets {
		if s.brought != nil {
			s.brought()
		}
	}
	done := make(chan struct{})
	go func() { f.raising.Wait(); close(done) }()
	select {
	case <-done:
		return true
	case <-time.After(f.ending):
		return false
	}
}
