package relay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// A lane's slots on server GPUs for remote hosts: NICs read and write registered slots in place
// (relay/registration). Before slots are made, a small piece of memory shows the working method of
// registration, and the required kind of memory. Without a working method, data bounces through the
// slots in host memory.

// gpuSlots has the results.
type gpuSlots struct {
	deciding sync.Mutex
	// tried has the result for the NICs of a group.
	nics  string
	tried *registration.Registered
	// contexts are on server GPUs, where nvidia-peermem takes memory of cuMemAlloc alone,
	// and the slots in such memory.
	contexts map[cuda.Device]*device.Device
	out, in  *staging
	placed   []placed
	said     map[string]bool
	// refused says why the slots, out and in, could not be registered with some NICs.
	refused [2]refusedSlots
}

// refusedSlots is a failed attempt at the slots of a direction, which pins much memory.
type refusedSlots struct {
	at   time.Time
	nics string
	why  string
}

// lately returns the reason of a recent failed registration of slots with the NICs, for any number
// of connects; empty where it is to be tried.
func (r *refusedSlots) lately(nics string, now time.Time) string {
	if r.nics != nics || now.Sub(r.at) >= fullPause {
		return ""
	}
	return r.why
}

// slotsWay is how the NICs know a connection's slots, for the administrator.
type slotsWay struct {
	way  registration.Way
	text string
}

// bounces says why data goes through slots in the host's memory.
func bounces(why string) slotsWay {
	return slotsWay{registration.Bounce, "bounce: host memory, registered by ibv_reg_mr, without GPUDirect RDMA: " + why}
}

// registrar registers memory with NICs: a group, or the open NICs before the group exists.
type registrar interface {
	NICs() string
	NICNames() []string
	Try(registration.Allocator, uint64) (*registration.Registered, error)
	Register(m *device.Memory, target bool) error
	Steps(m *device.Memory, target bool) []registration.Step
}

// takeGPU makes a connection's data use slots on server GPUs, registered with the NICs of the group, or
// returns the reason of a failure. The error is of a lane that may not bounce (staging.bounce). takeGPU
// may block.
func (r *Relay) takeGPU(c *connection, by *verbs.QPGroup, sends bool) (way slotsWay, onGPU bool, err error) {
	out, in, err := c.lane.slotsFor(by)
	if err == nil {
		way, onGPU = r.takeSlots(c, by, sends, out, in)
		return way, onGPU, nil
	}
	if config, _ := r.configured(); config.Bounce == 0 && wire.StatusOf(err) == wire.StatusNoStaging {
		return way, false, err
	}
	return bounces(err.Error()), false, nil
}

// takeSlots is takeGPU for slots on server GPUs.
func (r *Relay) takeSlots(c *connection, by *verbs.QPGroup, sends bool, out, in *staging) (slotsWay, bool) {
	l := c.lane
	slots, refused := in, &l.registered.refused[1]
	if sends {
		slots, refused = out, &l.registered.refused[0]
	}
	config, ok := r.configured()
	if !ok {
		return bounces(errEnding.Error()), false
	}
	if why := l.unverifiedSlots(config, by, slots, sends); why != "" {
		return bounces(why), false
	}
	g := &l.registered
	g.deciding.Lock()
	lately := refused.lately(by.NICs(), time.Now())
	g.deciding.Unlock()
	if lately != "" {
		return bounces(lately), false
	}
	var steps []registration.Step
	for _, on := range slots.regions {
		if err := by.Register(on.memory, !sends); err != nil {
			why := err.Error()
			for _, s := range by.Steps(on.memory, !sends) { // all that was tried, err is of the last
				if s.Err != nil && !strings.Contains(why, s.Err.Error()) {
					why = s.String() + "; " + why
				}
			}
			why = fmt.Sprintf("the slots on GPU %s cannot be registered: %s", on.gpu.BusID, why)
			g.deciding.Lock()
			*refused = refusedSlots{time.Now(), by.NICs(), why}
			g.deciding.Unlock()
			return bounces(why), false
		}
		steps = append(steps, by.Steps(on.memory, !sends)...)
	}
	c.out, c.in = out, in
	return registered(steps), true
}

// unverifiedSlots returns the reason why NICs may not access slots of a direction; empty if the tests of
// all have passed.
func (l *lane) unverifiedSlots(config launch.Config, by registrar, slots *staging, sends bool) string {
	for _, on := range slots.regions {
		if on.memory.Host() { // a member of the lane, which no GPU serves
			continue
		}
		if why := l.unverified(config, on.gpu, l.carriers(by.NICNames(), sends)); why != "" {
			return why
		}
	}
	return ""
}

