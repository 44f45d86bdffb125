// Package verbs is the transport between relays of two hosts over RDMA (InfiniBand, RoCE,
// iWARP).
//
// A tcp.Peer stays beside it: trust, channels, messages and death are its. A Set is what
// two relays have between them: reliable connected queue pairs, some for each two NICs,
// which all channels share. The sender writes with an immediate, the ticket that the
// receiver gave with a grant; a write has arrived when every queue pair that carries a
// part of it has delivered that. Whoever has a ticket finds a receive posted: there is no
// more of them than of those.
//
// What the other relay says on the control stream is taken for a stranger's. What it
// writes the NIC checks, and that only by memory and its key: who was granted a place in it,
// or guesses the key, can write all of it for as long as it is registered and the queue pairs
// are there. What is only sent from is registered so that nobody can write it.
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

// Config is what a relay uses of RDMA.
type Config struct {
	launch.Verbs
	// NICs gives the names of those of the relay's lanes, as in /sys/class/infiniband. Any
	// goroutine calls it.
	NICs func() []string
	// Off says why there is none; then the other side is told so.
	Off string
	// Library is libibverbs, where it is another one: of tests.
	Library string
	// Slots is how much memory a lane registers at least, bytes: a NIC that cannot is not
	// used.
	Slots uint64
	// Flush tells of a GPU's memory whether what NICs have written has to be flushed before
	// it is used; nil where there is none. Any goroutine calls it.
	Flush func(*device.Memory) bool
	// Stages tells whether lanes stage on GPUs, so that NICs may write there at all. Any
	// goroutine calls it.
	Stages func() bool
	// Current runs a function with a CUDA context current, as the registering of a GPU's
	// memory needs; nil for one that needs none. Any goroutine calls it.
	Current func(func() error) error
	// Ports are where the connection manager listens, all where it is zero.
	Ports address.Ports
	// Addresses are the host's, where they are others: of tests.
	Addresses func() ([]netip.Addr, error)
	// Time is how long the two sides may take to connect their queue pairs (SettleTime).
	Time time.Duration
	// Redial is the time for new queue pairs after a fault (Verbs.ReconnectLimit).
	Redial time.Duration
	// PortWait is the time that a port without a link has before its queue pairs are given up (5 s).
	PortWait time.Duration
	// minPairPart is the shortest part of a write for one of several queue pairs of a link, bytes; 0 for a
	// MiB. Both relays need the same: tests have parts of short writes.
	minPairPart uint64
	// earlier has the other relay be of a version before tcp.PartsVersion, for tests.
	earlier bool
}

// SettleTime is how long it takes at most, unless Config says otherwise, until it is
// settled how a Peer's data goes.
const SettleTime = 10 * time.Second

// Fabric is what a relay has of RDMA: NICs, which are opened when they are first needed,
// memory that is registered with all of them, and a Set for each Peer.
type Fabric struct {
	loop   *poll.Loop
	config Config

	opening sync.Mutex
	nics    []*nic // under opening; also those that have died

	mu       sync.Mutex
	closed   bool
	memories map[purpose]*registration
	closing  map[*registration]bool // those that are being given back
	places   []*registration        // sources, by address
	// forgotten is closed when Close has given back all memory.
	forgotten chan struct{}
	domains
	completions

	direct   atomic.Bool    // a NIC has Data Direct
	beside   chan struct{}  // of who registers memory for Known
	building sync.WaitGroup // what registers memory beside the loop
	raising  sync.WaitGroup // what brings Sets up, or gives back what did not come up
	ending   time.Duration  // how long Close waits for that
	sets     map[*Set]bool  // of the loop, those that are not over
	ports    map[*nic]int   // of the loop: how often NICs' ports have come or gone
	back     time.Duration  // backTime
}

// New makes a relay's, without any NIC yet.
func New(loop *poll.Loop, config Config) *Fabric {
	if config.Time == 0 {
		config.Time = SettleTime
	}
	if config.Addresses == nil {
		config.Addresses = hostAddresses
	}
	if config.Redial == 0 {
		config.Redial = time.Duration(cmp.Or(config.ReconnectLimit, launch.DefaultVerbs.ReconnectLimit)) * time.Second
	}
	if config.PortWait == 0 {
		config.PortWait = portWait
	}
	f := &Fabric{
		loop: loop, config: config, ending: endingTime, memories: map[purpose]*registration{},
		closing: map[*registration]bool{}, forgotten: make(chan struct{}),
		domains: domains{renewed: map[*nic]bool{}}, beside: make(chan struct{}, registeringAtOnce), sets: map[*Set]bool{},
		ports: map[*nic]int{}, back: backTime, completions: completions{shared: map[*verbs.Context][]*completionQueue{},
			processors: runtime.NumCPU()},
	}
	loop.Add(f)
	return f
}

