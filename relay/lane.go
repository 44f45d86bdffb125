package relay

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/stripe"
	"github.com/peerlane/peerlane/relay/wire"
)

// lane is a GPU of the container. A lane allocates nothing before a client needs it.
type lane struct {
	relay *Relay
	spec  launch.Lane

	opening sync.Mutex
	uuid    wire.UUID // set by identity
	known   bool

	// Set once, on the loop and under opening.
	device *device.Device
	push   turns // copies out of client memory
	pull   turns // copies into client memory
	// buffers are those of buffered sends, nil without a sender that uses them; of the loop.
	buffers *buffers
	// maxInPlace is how much memory clients may lend NICs, bytes.
	maxInPlace uint64

	// The same, by openStaging.
	out *staging
	in  *staging
	// remote has the host memory for remote hosts, by openRemote. No slots are made while every
	// connection uses slots on server GPUs.
	remote struct {
		out, in *staging
		placed  placed
		// quotas are for short messages, out and in; nil where there was no room.
		quotas [2]*eagerBuffers
		quoted bool // quotas were made, or had no room
	}
	// registered has the slots on server GPUs for NICs of remote hosts: out and in, or others.
	registered gpuSlots
	// placed lists the places of staging, and the places without room.
	placed []placed
	// inPlaceBytes is the size of client memory in place, bytes; of the loop.
	inPlaceBytes uint64
	// mixed divides grants between client memory in place and slots, per direction of a lane with
	// both; nil for others. It is of the loop.
	mixed struct{ out, in *stripe.Scheduler }

	// preparing is true while a goroutine prepares slots of a direction; of the loop.
	preparing [2]bool
	// copies: clients may copy to the server GPUs themselves; of the loop.
	copies bool
	// serverUsage has the memory of server GPUs for clients that copy; of the loop.
	serverUsage []*serverUsage

	// ended are the figures of the connections that have; of the loop.
	ended directions

	announced string // under opening: the last that was said of missing room
	// Under opening: when there was no room at all, and the error.
	full   time.Time
	noRoom error
}

// identity is the GPU's UUID: the plan's, or the driver's where the plan has
// none.
func (l *lane) identity() (wire.UUID, error) {
	l.opening.Lock()
	defer l.opening.Unlock()
	if l.known {
		return l.uuid, nil
	}
	text := l.spec.GPU.UUID
	if text == "" {
		d, err := l.relay.cuda()
		if err != nil {
			return wire.UUID{}, err
		}
		g, err := d.DeviceByPCIBusID(l.spec.GPU.BusID)
		if err == nil {
			text, err = d.DeviceUUID(g)
		}
		if err != nil {
			return wire.UUID{}, wire.Errorf(wire.StatusNoCUDA, "GPU %s: %w", l.spec.GPU.BusID, err)
		}
	}
	id, err := wire.ParseGPU(text)
	if err != nil {
		return id, wire.Errorf(wire.StatusInternal, "lane of %s: %v", l.spec.GPU.BusID, err)
	}
	l.uuid, l.known = id, true
	return id, nil
}

// open makes the context on the client's GPU, the relay's only context. The call blocks during
// CUDA's work.
func (l *lane) open() error {
	l.opening.Lock()
	defer l.opening.Unlock()
	if l.device != nil {
		return nil
	}
	d, err := l.relay.cuda()
	if err != nil {
		return err
	}
	g, err := device.Open(d, l.spec.GPU.BusID)
	if err != nil {
		return wire.Errorf(wire.StatusNoCUDA, "%w", err)
	}
	var has uint64
	if l.spec.Direct {
		if has, err = d.DeviceTotalMem(g.Ordinal); err != nil {
			return errors.Join(wire.Errorf(wire.StatusNoCUDA, "%w", err), g.Close())
		}
	}
	if err := g.OpenStores(!d.Simulated()); err != nil {
		logrus.WithError(err).Infof("short copies into GPU %s use the driver's calls, and take some 4 µs more",
			l.spec.GPU.BusID)
	}
	if !d.Simulated() { // whose times say nothing
		if err := g.MeasureWrites(); err != nil {
			logrus.WithError(err).Warnf("short copies into GPU %s were not measured; those of up to %d bytes are words",
				l.spec.GPU.BusID, g.Writes().MaxWords)
		}
	}
	push, err := g.NewQueue()
	if err != nil {
		return errors.Join(err, g.Close())
	}
	pull, err := g.NewQueue()
	if err != nil {
		return errors.Join(err, push.Close(), g.Close())
	}
	if !l.relay.loop.Call(func() {
		l.device, l.maxInPlace = g, inPlaceFactor*has
		l.push.add(l.relay.loop, push)
		l.pull.add(l.relay.loop, pull)
	}) {
		return errEnding
	}
	if l.relay.lists.Load() {
		g.PrepareLists()
	}
	return nil
}