// registered returns the slots' worst method of registration, with the errors of better methods.
func registered(steps []registration.Step) slotsWay {
	w, kind := registration.DMABuf, registration.VMM
	var refused []string
	told := map[registration.Step]bool{}
	for _, s := range steps {
		if s.Err != nil {
			text := s.String()
			if s.Err = nil; !told[s] { // of one region; the others are like it
				told[s], refused = true, append(refused, text)
			}
			continue
		}
		w, kind = max(w, s.Way), s.Kind
	}
	text := fmt.Sprintf("%s: slots on server GPUs, memory of %s, registered by %v: GPUDirect RDMA", w.Word(), kind, w)
	if len(refused) > 0 {
		text += "; refused was " + strings.Join(refused, "; ")
	}
	return slotsWay{w, text}
}

// slotsFor returns the slots for the NICs of a group, or the reason of their absence. slotsFor may block.
func (l *lane) slotsFor(by registrar) (out, in *staging, err error) {
	switch {
	case l.spec.Direct && !l.spec.Relay:
		return nil, nil, errors.New(noMemoryInPlace)
	case !l.spec.Relay || len(l.spec.Servers) == 0:
		return nil, nil, fmt.Errorf("the plan has no server GPU for this lane (role %s)", l.spec.Role)
	}
	g := &l.registered
	g.deciding.Lock()
	defer g.deciding.Unlock()
	if nics := by.NICs(); g.nics != nics {
		tried, err := l.try(by)
		if errors.Is(err, cuda.ErrOutOfMemory) {
			if none := l.openStaging(); none != nil { // it reports each GPU
				err = none
			}
		}
		if err != nil {
			return nil, nil, err
		}
		g.nics, g.tried = nics, tried
	}
	switch {
	case g.tried.Way() == registration.Bounce:
		return nil, nil, errors.New(g.tried.String())
	case g.tried.Kind == registration.Allocated:
		return l.openAllocated()
	}
	if err := l.openStaging(); err != nil {
		return nil, nil, err
	}
	if l.out.regions[0].memory.Host() {
		return nil, nil, errors.New("no server GPU has room for slots, or is fit for them")
	}
	return l.out, l.in, nil
}

// try finds the method of registration for memory of the lane's first server GPU, or, without room,
// of the next server GPU or a spare.
func (l *lane) try(by registrar) (tried *registration.Registered, err error) {
	if err := l.open(); err != nil {
		return nil, err
	}
	servers := slices.Clone(l.spec.Servers)
	for _, spare := range l.spec.Spares {
		servers = append(servers, spare.GPU)
	}
	for _, server := range servers {
		if tried, err = l.tryOn(by, server); !errors.Is(err, cuda.ErrOutOfMemory) {
			break
		}
	}
	if kept := err; errors.Is(kept, verbs.ErrKept) {
		l.relay.loop.Do(func() { l.relay.wear(kept) })
	}
	return tried, err
}

func (l *lane) tryOn(by registrar, server launch.GPU) (*registration.Registered, error) {
	on, _, err := l.server(server)
	if err != nil {
		return nil, err
	}
	tried, err := by.Try(registration.GPU{Asks: l.device, On: on,
		Own: func() (*device.Device, error) { return l.contextOn(on) }}, 1)
	if err == nil && (tried.Way() == registration.Bounce || tried.Kind != registration.Allocated) &&
		l.registered.out == nil {
		err = l.closeContexts()
	}
	return tried, err
}

// peermem are the modules that have NICs register a GPU's addresses.
var peermem = []string{"nvidia_peermem", "nv_peer_mem"}

// contextOn makes a context on a server GPU, once, whose memory the lane's GPU reaches. The context
// takes some 265 MiB there, so it is made only if a module can use it. The lock is held.
func (l *lane) contextOn(on cuda.Device) (*device.Device, error) {
	g := &l.registered
	if have := g.contexts[on]; have != nil {
		return have, nil
	}
	d := l.device.Driver
	there := d.Simulated()
	for _, module := range peermem {
		_, err := os.Stat(filepath.Join("/sys/module", module))
		there = there || err == nil
	}
	if !there {
		return nil, errors.New("nvidia-peermem is not loaded (modprobe nvidia-peermem)")
	}
	bus, err := d.DevicePCIBusID(on)
	if err != nil {
		return nil, err
	}
	made, err := device.Open(d, bus)
	if err != nil {
		return nil, err
	}
	err = l.device.On(func() error { return d.CtxEnablePeerAccess(made.Context()) })
	if err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
		return nil, errors.Join(err, made.Close())
	}
	if g.contexts == nil {
		g.contexts = map[cuda.Device]*device.Device{}
	}
	g.contexts[on] = made
	return made, nil
}