// nic is an open NIC, and its port.
type nic struct {
	name    string
	index   int // among those that the Fabric has now
	opened  int // how many were opened before it; of those that take its place, too
	context *verbs.Context
	domain  *verbs.Domain
	life    *life // the domain's
	port    uint8
	is      verbs.Port
	gid     verbs.GID
	limits  verbs.Attributes
	// cm is what connects its queue pairs, nil where that is done by their numbers.
	cm *managed
	// direct: it has a Data Direct function, which registers GPUs' memory.
	direct bool
	// sends: it has no write with an immediate.
	sends bool
	// software: it is a software device of package softdevice.
	software bool
	// dead: it is gone, or was reset. It is opened anew, as another one.
	dead *atomic.Bool
	// changes counts the events that its addresses have changed, and seen those before is and
	// gid were asked for.
	changes *atomic.Uint32
	seen    uint32
}

func unreachable(format string, arguments ...any) error {
	return wire.Errorf(wire.StatusUnreachable, format, arguments...)
}

// open opens the NICs that the lanes have now, once, and again those that have died: a lane
// that comes later goes by the same. Where none can be had the reason says so of each, and
// it is tried again the next time. It blocks.
func (f *Fabric) open() ([]*nic, error) {
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
	case f.nics == nil:
		names = f.config.NICs()
		names = names[:min(len(names), maxCards)]
	}
	if len(nics) == 0 && len(names) == 0 {
		return nil, unreachable("the lanes of this container have no NIC")
	}
	if len(names) == 0 {
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
	for _, text := range why {
		logrus.Warn(&fault.Error{Code: fault.NICLeftOut, Operation: "RDMA goes without a NIC", Cause: errors.New(text)})
	}
	return nics, nil
}

