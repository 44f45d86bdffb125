package deviceplugin

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/health"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// kubelet is the kubelet's side of the device plugin API.
type kubelet struct {
	api.UnimplementedRegistrationServer
	dir        string
	server     *grpc.Server
	registered chan *api.RegisterRequest
}

func (k *kubelet) Register(_ context.Context, r *api.RegisterRequest) (*api.Empty, error) {
	k.registered <- r
	return &api.Empty{}, nil
}

// start removes the sockets of plugins, as a kubelet does, and serves.
func (k *kubelet) start(t *testing.T) {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(k.dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sockets {
		os.Remove(s)
	}
	listener, err := net.Listen("unix", filepath.Join(k.dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	k.server = grpc.NewServer()
	api.RegisterRegistrationServer(k.server, k)
	go k.server.Serve(listener)
	t.Cleanup(k.server.Stop)
}

func (k *kubelet) plugin(t *testing.T, r *api.RegisterRequest) api.DevicePluginClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+filepath.Join(k.dir, r.Endpoint),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return api.NewDevicePluginClient(conn)
}

// newHost returns a host with one lane.
func newHost(t *testing.T) paths.Layout {
	t.Helper()
	layout := paths.Layout{Root: t.TempDir()}
	if err := os.MkdirAll(layout.State(), 0o755); err != nil {
		t.Fatal(err)
	}
	plan := &planner.Plan{Version: planner.Version, Source: topo.Source{Sysfs: filepath.Join(layout.Root, "sys")},
		GPUs:  []topo.GPU{{BusID: "0000:01:00.0"}},
		Lanes: []planner.Lane{{GPU: "0000:01:00.0", Role: planner.RoleFar, Servers: []string{}, NICs: []string{}, Rail: -1}}}
	if err := plan.Write(layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
	return layout
}

// startPlugin runs a plugin on a new host.
func startPlugin(t *testing.T) (*kubelet, paths.Layout) {
	layout := newHost(t)
	return runPlugin(t, layout), layout
}

// runPlugin runs a plugin until the test ends.
func runPlugin(t *testing.T, layout paths.Layout) *kubelet {
	k := &kubelet{dir: t.TempDir(), registered: make(chan *api.RegisterRequest)}
	k.start(t)
	log := logrus.New()
	log.SetOutput(io.Discard)
	p := New(Config{Dir: k.dir, Units: 3, Poll: 10 * time.Millisecond, Log: log}, health.NewMonitor(layout, time.Now))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return k
}

func TestAllocateGivesEachContainerTheLanesOfItsGPUs(t *testing.T) {
	k, _ := startPlugin(t)
	r := <-k.registered
	if r.ResourceName != "peerlane.dev/lanes" || r.Version != api.Version {
		t.Errorf("the plugin registers %v", r)
	}
	requests := []*api.ContainerAllocateRequest{{DevicesIds: []string{"lanes-0"}}, {DevicesIds: []string{"lanes-1"}}}
	out, err := k.plugin(t, r).Allocate(t.Context(), &api.AllocateRequest{ContainerRequests: requests})
	if err != nil {
		t.Fatal(err)
	}
	if len(out.ContainerResponses) != 2 {
		t.Fatal(out)
	}
	for _, c := range out.ContainerResponses {
		if len(c.CdiDevices) != 1 || c.CdiDevices[0].Name != "peerlane.dev/lane=auto" {
			t.Errorf("a container gets %v", c)
		}
	}
}

func TestEveryStreamGetsAChangeOfHealth(t *testing.T) {
	k, layout := startPlugin(t)
	plugin := k.plugin(t, <-k.registered)
	var streams []grpc.ServerStreamingClient[api.ListAndWatchResponse]
	for range 3 {
		stream, err := plugin.ListAndWatch(t.Context(), &api.Empty{})
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, stream)
	}
	expect := func(want string) {
		t.Helper()
		for _, stream := range streams {
			if got, err := stream.Recv(); err != nil || got.Devices[0].Health != want {
				t.Fatalf("%v, %v; %s was expected", got, err, want)
			}
		}
	}
	expect(api.Healthy)
	if err := generation.DrainAll(layout); err != nil {
		t.Fatal(err)
	}
	expect(api.Unhealthy)
	if err := generation.ResumeAll(layout); err != nil {
		t.Fatal(err)
	}
	expect(api.Healthy)
}

func TestDrainBeforeTheStartMakesTheFirstUnitsUnhealthy(t *testing.T) {
	layout := newHost(t)
	if err := generation.DrainAll(layout); err != nil {
		t.Fatal(err)
	}
	k := runPlugin(t, layout)
	stream, err := k.plugin(t, <-k.registered).ListAndWatch(t.Context(), &api.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := stream.Recv(); err != nil || got.Devices[0].Health != api.Unhealthy {
		t.Errorf("%v, %v", got, err)
	}
}

func TestDrainedHostMakesUnitsUnhealthy(t *testing.T) {
	k, layout := startPlugin(t)
	stream, err := k.plugin(t, <-k.registered).ListAndWatch(t.Context(), &api.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	expect := func(want string) {
		t.Helper()
		for {
			got, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Devices) != 3 {
				t.Fatalf("%d units", len(got.Devices))
			}
			if got.Devices[2].Health == want {
				return
			}
		}
	}
	expect(api.Healthy)
	if err := generation.DrainAll(layout); err != nil {
		t.Fatal(err)
	}
	expect(api.Unhealthy)
	if err := generation.ResumeAll(layout); err != nil {
		t.Fatal(err)
	}
	expect(api.Healthy)
}

func TestRestartedKubeletGetsANewRegistration(t *testing.T) {
	k, _ := startPlugin(t)
	<-k.registered
	for range 3 {
		k.server.Stop()
		k.start(t)
		r := <-k.registered
		if _, err := k.plugin(t, r).GetDevicePluginOptions(t.Context(), &api.Empty{}); err != nil {
			t.Error(err)
		}
	}
}
