package relay

import (
	"errors"
	"fmt"
	"sync"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// lane is one of the container's GPUs. Nothing of it exists before a client
// needs it.
type lane struct {
	relay *Relay
	spec  launch.Lane

	opening sync.Mutex
	uuid    wire.UUID // set by identity
	known   bool

	// Set once, on the loop and under opening.
	device *device.Device
	push   *device.Queue // copies out of client memory
	pull   *device.Queue // copies into client memory

	// The same, by openStaging.
	out *staging
	in  *staging
	// turn picks the NIC of the next connection; of the loop.
	turn int
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
			return wire.UUID{}, wire.Errorf(wire.StatusNoCUDA, "GPU %s: %v", l.spec.GPU.BusID, err)
		}
	}
	id, err := wire.ParseGPU(text)
	if err != nil {
		return id, wire.Errorf(wire.StatusInternal, "lane of %s: %v", l.spec.GPU.BusID, err)
	}
	l.uuid, l.known = id, true
	return id, nil
}

// open makes the context on the client's GPU, the only one that a relay has.
// It blocks for as long as CUDA takes.
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
		return wire.Errorf(wire.StatusNoCUDA, "%v", err)
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
		l.relay.loop.Add(push)
		l.relay.loop.Add(pull)
		l.device, l.push, l.pull = g, push, pull
	}) {
		return errEnding
	}
	return nil
}

// openStaging makes the slots on the server GPUs.
func (l *lane) openStaging() error {
	if err := l.open(); err != nil {
		return err
	}
	var config launch.Config
	if !l.relay.loop.Call(func() { config = l.relay.config }) {
		return errEnding
	}
	l.opening.Lock()
	defer l.opening.Unlock()
	if l.out != nil {
		return nil
	}
	if len(l.spec.Servers) == 0 || !l.spec.Relay {
		return wire.Errorf(wire.StatusNoStaging,
			"the lane of GPU %s has no server GPU to stage on (role %s); use route direct, or name servers in [[plan.lane]] of config.toml",
			l.spec.GPU.BusID, l.spec.Role)
	}
	out, err := newStaging(l, config)
	if err != nil {
		return err
	}
	in, err := newStaging(l, config)
	if err != nil {
		return errors.Join(err, out.close())
	}
	if !l.relay.loop.Call(func() { l.out, l.in = out, in }) {
		return errEnding
	}
	logrus.WithFields(logrus.Fields{
		"gpu": l.spec.GPU.BusID, "servers": len(l.spec.Servers), "slots": config.Slots, "slot": humanize.IBytes(config.SlotBytes),
	}).Info("staging is ready")
	return nil
}

// staging is a lane's slots in one direction, striped over its server GPUs.
type staging struct {
	regions   []*region
	free      []*slot
	slotBytes uint64
	waiting   []func(*slot) bool
}

// region is the staging memory on one server GPU.
type region struct {
	number  uint32
	server  wire.UUID
	memory  *device.Memory
	fd      int    // export, for NICs
	in, out uint64 // bytes that entered and left, as this relay knows
}

type slot struct {
	region *region
	offset uint64
}

func (s *slot) ptr() cuda.Ptr { return s.region.memory.Ptr + cuda.Ptr(s.offset) }

func newStaging(l *lane, config launch.Config) (*staging, error) {
	s := &staging{slotBytes: config.SlotBytes}
	servers := l.spec.Servers
	perServer := (config.Slots + len(servers) - 1) / len(servers)
	for i, server := range servers {
		g, err := s.place(l, server, uint64(perServer)*config.SlotBytes)
		if err != nil {
			return nil, errors.Join(wire.Errorf(wire.StatusNoStaging,
				"staging on server GPU %s (%s): %d slots of %s: %v; lower relay.slots or relay.slot_size in config.toml",
				server.UUID, server.BusID, perServer, humanize.IBytes(config.SlotBytes), err), s.close())
		}
		g.number = uint32(i)
		s.regions = append(s.regions, g)
	}
	// Neighbours in the list lie on different servers.
	for i := range perServer {
		for _, g := range s.regions {
			s.free = append(s.free, &slot{g, uint64(i) * config.SlotBytes})
		}
	}
	return s, nil
}

func (s *staging) place(l *lane, server launch.GPU, bytes uint64) (*region, error) {
	d := l.device.Driver
	ordinal, err := d.DeviceByPCIBusID(server.BusID)
	if err != nil {
		return nil, err
	}
	uuid, err := d.DeviceUUID(ordinal)
	if err != nil {
		return nil, err
	}
	id, err := wire.ParseGPU(uuid)
	if err != nil {
		return nil, err
	}
	if server.UUID != "" && server.UUID != uuid {
		return nil, fmt.Errorf("the GPU at %s is %s now, the plan says %s; run peerlane cdi generate again", server.BusID, uuid, server.UUID)
	}
	g := &region{server: id}
	err = l.device.On(func() error {
		var err error
		g.memory, err = device.Create(d, ordinal, bytes, cuda.Access{Device: l.device.Ordinal, Write: true})
		return err
	})
	if err != nil {
		return nil, err
	}
	if g.fd, err = g.memory.Export(); err != nil {
		return nil, errors.Join(err, g.memory.Close())
	}
	return g, nil
}

func (s *staging) close() error {
	var err error
	for _, g := range s.regions {
		err = errors.Join(err, g.memory.Close(), unix.Close(g.fd))
	}
	return err
}

// acquire gives a slot to f now or when one is free, first come first served.
// f reports false when it does not want the slot any more.
func (s *staging) acquire(f func(*slot) bool) {
	s.waiting = append(s.waiting, f)
	s.hand()
}

func (s *staging) release(free *slot) {
	s.free = append(s.free, free)
	s.hand()
}

func (s *staging) hand() {
	for len(s.free) > 0 && len(s.waiting) > 0 {
		f := s.waiting[0]
		s.waiting = s.waiting[1:]
		next := s.free[0]
		s.free = s.free[1:]
		if !f(next) {
			s.free = append([]*slot{next}, s.free...)
		}
	}
}
