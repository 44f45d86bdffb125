// Package deviceplugin offers lanes by the kubelet's device plugin API, for releases of Kubernetes
// without DRA.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/kubernetes/health"
)

// Resource is the extended resource of pods: a unit gives a container the lanes of the container's
// GPUs.
const Resource = cdi.Vendor + "/lanes"

// socket is the name of the plugin's socket, in the kubelet's directory of device plugins.
const socket = "peerlane-lanes.sock"

// Config is the configuration of a plugin.
type Config struct {
	// Dir is the kubelet's directory of device plugins with kubelet.sock.
	Dir string
	// Units is the limit on containers with lanes on the node.
	Units int
	// Poll is the time between two observations of the host and of the plugin's socket, which a
	// kubelet removes when it starts.
	Poll time.Duration
	Log  *logrus.Logger
}

// Plugin serves the kubelet's device plugin API. Units are interchangeable: the hook gives a container
// the lanes of the container's GPUs.
type Plugin struct {
	api.UnimplementedDevicePluginServer
	config   Config
	monitor  *health.Monitor
	failures health.Failures
	// mu guards healthy and changed.
	mu sync.Mutex
	// healthy is the present health of every unit, false before the first observation.
	healthy bool
	// changed is closed by the next change of healthy.
	changed chan struct{}
}

// New returns a plugin that observes the host with a monitor.
func New(c Config, m *health.Monitor) *Plugin {
	return &Plugin{config: c, monitor: m, changed: make(chan struct{}),
		failures: health.Failures{Log: c.Log, Message: "Observing the host failed"}}
}

// Run serves and registers the plugin until the context ends. A restarted kubelet removes the
// sockets of plugins; Run then registers the plugin again.
func (p *Plugin) Run(ctx context.Context) error {
	failures := health.Failures{Log: p.config.Log, Message: "The kubelet does not take the device plugin; trying again"}
	for ctx.Err() == nil {
		failures.Note(p.serve(ctx))
		select {
		case <-ctx.Done():
		case <-time.After(p.config.Poll):
		}
	}
	return nil
}

// serve runs one registration until the kubelet removes the socket or the context ends.
func (p *Plugin) serve(ctx context.Context) error {
	path := filepath.Join(p.config.Dir, socket)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	defer func() { server.Stop(); <-served }()
	p.observe()
	if err := p.register(ctx); err != nil {
		return fmt.Errorf("register %s with the kubelet: %w", Resource, err)
	}
	p.config.Log.WithField("resource", Resource).Info("Registered with the kubelet")
	own, err := os.Stat(path)
	if err != nil {
		return err
	}
	poll := time.NewTicker(p.config.Poll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-poll.C:
		}
		if now, err := os.Stat(path); err != nil || !os.SameFile(own, now) {
			return nil // the kubelet has restarted
		}
		p.observe()
	}
}

func (p *Plugin) register(ctx context.Context) error {
	conn, err := grpc.NewClient("unix:"+filepath.Join(p.config.Dir, filepath.Base(api.KubeletSocket)),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(conn).Register(ctx,
		&api.RegisterRequest{Version: api.Version, Endpoint: socket, ResourceName: Resource})
	return err
}

// observe notes whether a lane of the host is usable. Without an observation no lane is usable.
func (p *Plugin) observe() {
	o, err := p.monitor.Observe()
	p.failures.Note(err)
	healthy := o != nil && o.Usable()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.healthy != healthy {
		p.healthy = healthy
		close(p.changed)
		p.changed = make(chan struct{})
	}
}

// GetDevicePluginOptions returns the options without optional calls.
func (p *Plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch sends the units at the start and after a change of health.
func (p *Plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		p.mu.Lock()
		healthy, changed := p.healthy, p.changed
		p.mu.Unlock()
		if err := stream.Send(&api.ListAndWatchResponse{Devices: p.units(healthy)}); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

func (p *Plugin) units(healthy bool) []*api.Device {
	state := api.Healthy
	if !healthy {
		state = api.Unhealthy
	}
	units := make([]*api.Device, p.config.Units)
	for i := range units {
		units[i] = &api.Device{ID: "lanes-" + strconv.Itoa(i), Health: state}
	}
	return units
}

// Allocate answers with the device lane=auto per container.
func (p *Plugin) Allocate(_ context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	out := &api.AllocateResponse{}
	for range r.ContainerRequests {
		out.ContainerResponses = append(out.ContainerResponses, &api.ContainerAllocateResponse{
			CdiDevices: []*api.CDIDevice{{Name: cdi.KindLane + "=auto"}},
		})
	}
	return out, nil
}