// turns are queues that copies are given to in turn, for as many streams. They
// belong to the loop.
type turns struct {
	queues []*device.Queue
	next   int
}

func (t *turns) add(loop *poll.Loop, q *device.Queue) {
	loop.Add(q)
	t.queues = append(t.queues, q)
}

func (t *turns) take() *device.Queue {
	q := t.queues[t.next]
	t.next = (t.next + 1) % len(t.queues)
	return q
}

// streams makes more queues, up to a number per direction. The lane's lock is held.
func (l *lane) streams(n int) error {
	for len(l.push.queues) < n {
		push, err := l.device.NewQueue()
		if err != nil {
			return err
		}
		pull, err := l.device.NewQueue()
		if err != nil {
			return errors.Join(err, push.Close())
		}
		if !l.relay.loop.Call(func() {
			l.push.add(l.relay.loop, push)
			l.pull.add(l.relay.loop, pull)
		}) {
			return errEnding
		}
	}
	return nil
}

// fullPause is how long nothing is tried again where there was no room, however often clients
// connect: a try makes many calls of driver and supervisor.
const fullPause = time.Second

// isStaged reports whether openStaging has nothing more to do.
func (l *lane) isStaged() bool {
	l.opening.Lock()
	defer l.opening.Unlock()
	return l.out != nil
}

// openStaging makes the slots on the server GPUs: as configured, or smaller, or on a further server
// GPU, according to free memory; and where there is none, in the host's memory.
func (l *lane) openStaging() error {
	if err := l.open(); err != nil {
		return err
	}
	if l.isStaged() {
		return nil
	}
	config, err := l.selfTestResult()
	if err != nil {
		return err
	}
	l.opening.Lock()
	defer l.opening.Unlock()
	if l.out != nil {
		return nil
	}
	if time.Since(l.full) < fullPause {
		return l.noRoom
	}
	planned := l.spec.Relay && len(l.spec.Servers) > 0
	if !planned {
		return wire.Errorf(wire.StatusNoStaging, "%w", &fault.Error{Code: fault.NoStaging,
			Operation: fmt.Sprintf("the lane of GPU %s has no server GPU to stage on (role %s)", l.spec.GPU.BusID, l.spec.Role),
			Remedy:    "use route direct, or name servers in [[plan.lane]] of config.toml"}).On(l.spec.GPU.BusID)
	}
	var out, in staging
	var all []placed
	for _, server := range l.spec.Servers {
		all = append(all, l.stageOn(server, l.slotsOn(server.BusID, config.Slots), config, l.create, &out, &in))
	}
	if l.weight("") > 0 && len(out.regions) > 0 && config.Bounce > 0 {
		// A part of the lane is to go through the host's memory.
		if p := l.bounce(size{l.slotsOn("", config.Slots), config.SlotBytes}, config.Bounce, device.CreateHost, &out,
			&in); p.bytes > 0 {
			to, from := out.regions[len(out.regions)-1], in.regions[len(in.regions)-1]
			to.number, from.number = uint32(len(out.regions)-1), uint32(len(in.regions)-1)
			all = append(all, p)
		}
	}
	for _, spare := range l.spec.Spares {
		if len(out.regions) > 0 {
			break
		}
		p := l.stageOn(spare.GPU, config.Slots, config, l.create, &out, &in)
		if p.bytes > 0 {
			p.note = strings.TrimSuffix("it serves in place of the lane's own servers; "+p.note, "; ")
		}
		all = append(all, p)
	}
	l.announce(all, len(out.regions) > 0)
	if len(out.regions) == 0 {
		if !l.relay.loop.Call(func() { l.placed = all }) {
			return errEnding
		}
		lacks := "has room"
		if slices.ContainsFunc(all, func(p placed) bool { return p.unfit }) {
			lacks = "is fit"
		}
		l.full, l.noRoom = time.Now(), wire.Errorf(wire.StatusNoStaging, "%w", &fault.Error{Code: fault.NoStaging,
			Operation: fmt.Sprintf("no server GPU %s to stage for GPU %s", lacks, l.spec.GPU.BusID),
			Cause:     errors.New(notes(all))}).On(l.spec.GPU.BusID)
		return l.noRoom
	}
	most := 1
	for _, p := range all {
		if p.bytes > 0 {
			most = max(most, p.tuning.streams)
		}
	}
	if err := l.streams(most); err != nil {
		logrus.WithError(err).Warnf("copies of GPU %s have fewer streams than the %d that the calibration chose",
			l.spec.GPU.BusID, most)
	}
	l.deal(&out)
	l.deal(&in)
	out.fill()
	in.fill()
	if !l.relay.loop.Call(func() {
		l.out, l.in, l.placed = &out, &in, all
		l.relay.endIfWrong() // what came meanwhile
	}) {
		return errEnding
	}
	logrus.WithFields(logrus.Fields{
		"gpu": l.spec.GPU.BusID, "servers": len(out.regions), "slots": len(out.free),
		"slot": humanize.IBytes(out.regions[0].slotBytes),
	}).Info("staging is ready")
	return nil
}

