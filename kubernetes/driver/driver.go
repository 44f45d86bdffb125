// Package driver is the DRA driver of lanes: the driver publishes the devices of a node and answers the
// kubelet's calls.
package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/kubernetes/events"
	"github.com/peerlane/peerlane/kubernetes/health"
	"github.com/peerlane/peerlane/kubernetes/lanes"
	"github.com/peerlane/peerlane/topo/planner"
)

// Publisher publishes the devices of the node; kubeletplugin.Helper implements Publisher.
type Publisher interface {
	PublishResources(ctx context.Context, resources resourceslice.DriverResources) error
}

// Config is the configuration of a driver.
type Config struct {
	// Node is the name of the node and of the node's pool.
	Node string
	// PlanFile is the path of the plan.
	PlanFile string
	// Proc is the root of procfs.
	Proc    string
	Version string
	Policy  health.Policy
	// WithoutTaints is for releases whose API has neither taints nor devices for several claims: an
	// unhealthy lane leaves the slice, and the device lanes.Shared is absent.
	WithoutTaints bool
	// Poll is the time between two observations; MinPublish is the shortest time between two
	// updates of the node's slices.
	Poll, MinPublish time.Duration
	// Reporter reports observations as events; nil: none.
	Reporter *events.Reporter
	Log      *logrus.Logger
}

// Driver implements kubeletplugin.DRAPlugin.
type Driver struct {
	config  Config
	monitor *health.Monitor
	// mu guards last and changed.
	mu   sync.Mutex
	last *health.Observation
	// changed is closed by the next observation.
	changed chan struct{}
}

var _ kubeletplugin.DRAPlugin = (*Driver)(nil)

// New returns a driver that observes the host with a monitor.
func New(c Config, m *health.Monitor) *Driver {
	return &Driver{config: c, monitor: m, changed: make(chan struct{})}
}

// Run publishes the devices at the start and after a change, at most once per Config.MinPublish. Run
// returns when the context ends.
func (d *Driver) Run(ctx context.Context, p Publisher) error {
	poll := time.NewTicker(d.config.Poll)
	defer poll.Stop()
	var published []resourceapi.Device
	var at time.Time
	failures := health.Failures{Log: d.config.Log, Message: "Observing the host failed"}
	for {
		devices, err := d.observe()
		failures.Note(err)
		if devices != nil && !equality.Semantic.DeepEqual(devices, published) &&
			(at.IsZero() || time.Since(at) >= d.config.MinPublish) {
			if err := p.PublishResources(ctx, d.resources(devices)); err != nil {
				return fmt.Errorf("publish the lanes of node %s: %w", d.config.Node, err)
			}
			d.config.Log.WithFields(logrus.Fields{"devices": len(devices), "node": d.config.Node}).Info("Published devices")
			published, at = devices, time.Now()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-poll.C:
		}
	}
}

func (d *Driver) resources(devices []resourceapi.Device) resourceslice.DriverResources {
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		d.config.Node: {Slices: []resourceslice.Slice{{Devices: devices}}},
	}}
}

// observe returns the devices of the node, and nil if the host is unreadable: Run then keeps the
// published devices, because a refresh replaces an unreadable plan within seconds, and publishes no
// devices before the first plan. The attribute registration follows a module that is loaded later.
func (d *Driver) observe() ([]resourceapi.Device, error) {
	o, err := d.monitor.Observe()
	if o == nil {
		return nil, err
	}
	d.mu.Lock()
	d.last = o
	close(d.changed)
	d.changed = make(chan struct{})
	d.mu.Unlock()
	if d.config.Reporter != nil {
		d.config.Reporter.Note(o)
	}
	peermem, peermemErr := cdi.FindPeermem(o.Plan.Source.Sysfs, d.config.Proc)
	if peermemErr != nil {
		return nil, errors.Join(err, peermemErr)
	}
	registration, _ := peermem.Registration()
	node := lanes.Node{Plan: o.Plan, Registration: registration, Version: d.config.Version}
	if d.config.WithoutTaints {
		node.Exclusive, node.Withdrawn = true, o.Withdrawn()
	} else {
		node.Taints, node.SharedTaints = d.config.Policy.Taints(o)
	}
	devices := lanes.Devices(node)
	if devices == nil {
		devices = []resourceapi.Device{}
	}
	return devices, err
}

