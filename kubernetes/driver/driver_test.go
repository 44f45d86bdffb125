package driver

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/health"
	"github.com/peerlane/peerlane/kubernetes/lanes"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// recorder is a Publisher that sends each update on a channel.
type recorder chan resourceslice.DriverResources

func (r recorder) PublishResources(ctx context.Context, all resourceslice.DriverResources) error {
	select {
	case r <- all:
	case <-ctx.Done():
	}
	return nil
}

func newDriver(t *testing.T, c Config) (*Driver, paths.Layout) {
	layout := paths.Layout{Root: t.TempDir()}
	if err := os.MkdirAll(layout.State(), 0o755); err != nil {
		t.Fatal(err)
	}
	writePlan(t, layout, "0000:01:00.0", "0000:02:00.0")
	log := logrus.New()
	log.SetOutput(io.Discard)
	c.Node, c.PlanFile, c.Log, c.Poll = "n1", layout.PlanFile(), log, 5*time.Millisecond
	c.Proc = filepath.Join(layout.Root, "proc")
	return New(c, health.NewMonitor(layout, time.Now)), layout
}

func writePlan(t *testing.T, layout paths.Layout, gpus ...string) {
	t.Helper()
	plan := &planner.Plan{Version: planner.Version, Source: topo.Source{Sysfs: filepath.Join(layout.Root, "sys")}}
	for i, bus := range gpus {
		plan.GPUs = append(plan.GPUs, topo.GPU{Index: i, BusID: bus})
		plan.Lanes = append(plan.Lanes, planner.Lane{GPU: bus, Role: planner.RoleFar, Servers: []string{}, NICs: []string{},
			Rail: -1})
	}
	if err := plan.Write(layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
}

func claim(name string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "jobs", Name: name, UID: types.UID(name)}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, d := range devices {
		driver, device, _ := strings.Cut(d, "/")
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "of-" + device, Driver: driver, Pool: "n1", Device: device})
	}
	return c
}

func TestPrepareAnswersWithTheCDIDevicesOfItsOwnDriver(t *testing.T) {
	d, layout := newDriver(t, Config{})
	before := tree(t, layout.Root)
	claims := []*resourceapi.ResourceClaim{
		claim("pair", "gpu.nvidia.com/gpu-1", lanes.DriverName+"/"+lanes.Name("0000:02:00.0")),
		claim("shared", "gpu.nvidia.com/gpu-0", "gpu.nvidia.com/gpu-1", lanes.DriverName+"/"+lanes.Shared),
		claim("gone", lanes.DriverName+"/lane-0000-09-00-0"),
	}
	for range 2 { // a second call returns the same answer
		got, err := d.PrepareResourceClaims(t.Context(), claims)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[types.UID]string{"pair": "peerlane.dev/lane=0000:02:00.0",
			"shared": "peerlane.dev/lane=auto"} {
			r := got[name]
			if r.Err != nil || len(r.Devices) != 1 || !slices.Equal(r.Devices[0].CDIDeviceIDs, []string{want}) ||
				r.Devices[0].PoolName != "n1" {
				t.Errorf("%s: %+v, and %s was expected", name, r, want)
			}
		}
		if r := got["gone"]; r.Err == nil || len(r.Devices) != 0 {
			t.Errorf("a lane that the plan lacks: %+v", r)
		}
	}
	undone, err := d.UnprepareResourceClaims(t.Context(),
		[]kubeletplugin.NamespacedObject{{UID: "pair"}, {UID: "never-prepared"}})
	if err != nil || len(undone) != 2 || undone["pair"] != nil || undone["never-prepared"] != nil {
		t.Errorf("%v, %v", undone, err)
	}
	if after := tree(t, layout.Root); !slices.Equal(before, after) {
		t.Errorf("Prepare changed the files %v to %v", before, after)
	}
}