// active are the NICs whose port is active now, as it is now. It blocks.
func (f *Fabric) active() (nics []*nic, err error) {
	all, err := f.open()
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

// portInactive is the reason of a refusal that passes. The other relay tells it as text.
const portInactive = "no port is active"

// PortActive reports whether a NIC of this relay has an active port now. It blocks.
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
		return nil, fmt.Errorf("%s: there is no such device, or no provider of rdma-core for it", name)
	}
	n := &nic{name: name, dead: &atomic.Bool{}, changes: &atomic.Uint32{}, life: &life{}, software: library.Software()}
	switch devices[i].Transport {
	case verbs.IB:
		n.context, err = library.OpenDevice(name)
	case verbs.IWARP:
		n.sends = true
		n.cm, n.context, err = openManaged(library, name, config)
	default:
		err = fmt.Errorf("%s: it speaks %s; InfiniBand, RoCE and iWARP can be used", name, devices[i].Transport)
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

// chooseGID is what packets come from: the GID of an index, or the best where it is negative.
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

// try has the NIC register memory once: what a limit of locked memory forbids is to be
// known before anybody relies on it.
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
	// roceQueuePairs spread data over the paths that switches choose by hash.
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

// mtu is what the port and the configuration have. Both sides have to come to the same for
// a link, so the other one is told this.
func (n *nic) mtu(config launch.Verbs) verbs.MTU {
	if most, ok := verbs.MTUOf(config.MTU); ok {
		return min(n.is.MTU, most)
	}
	return n.is.MTU
}

func (n *nic) card(config launch.Verbs) card {
	c := card{GID: n.gid.GID, LID: n.is.LID, Layer: layerEthernet, MTU: uint8(n.mtu(config))}
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

// at is what others reach it by.
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

// Report is what the administrator is told; nil where no NIC was needed yet, or while they
// are being opened. It belongs to the loop.
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

// purpose is what memory is registered for: only that which was granted can be written by
// the other side.
type purpose struct {
	memory *device.Memory
	target bool
}

// access returns the rights to memory that the other side writes, or that is sent from. The order of
// writes is free, unless Verbs.RelaxedOrdering is off: the immediate tells that all have arrived.
func (f *Fabric) access(target bool) verbs.Access {
	return gdr.Access(target, f.config.RelaxedOrdering)
}

// registration is memory that NICs know, the host's or a GPU's.
type registration struct {
	what        purpose
	base, bytes uint64
	flush       bool // what has been written is flushed
	// regions are by NIC, nil of one that does not know it. What is in it changes no more.
	regions atomic.Pointer[[]*verbs.Region]
	asked   map[*life]bool          // by Known, of which NICs; under the Fabric's mu
	refused atomic.Pointer[unknown] // the last error of a NIC that does not know it; nil for none

	making sync.Mutex            // held by whom registers it, or gives it back
	over   bool                  // under making
	steps  map[string][]gdr.Step // of a GPU's, by NIC; the same
}

// unknown is why a NIC does not know memory. Another of the same name takes its place when
// queue pairs are connected anew.
type unknown struct {
	by  string
	err error
}

// region is what a NIC knows it by, nil for nothing.
func (r *registration) region(n *nic) *verbs.Region {
	if list := *r.regions.Load(); n.index < len(list) {
		return list[n.index]
	}
	return nil
}

// known reports whether all of some NICs know it.
func (r *registration) known(nics []*nic) bool {
	return !slices.ContainsFunc(nics, func(n *nic) bool { return r.region(n) == nil })
}

// register makes memory known to those NICs that do not know it. It blocks; what is
// registered already takes no time.
func (f *Fabric) register(what purpose, nics []*nic) (*registration, error) {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return nil, unreachable("the relay is ending")
	}
	f.building.Add(1)
	defer f.building.Done()
	r := f.registration(what)
	f.mu.Unlock()
	return r, r.fill(f, nics)
}

// errForgotten is of memory that is not to be registered any more.
var errForgotten = wire.Errorf(wire.StatusInternal, "memory is being taken back")

// fill has NICs know a registration's memory. One that was forgotten meanwhile stays empty:
// its memory may be gone. It blocks.
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
			if !errors.Is(err, errRetired) { // which is of no NIC
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

// registration finds memory's, or begins one. It needs the lock.
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

// close has NICs forget it, or says which still know it.
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

// Register makes memory known to the Set's NICs, as a target, which the other side may
// write, or as a source. Any goroutine may call it once the Set is settled. It blocks.
func (s *Set) Register(m *device.Memory, target bool) error {
	what := purpose{m, target}
	return s.registering(target && s.fabric.flushes(what), func(nics []*nic) error {
		_, err := s.fabric.register(what, nics)
		return err
	})
}

// registering has the Set's NICs know memory, and those that take their place meanwhile.
func (s *Set) registering(flushed bool, register func([]*nic) error) error {
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

// Known reports whether the Set's NICs know memory, and has it registered where they do not:
// it does not block. What could not be is not tried again.
func (s *Set) Known(m *device.Memory, target bool) bool {
	f, what := s.fabric, purpose{m, target}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || s.over {
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
			// That one and no other: when this runs the memory may have been forgotten.
			err := s.registering(r.flush, func(nics []*nic) error { return r.fill(f, nics) })
			if err != nil && err != errForgotten {
				logrus.WithError(err).Warn("memory of a client goes through slots: it cannot be registered with the NICs")
			}
		}()
	}
	return false
}

// registeringAtOnce bounds the threads that wait for NICs on behalf of Known: clients say how
// many memories it is asked about.
const registeringAtOnce = 16

// Forget ends Register, and Known: no NIC reads or writes the memory any more, unless the
// error says that one still knows it. It blocks.
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
		case closed: // Close has it, and its memory may not go before
			<-f.forgotten
		}
	}
	return err
}

// at finds the source that n bytes at a place are in.
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

// endingTime is how long a relay that ends waits for what brings queue pairs up, which a
// connection manager keeps as long as it likes. The kernel takes those with the process.
const endingTime = 5 * time.Second

// Close ends all RDMA, after the loop: when it returns no NIC reads or writes any memory but
// what a Set has that did not come up, and that is its own.
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
			s.plumbing.close()
		}
	}
	for _, r := range memories {
		logged(r.close())
	}
	close(f.forgotten)
	if !up {
		logrus.Warnf("queue pairs are still being connected, or given back, after %v; the NICs are left to the kernel",
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

// raised ends the bringing up, and reports whether that was in time.
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