func (l *lane) closeContexts() (err error) {
	for on, made := range l.registered.contexts {
		err = errors.Join(err, made.Close())
		delete(l.registered.contexts, on)
	}
	return err
}

// openAllocated makes the slots in memory of cuMemAlloc, on every fit server GPU with room. The
// lock is held.
func (l *lane) openAllocated() (out, in *staging, err error) {
	g := &l.registered
	if g.out != nil {
		return g.out, g.in, nil
	}
	config, err := l.selfTestResult()
	if err != nil {
		return nil, nil, err
	}
	l.opening.Lock()
	defer l.opening.Unlock()
	allocate := func(on cuda.Device, bytes uint64) (*device.Memory, error) {
		own, err := l.contextOn(on)
		if err != nil {
			return nil, err
		}
		return own.Allocate(bytes)
	}
	out, in = &staging{}, &staging{}
	var all []placed
	for _, server := range l.spec.Servers {
		all = append(all, l.stageOn(server, l.slotsOn(server.BusID, config.Slots), config, allocate, out, in))
	}
	if len(out.regions) == 0 {
		return nil, nil, fmt.Errorf("no server GPU has room for slots in memory of cuMemAlloc, or is fit for them: %s",
			notes(all))
	}
	l.deal(out)
	l.deal(in)
	out.fill()
	in.fill()
	if !l.relay.loop.Call(func() {
		g.out, g.in, g.placed = out, in, all
		l.relay.endIfWrong() // what came meanwhile
	}) {
		return nil, nil, errEnding
	}
	return out, in, nil
}

// pools returns the slots of the lane; of the loop.
func (l *lane) pools() (list []*staging) {
	for _, s := range []*staging{l.out, l.in, l.registered.out, l.registered.in, l.remote.out, l.remote.in} {
		if s != nil {
			list = append(list, s)
		}
	}
	return list
}

// maxLoggedSlots limits the remembered log lines.
const maxLoggedSlots = 64

// logSlots logs by which way a lane's data goes through NICs, once for each.
func (l *lane) logSlots(w slotsWay) {
	g := &l.registered
	g.deciding.Lock()
	defer g.deciding.Unlock()
	if g.said[w.text] {
		return
	}
	if g.said == nil || len(g.said) == maxLoggedSlots {
		g.said = map[string]bool{}
	}
	g.said[w.text] = true
	to := logrus.WithField("gpu", l.spec.GPU.BusID)
	if w.way == registration.DMABuf {
		to.Infof("data to and from other hosts by RDMA: %s", w.text)
		return
	}
	to.Warn(&fault.Error{Code: fault.NotRegistered,
		Operation: "data to and from other hosts by RDMA is not registered by DMA-BUF", Cause: errors.New(w.text)})
}

// unordered reports whether a NIC's writes into memory need a flush before a GPU reads the memory.
// The client's GPU reads a server GPU's slots. Client memory, which NICs write in place, is read by
// the owner.
func (r *Relay) unordered(m *device.Memory) bool {
	d, err := r.cuda()
	if err != nil {
		return true
	}
	_, _, inPlace := m.Lease()
	ordering, err := d.DeviceAttribute(m.On, cuda.AttributeRDMAWritesOrdering)
	return registration.NeedsFlush(ordering, err, inPlace)
}

// stages reports whether NICs may have to write into a GPU's memory for a lane: into its server
// GPUs', or its own.
func (r *Relay) stages() (does bool) {
	r.loop.Call(func() {
		for _, l := range r.lanes {
			does = does || l.spec.Relay && len(l.spec.Servers) > 0 || l.spec.Direct
		}
	})
	return does
}

// current runs f with the context of a lane current.
func (r *Relay) current(f func() error) error {
	var on *device.Device
	r.loop.Call(func() {
		for _, l := range r.lanes {
			if on == nil {
				on = l.device
			}
		}
	})
	if on == nil {
		return f()
	}
	return on.On(f)
}

// least is the length of the shortest slot, bytes: the maximum of a write.
func (s *staging) least() uint64 {
	least := s.regions[0].slotBytes
	for _, g := range s.regions {
		least = min(least, g.slotBytes)
	}
	return least
}