// PrepareResourceClaims answers with the CDI devices of claims. PrepareResourceClaims neither writes
// nor calls an API, so the call is idempotent and survives restarts of kubelet, driver and API server.
func (d *Driver) PrepareResourceClaims(_ context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	plan, err := planner.Read(d.config.PlanFile)
	if err != nil {
		return nil, err
	}
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		devices, err := prepare(plan, claim)
		if err != nil {
			err = fmt.Errorf("prepare claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func prepare(plan *planner.Plan, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim has no allocation")
	}
	var devices []kubeletplugin.Device
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver != lanes.DriverName {
			continue
		}
		name := "auto"
		if r.Device != lanes.Shared {
			busID, known := lanes.BusID(plan, r.Device)
			if !known {
				return nil, fmt.Errorf("device %s of pool %s: the plan of this node has no such lane; delete the pod and its "+
					"claim, so that the scheduler chooses among the present lanes", r.Device, r.Pool)
			}
			name = busID
		}
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{r.Request},
			PoolName:     r.Pool,
			DeviceName:   r.Device,
			CDIDeviceIDs: []string{cdi.KindLane + "=" + name},
			ShareID:      r.ShareID,
		})
	}
	return devices, nil
}

// UnprepareResourceClaims has no effect, because PrepareResourceClaims keeps no state.
func (d *Driver) UnprepareResourceClaims(_ context.Context,
	claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = nil
	}
	return results, nil
}

// HandleError logs errors of background tasks, which the helper retries. No error ends the driver,
// because running pods need the driver.
func (d *Driver) HandleError(_ context.Context, err error, msg string) {
	d.config.Log.WithError(err).Error(msg)
}

// healthTimeout is the time after which the kubelet considers the health of an unreported device
// unknown. healthRefresh is the shortest time between two reports of the same health. A longer
// Config.Poll extends both.
const (
	healthTimeout = time.Minute
	healthRefresh = 15 * time.Second
)

// WatchHealthStatus reports the health of the devices at the start, after a change, and once per
// healthRefresh while observations succeed. The kubelet counts healthTimeout from the arrival of a
// report, so that a report of an old observation would hide that the host is unreadable.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	var sent []kubeletplugin.DeviceHealth
	var reported time.Time // the time of the observation in the last report
	for {
		d.mu.Lock()
		o, changed := d.last, d.changed
		d.mu.Unlock()
		if o != nil && time.Since(o.Time) < d.healthTimeout() {
			devices := d.health(o)
			if o.Time.Sub(reported) >= healthRefresh || !sameHealth(devices, sent) {
				select {
				case reports <- kubeletplugin.DeviceHealthReport{Devices: devices}:
				case <-ctx.Done():
					return nil
				}
				sent, reported = devices, o.Time
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// healthTimeout returns the time after which a health is unknown: three observations at least.
func (d *Driver) healthTimeout() time.Duration { return max(healthTimeout, 3*d.config.Poll) }

func (d *Driver) health(o *health.Observation) []kubeletplugin.DeviceHealth {
	report := func(device string, healthy bool, message string) kubeletplugin.DeviceHealth {
		status := kubeletplugin.HealthStatusHealthy
		if !healthy {
			status = kubeletplugin.HealthStatusUnhealthy
		}
		return kubeletplugin.DeviceHealth{PoolName: d.config.Node, DeviceName: device, Health: status, Message: message,
			LastUpdated: o.Time, HealthCheckTimeout: d.healthTimeout()}
	}
	var devices []kubeletplugin.DeviceHealth
	for _, lane := range o.Plan.Lanes {
		if lane.Role == planner.RoleRefused {
			continue
		}
		devices = append(devices, report(lanes.Name(lane.GPU), o.Healthy(lane.GPU), o.Message(lane.GPU)))
	}
	if len(devices) == 0 || d.config.WithoutTaints {
		return devices
	}
	return append(devices, report(lanes.Shared, o.Usable(), ""))
}

func sameHealth(a, b []kubeletplugin.DeviceHealth) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].DeviceName != b[i].DeviceName || a[i].Health != b[i].Health || a[i].Message != b[i].Message {
			return false
		}
	}
	return true
}
