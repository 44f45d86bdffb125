// Package health observes the conditions of a node's lanes: ports of NICs, the plan, and the drain
// of relays.
package health

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/lanes"
	"github.com/peerlane/peerlane/topo/planner"
)

// Condition is the key of a taint.
type Condition string

// Conditions of a lane.
const (
	// NoNetwork: the ports of the lane's NICs have been inactive for Delay.
	NoNetwork Condition = lanes.DriverName + "/no-network"
	// Degraded: a NIC of the lane lacks an active port, or the lane bounces through host memory.
	Degraded Condition = lanes.DriverName + "/degraded"
	// Drain: `peerlane relay drain` released the host's GPUs.
	Drain Condition = lanes.DriverName + "/drain"
)

// Delay is the time without an active port after which a lane has the condition NoNetwork. A flap of
// a link is shorter.
const Delay = 30 * time.Second

// Conditions maps the conditions of a lane to their causes.
type Conditions map[Condition]string

// Observation is the state of a node at a point in time.
type Observation struct {
	// Time is the time of the observation.
	Time time.Time
	Plan *planner.Plan
	// Lanes has the conditions of lanes by the PCI address of the GPU. Lanes without a condition
	// are absent.
	Lanes map[string]Conditions
	// Relays has the failures of relays, by the PCI addresses of the container's GPUs.
	Relays map[string][]string
	// Pods has the pods of living containers with a lane, by the PCI address of the lane's GPU.
	Pods map[string][]generation.Pod
	// Drained reports whether `peerlane relay drain` is in effect.
	Drained bool
}

// Monitor observes a host. Monitor is not safe for concurrent use.
type Monitor struct {
	layout paths.Layout
	now    func() time.Time
	// inactive has the time at which the last active port of a NIC went down, by the NIC's name.
	inactive map[string]time.Time
}

// NewMonitor returns a monitor of the host below a layout's root. now returns the time.
func NewMonitor(l paths.Layout, now func() time.Time) *Monitor {
	return &Monitor{layout: l, now: now, inactive: map[string]time.Time{}}
}

// Observe reads plan, ports, drain and relays. The observation is nil if the plan or the mark of the
// drain is unreadable: an observation without the mark would lift the drain. Unreadable relays are part
// of the error, and readable relays of the observation.
func (m *Monitor) Observe() (*Observation, error) {
	plan, err := planner.Read(m.layout.PlanFile())
	if err != nil {
		return nil, err
	}
	drained, err := generation.AllDrained(m.layout)
	if err != nil {
		return nil, err
	}
	o := &Observation{Time: m.now(), Plan: plan, Lanes: map[string]Conditions{}, Relays: map[string][]string{},
		Pods: map[string][]generation.Pod{}, Drained: drained != nil}
	m.observePorts(plan)
	for _, lane := range plan.Lanes {
		if c := m.conditions(lane, o.Drained); len(c) > 0 {
			o.Lanes[lane.GPU] = c
		}
	}
	return o, m.observeRelays(o)
}

// observePorts notes when NICs of the plan lost the last active port.
func (m *Monitor) observePorts(plan *planner.Plan) {
	now := m.now()
	known := map[string]bool{}
	for _, lane := range plan.Lanes {
		for _, nic := range lane.NICs {
			known[nic] = true
			if active(plan.Source.Sysfs, nic) {
				delete(m.inactive, nic)
			} else if _, was := m.inactive[nic]; !was {
				m.inactive[nic] = now
			}
		}
	}
	maps.DeleteFunc(m.inactive, func(nic string, _ time.Time) bool { return !known[nic] })
}