func tree(t *testing.T, root string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		all = append(all, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// run runs the driver until the test ends.
func run(t *testing.T, d *Driver) recorder {
	r := make(recorder)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx, r) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return r
}

func names(all resourceslice.DriverResources) (names []string) {
	for _, d := range all.Pools["n1"].Slices[0].Devices {
		names = append(names, d.Name)
	}
	return names
}

func TestChangedPlanIsPublished(t *testing.T) {
	d, layout := newDriver(t, Config{})
	r := run(t, d)
	if got := names(<-r); !slices.Equal(got, []string{"lanes", "lane-0000-01-00-0", "lane-0000-02-00-0"}) {
		t.Errorf("the devices are %v", got)
	}
	writePlan(t, layout, "0000:02:00.0")
	if got := names(<-r); !slices.Equal(got, []string{"lanes", "lane-0000-02-00-0"}) {
		t.Errorf("the devices are %v", got)
	}
}

func TestUnreadableHostKeepsThePublishedDevices(t *testing.T) {
	for _, file := range []string{"plan", "osrelease"} {
		d, layout := newDriver(t, Config{})
		if devices, err := d.observe(); len(devices) != 3 || err != nil {
			t.Fatalf("%d devices, %v", len(devices), err)
		}
		path := layout.PlanFile()
		if file == "osrelease" {
			path = filepath.Join(d.config.Proc, "sys/kernel/osrelease")
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if devices, err := d.observe(); devices != nil || err == nil {
			t.Errorf("%s: %d devices, %v", file, len(devices), err)
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		writePlan(t, layout, "0000:02:00.0")
		if devices, err := d.observe(); len(devices) != 2 || err != nil {
			t.Errorf("%s: %d devices after the error, %v", file, len(devices), err)
		}
	}
}

func TestDevicesFollowALaterPlanAndModule(t *testing.T) {
	d, layout := newDriver(t, Config{})
	if err := os.Remove(layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
	if devices, err := d.observe(); devices != nil || err == nil {
		t.Fatalf("%d devices without a plan, %v", len(devices), err)
	}
	r := run(t, d)
	writePlan(t, layout, "0000:01:00.0")
	registration := func() string {
		return *(<-r).Pools["n1"].Slices[0].Devices[1].Attributes[lanes.AttributeRegistration].StringValue
	}
	if got := registration(); got != "bounce" {
		t.Errorf("without a module the registration is %s", got)
	}
	if err := os.MkdirAll(filepath.Join(layout.Root, "sys/module/nvidia_peermem"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := registration(); got != "peermem" {
		t.Errorf("with nvidia_peermem the registration is %s", got)
	}
}

func TestDrainIsPublishedAsTaintAndRemoved(t *testing.T) {
	d, layout := newDriver(t, Config{})
	r := run(t, d)
	tainted := func() bool {
		all := (<-r).Pools["n1"].Slices[0].Devices
		for _, device := range all {
			if len(device.Taints) != len(all[0].Taints) {
				t.Errorf("%s has the taints %v", device.Name, device.Taints)
			}
		}
		return len(all[0].Taints) == 1 && all[0].Taints[0].Key == "peerlane.dev/drain" &&
			all[0].Taints[0].Effect == resourceapi.DeviceTaintEffectNoSchedule
	}
	if tainted() {
		t.Error("the first update has the taint")
	}
	if err := generation.DrainAll(layout); err != nil {
		t.Fatal(err)
	}
	if !tainted() {
		t.Error("a drained host has no taint")
	}
	if err := generation.ResumeAll(layout); err != nil {
		t.Fatal(err)
	}
	if tainted() {
		t.Error("the taint stayed")
	}
}

func TestDrainWithoutTaintsWithdrawsTheLanes(t *testing.T) {
	d, layout := newDriver(t, Config{WithoutTaints: true})
	r := run(t, d)
	published := func(want ...string) {
		t.Helper()
		all := <-r
		if got := names(all); !slices.Equal(got, want) {
			t.Errorf("the devices are %v instead of %v", got, want)
		}
		for _, device := range all.Pools["n1"].Slices[0].Devices {
			if len(device.Taints) > 0 || device.AllowMultipleAllocations != nil {
				t.Errorf("the release does not know all fields of %+v", device)
			}
		}
	}
	published("lane-0000-01-00-0", "lane-0000-02-00-0")
	if err := generation.DrainAll(layout); err != nil {
		t.Fatal(err)
	}
	published()
	if err := generation.ResumeAll(layout); err != nil {
		t.Fatal(err)
	}
	published("lane-0000-01-00-0", "lane-0000-02-00-0")
}

// timed is a recorder that records the begin and the end of each update.
type timed struct {
	recorder
	begun, ended []time.Time
}

func (p *timed) PublishResources(ctx context.Context, all resourceslice.DriverResources) error {
	p.begun = append(p.begun, time.Now())
	defer func() { p.ended = append(p.ended, time.Now()) }()
	return p.recorder.PublishResources(ctx, all)
}

func TestUpdatesKeepTheirDistance(t *testing.T) {
	const distance = 100 * time.Millisecond
	d, layout := newDriver(t, Config{MinPublish: distance})
	p := &timed{recorder: make(recorder)}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx, p) }()
	for i := range 4 {
		<-p.recorder
		change := generation.DrainAll
		if i%2 == 1 {
			change = generation.ResumeAll
		}
		if err := change(layout); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for i := range p.begun[1:4] {
		if got := p.begun[i+1].Sub(p.ended[i]); got < distance {
			t.Errorf("update %d follows after %s", i+1, got)
		}
	}
}

func TestHealthFollowsTheDrain(t *testing.T) {
	d, layout := newDriver(t, Config{})
	r := run(t, d)
	<-r
	reports := make(chan kubeletplugin.DeviceHealthReport)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.WatchHealthStatus(ctx, reports) }()
	expect := func(want kubeletplugin.HealthStatus) {
		t.Helper()
		for report := range reports {
			if len(report.Devices) != 3 {
				t.Fatalf("%d devices", len(report.Devices))
			}
			if report.Devices[0].Health == want && report.Devices[2].Health == want {
				return
			}
		}
	}
	expect(kubeletplugin.HealthStatusHealthy)
	if err := generation.DrainAll(layout); err != nil {
		t.Fatal(err)
	}
	<-r
	expect(kubeletplugin.HealthStatusUnhealthy)
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestHealthIsReportedOnlyFromNewObservations(t *testing.T) {
	d, layout := newDriver(t, Config{})
	good, err := os.ReadFile(layout.PlanFile())
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		reports := make(chan kubeletplugin.DeviceHealthReport)
		watch := func() func() {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- d.WatchHealthStatus(ctx, reports) }()
			return func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		}
		observe := func(plan []byte) {
			t.Helper()
			if err := os.WriteFile(layout.PlanFile(), plan, 0o644); err != nil {
				t.Fatal(err)
			}
			if devices, _ := d.observe(); (devices != nil) != (len(plan) > 1) {
				t.Fatalf("%d devices", len(devices))
			}
		}
		expect := func(when string, observed time.Time) {
			t.Helper()
			synctest.Wait()
			var got time.Time
			select {
			case r := <-reports:
				got = r.Devices[0].LastUpdated
			default:
			}
			if !got.Equal(observed) {
				t.Errorf("%s: the report has the time %s, and %s was expected", when, got, observed)
			}
		}
		none, begin := time.Time{}, time.Now()
		observe(good)
		stop := watch()
		expect("at the start", begin)
		time.Sleep(healthRefresh - 1)
		observe(good)
		expect("before healthRefresh", none)
		time.Sleep(time.Nanosecond)
		observe(good)
		expect("after healthRefresh", begin.Add(healthRefresh))
		time.Sleep(2 * healthRefresh)
		observe([]byte("{"))
		expect("without an observation", none)
		time.Sleep(2 * healthRefresh)
		stop()
		stop = watch()
		expect("at a new watch with an old observation", none)
		observe(good)
		expect("after the host is readable again", begin.Add(5*healthRefresh))
		if err := generation.DrainAll(layout); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Nanosecond)
		observe(good)
		expect("after a change", begin.Add(5*healthRefresh+1))
		stop()
	})
}