// openRemote makes the host memory for remote hosts: buffers of short messages, and, on demand, the
// slots, which tcp needs, and verbs without slots on server GPUs. Pages of slots take some 100 ms.
// Buffers that come before slots leave those 4 MiB less of n.Memory.
func (l *lane) openRemote(n *launch.Network, slots bool) error {
	if err := l.open(); err != nil {
		return err
	}
	l.opening.Lock()
	defer l.opening.Unlock()
	if slots && l.remote.out == nil {
		if err := l.openHostSlots(n); err != nil {
			return err
		}
	}
	if l.remote.quoted {
		return nil
	}
	var short [2]*eagerBuffers
	to, from, err := l.inHost(size{eagerQuotas, quotaBytes}, n.Memory, device.CreateHost)
	if err != nil {
		logrus.WithError(err).Warnf("short messages of GPU %s to other hosts wait for grants, as long ones do",
			l.spec.GPU.BusID)
	} else {
		short = [2]*eagerBuffers{newEagerBuffers(to), newEagerBuffers(from)}
	}
	if !l.relay.loop.Call(func() { l.remote.quotas, l.remote.quoted = short, true }) {
		return errEnding
	}
	return nil
}

// openHostSlots makes the slots of openRemote. The lane's lock is held.
func (l *lane) openHostSlots(n *launch.Network) error {
	var out, in staging
	p := l.bounce(size{n.Slots, n.SlotBytes}, n.Memory, device.CreateHuge, &out, &in)
	if p.bytes == 0 {
		return wire.Errorf(wire.StatusNoStaging,
			"the host's memory has no room for the slots of GPU %s for data to other hosts: %s", l.spec.GPU.BusID,
			p.note).On(l.spec.GPU.BusID)
	}
	if p.note != "" {
		logrus.Warnf("the slots of GPU %s for other hosts are not as configured: %s", l.spec.GPU.BusID, p.note)
	}
	out.fill()
	in.fill()
	if !l.relay.loop.Call(func() { l.remote.out, l.remote.in, l.remote.placed = &out, &in, p }) {
		return errEnding
	}
	return nil
}

// reserve allocates staging before a client needs it. After a failure the next connection tries
// again.
func (l *lane) reserve() {
	if !l.spec.Relay {
		return
	}
	err := l.openStaging()
	l.relay.examine(err)
	if err != nil && wire.StatusOf(err) != wire.StatusNoStaging { // which is in the log
		logrus.WithError(err).Errorf("reserving the staging of GPU %s; it is tried again when a client attaches",
			l.spec.GPU.BusID)
	}
}

// placed is the result of a lane's staging on a server GPU, or in host memory.
type placed struct {
	gpu           launch.GPU
	host          bool
	bytes, wanted uint64
	note          string // why it is not as configured
	unfit         bool   // by the self-test
	tuning        calibration
	slots         size   // that there are, in each direction
	pages         string // of slots for sends over TCP (device.Memory.Pages)
}

func notes(all []placed) string {
	var list []string
	for _, p := range all {
		switch {
		case p.note == "":
		case p.host:
			list = append(list, "host memory: "+p.note)
		default:
			list = append(list, fmt.Sprintf("GPU %d (%s): %s", p.gpu.Index, p.gpu.BusID, p.note))
		}
	}
	return strings.Join(list, "; ")
}