// active reports whether a port of a NIC is active. A port without a state file counts as active:
// software devices lack the file. A state file that exists and fails to be read is not active: the file
// asks the NIC's driver, which answers for a NIC that carries data.
func active(sysfs, nic string) bool {
	ports := filepath.Join(sysfs, "class/infiniband", nic, "ports")
	entries, err := os.ReadDir(ports)
	if err != nil {
		_, err = os.Stat(filepath.Join(sysfs, "class/infiniband"))
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, e := range entries {
		state, err := os.ReadFile(filepath.Join(ports, e.Name(), "state"))
		if errors.Is(err, fs.ErrNotExist) || err == nil && strings.Contains(string(state), "ACTIVE") {
			return true
		}
	}
	return false
}

func (m *Monitor) conditions(lane planner.Lane, drained bool) Conditions {
	c := Conditions{}
	var down []string
	for _, nic := range lane.NICs {
		if since, inactive := m.inactive[nic]; inactive && m.now().Sub(since) >= Delay {
			down = append(down, nic)
		}
	}
	switch {
	case len(down) > 0 && len(down) == len(lane.NICs):
		c[NoNetwork] = "no active port on " + strings.Join(down, ", ")
	case len(down) > 0:
		c[Degraded] = "no active port on " + strings.Join(down, ", ")
	case lane.Kind == planner.KindBounce:
		c[Degraded] = "the lane goes through host memory"
	}
	if drained {
		c[Drain] = "peerlane relay drain"
	}
	return c
}

func (m *Monitor) observeRelays(o *Observation) error {
	infos, err := generation.List(m.layout)
	for _, info := range infos {
		if info.Pod != nil && info.Alive {
			for _, lane := range info.Config.Lanes {
				o.Pods[lane.GPU.BusID] = append(o.Pods[lane.GPU.BusID], *info.Pod)
			}
		}
		if info.Status.State != generation.StateDown {
			continue
		}
		for _, lane := range info.Config.Lanes {
			o.Relays[lane.GPU.BusID] = append(o.Relays[lane.GPU.BusID],
				fmt.Sprintf("the relay of container %.12s is down: %s", info.Container.ID, info.Status.Error))
		}
	}
	return err
}

// Policy maps conditions to taints.
type Policy struct {
	// Evict gives NoNetwork the effect NoExecute: Kubernetes evicts running pods.
	Evict bool
}

func (p Policy) effect(c Condition) resourceapi.DeviceTaintEffect {
	switch {
	case c == Degraded:
		return resourceapi.DeviceTaintEffectNone
	case c == NoNetwork && p.Evict:
		return resourceapi.DeviceTaintEffectNoExecute
	}
	return resourceapi.DeviceTaintEffectNoSchedule
}

// Taints returns the taints of lanes and of the device lanes.Shared. Shared has NoNetwork if every
// lane has NoNetwork; otherwise Degraded if a lane has NoNetwork or Degraded.
func (p Policy) Taints(o *Observation) (ofLanes map[string][]resourceapi.DeviceTaint,
	shared []resourceapi.DeviceTaint) {
	ofLanes = map[string][]resourceapi.DeviceTaint{}
	all := Conditions{}
	for _, lane := range o.Plan.Lanes {
		if lane.Role == planner.RoleRefused {
			continue
		}
		c := o.Lanes[lane.GPU]
		ofLanes[lane.GPU] = p.taints(c)
		_, cut := c[NoNetwork]
		if _, less := c[Degraded]; less || cut {
			all[Degraded] = ""
		}
	}
	if !o.connected() && len(ofLanes) > 0 {
		delete(all, Degraded)
		all[NoNetwork] = ""
	}
	if o.Drained {
		all[Drain] = ""
	}
	return ofLanes, p.taints(all)
}

func (p Policy) taints(c Conditions) []resourceapi.DeviceTaint {
	var taints []resourceapi.DeviceTaint
	for _, condition := range slices.Sorted(maps.Keys(c)) {
		taints = append(taints, resourceapi.DeviceTaint{Key: string(condition), Effect: p.effect(condition)})
	}
	return taints
}

// Withdrawn returns the lanes that the slice of a release without taints omits: the lanes that a
// taint would close to new pods. The keys are the PCI addresses of the GPUs.
func (o *Observation) Withdrawn() map[string]bool {
	lanes := map[string]bool{}
	for gpu, c := range o.Lanes {
		_, cut := c[NoNetwork]
		_, drained := c[Drain]
		if cut || drained {
			lanes[gpu] = true
		}
	}
	return lanes
}

// Message returns the conditions of a lane and the failures of relays on the lane's GPU in a line,
// empty for a healthy lane.
func (o *Observation) Message(gpu string) string {
	var parts []string
	for _, condition := range slices.Sorted(maps.Keys(o.Lanes[gpu])) {
		parts = append(parts, o.Lanes[gpu][condition])
	}
	return strings.Join(append(parts, o.Relays[gpu]...), "; ")
}

// Usable reports whether containers can use a lane of the host now.
func (o *Observation) Usable() bool { return !o.Drained && o.connected() }

// connected reports whether a lane that the plan does not refuse is without NoNetwork.
func (o *Observation) connected() bool {
	return slices.ContainsFunc(o.Plan.Lanes, func(lane planner.Lane) bool {
		_, cut := o.Lanes[lane.GPU][NoNetwork]
		return lane.Role != planner.RoleRefused && !cut
	})
}

// Healthy reports whether containers can use the lane of a GPU now.
func (o *Observation) Healthy(gpu string) bool {
	_, cut := o.Lanes[gpu][NoNetwork]
	_, drained := o.Lanes[gpu][Drain]
	return !cut && !drained && len(o.Relays[gpu]) == 0
}