// announce logs missing staging once. The lane's lock is held.
func (l *lane) announce(all []placed, some bool) {
	text := notes(all)
	if text == "" || text == l.announced {
		return
	}
	l.announced = text
	if some {
		logrus.Warnf("staging of GPU %s is not as configured: %s", l.spec.GPU.BusID, text)
	} else {
		logrus.Errorf("GPU %s has no staging: %s", l.spec.GPU.BusID, text)
	}
}

// size is that of a region: slots of so many bytes.
type size struct {
	slots     int
	slotBytes uint64
}

// A region is not made smaller than this: with one slot no copy overlaps with a write, and small
// copies are slow. Between two H200 large copies move 395 GB/s, copies of 4 MiB 317 and copies of
// 64 KiB 25.
const (
	minSlots     = 2
	minSlotBytes = 4 << 20
)

// smaller returns the next smaller size, if any.
func (z size) smaller() (size, bool) {
	const granule = 64 << 10 // of slots, as in config.toml
	half := z.slotBytes / 2 / granule * granule
	switch {
	case z.slots > minSlots:
		return size{max(z.slots/2, minSlots), z.slotBytes}, true
	case half >= minSlotBytes:
		return size{z.slots, half}, true
	}
	return z, false
}

// place makes a region per direction on a server GPU: of the size that is wanted, or the largest
// smaller one that there is room for.
func (l *lane) place(server launch.GPU, want size, admission bool, create maker, out, in *staging) placed {
	p := placed{gpu: server, wanted: 2 * uint64(want.slots) * want.slotBytes}
	for z, more := want, true; more; z, more = z.smaller() {
		to, from, err := l.serve(server, z, admission, create)
		if err == nil {
			to.number, from.number = uint32(len(out.regions)), uint32(len(in.regions))
			out.regions, in.regions = append(out.regions, to), append(in.regions, from)
			p.bytes, p.slots = to.memory.Bytes+from.memory.Bytes, z
			if p.note != "" {
				p.note = fmt.Sprintf("%d slots of %s in place of %d of %s: %s",
					z.slots, humanize.IBytes(z.slotBytes), want.slots, humanize.IBytes(want.slotBytes), p.note)
			}
			return p
		}
		if p.note == "" {
			p.note = err.Error() // of what is wanted; the others differ in the number
		}
		if !errors.Is(err, cuda.ErrOutOfMemory) && !errors.Is(err, errNotAdmitted) {
			break // nor would less help
		}
	}
	return p
}

// bounce makes a region per direction in host memory, within a common limit of the relay's lanes:
// of the size that is wanted, or the largest smaller one that there is room for.
func (l *lane) bounce(want size, limit uint64, create hostMaker, out, in *staging) placed {
	p := placed{host: true, wanted: 2 * uint64(want.slots) * want.slotBytes}
	for z, more := want, true; more; z, more = z.smaller() {
		to, from, err := l.inHost(z, limit, create)
		if err == nil {
			out.regions, in.regions = append(out.regions, to), append(in.regions, from)
			p.bytes, p.slots, p.pages = to.memory.Bytes+from.memory.Bytes, z, to.memory.Pages()
			if p.note != "" {
				p.note = fmt.Sprintf("%d slots of %s in place of %d of %s: %s",
					z.slots, humanize.IBytes(z.slotBytes), want.slots, humanize.IBytes(want.slotBytes), p.note)
			}
			return p
		}
		if p.note == "" {
			p.note = err.Error()
		}
	}
	return p
}

// hostMaker is device.CreateHost or device.CreateHuge.
type hostMaker func(name string, bytes uint64) (*device.Memory, error)

// inHost makes a region per direction in host memory.
func (l *lane) inHost(z size, limit uint64, create hostMaker) (out, in *region, err error) {
	r, bytes := l.relay, 2*uint64(z.slots)*z.slotBytes
	if have := r.bounced.Add(bytes); have > limit {
		r.bounced.Add(-bytes)
		return nil, nil, fmt.Errorf("%s more of it would be %s for this relay's lanes, whose limit is %s "+
			"(staging.bounce_limit in config.toml)",
			humanize.IBytes(bytes), humanize.IBytes(have), humanize.IBytes(limit))
	}
	defer func() {
		if err != nil {
			r.bounced.Add(-bytes)
		}
	}()
	if err := r.own.take(bytes, r.name()); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			r.own.release(bytes)
		}
	}()
	if err := r.claims.takeHost(bytes); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			r.claims.releaseHost(bytes)
		}
	}()
	one := func() (*region, error) {
		g := &region{slots: z.slots, slotBytes: z.slotBytes, kind: wire.MemoryHost}
		var err error
		if g.memory, err = create("peerlane-slots", bytes/2); err != nil {
			return nil, err
		}
		if err = g.memory.Pin(l.device); err != nil {
			return nil, errors.Join(err, g.memory.Close())
		}
		return g, nil
	}
	if out, err = one(); err != nil {
		return nil, nil, err
	}
	if in, err = one(); err != nil {
		return nil, nil, errors.Join(err, out.close())
	}
	return out, in, nil
}

// serve makes a region per direction on a server GPU.
func (l *lane) serve(server launch.GPU, z size, admission bool, create maker) (out, in *region, err error) {
	ordinal, id, err := l.server(server)
	if err != nil {
		return nil, nil, err
	}
	if admission {
		release, err := l.claim(server, ordinal, 2, uint64(z.slots)*z.slotBytes)
		if err != nil {
			return nil, nil, err
		}
		defer func() {
			if out == nil {
				release()
			}
		}()
	}
	first, err := makeRegion(ordinal, z, create)
	if err != nil {
		return nil, nil, err
	}
	second, err := makeRegion(ordinal, z, create)
	if err != nil {
		return nil, nil, errors.Join(err, first.close())
	}
	for _, g := range []*region{first, second} {
		g.gpu, g.server = server, id
	}
	return first, second, nil
}

// server finds a server GPU of the plan.
func (l *lane) server(g launch.GPU) (cuda.Device, wire.UUID, error) {
	d := l.device.Driver
	ordinal, err := d.DeviceByPCIBusID(g.BusID)
	if err != nil {
		return 0, wire.UUID{}, err
	}
	uuid, err := d.DeviceUUID(ordinal)
	if err != nil {
		return 0, wire.UUID{}, err
	}
	if g.UUID != "" && g.UUID != uuid {
		return 0, wire.UUID{}, &fault.Error{Code: fault.StaleSpecification, Operation: "use GPU", Object: g.BusID,
			Cause: fmt.Errorf("it is %s now, the plan says %s", uuid, g.UUID), Remedy: "run peerlane cdi refresh"}
	}
	id, err := wire.ParseGPU(uuid)
	return ordinal, id, err
}

// claim requests the admission of equal allocations on a server GPU, and returns an error if
// refused.
func (l *lane) claim(server launch.GPU, ordinal cuda.Device, allocations int,
	each uint64) (release func(), err error) {
	d := l.device.Driver
	memory, err := d.DeviceTotalMem(ordinal)
	if err != nil {
		return nil, err
	}
	granule, err := d.MemGranularity(ordinal)
	if err != nil {
		return nil, err
	}
	bytes := uint64(allocations) * ((each + granule - 1) / granule * granule) // as device.Create rounds
	if err := l.relay.claims.take(server.BusID, bytes, memory); err != nil {
		return nil, err
	}
	return func() { l.relay.claims.release(server.BusID, bytes, memory) }, nil
}

// maker makes memory on a server GPU for the lane's GPU.
type maker func(on cuda.Device, bytes uint64) (*device.Memory, error)

func makeRegion(on cuda.Device, z size, create maker) (*region, error) {
	g := &region{slots: z.slots, slotBytes: z.slotBytes}
	var err error
	g.memory, err = create(on, uint64(z.slots)*z.slotBytes)
	return g, err
}

// create is the maker of memory of cuMemCreate.
func (l *lane) create(on cuda.Device, bytes uint64) (m *device.Memory, err error) {
	err = l.device.On(func() error {
		var err error
		m, err = device.Create(l.device.Driver, on, bytes, cuda.Access{Device: l.device.Ordinal, Write: true})
		return err
	})
	return m, err
}

// region is the staging memory on a server GPU, or in host memory, as slots.
type region struct {
	number    uint32
	kind      uint32 // wire.Memory*
	gpu       launch.GPU
	server    wire.UUID // zero in the host's memory
	memory    *device.Memory
	slots     int
	slotBytes uint64
	// weight is by which the region has its part of the lane's slots' turns, and nics those of
	// NICs for what is in it; nil where all are alike.
	weight  int
	nics    map[string]int
	in, out uint64 // bytes that entered and left, as this relay knows
}

func (g *region) close() error { return g.memory.Close() }
