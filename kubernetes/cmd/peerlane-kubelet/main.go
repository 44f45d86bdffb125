// Command peerlane-kubelet offers the lanes of a node to Kubernetes: as a DRA driver, or as a device
// plugin where the cluster has no DRA.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/kubernetes/deviceplugin"
	"github.com/peerlane/peerlane/kubernetes/driver"
	"github.com/peerlane/peerlane/kubernetes/events"
	"github.com/peerlane/peerlane/kubernetes/health"
	"github.com/peerlane/peerlane/kubernetes/hostinstall"
	"github.com/peerlane/peerlane/kubernetes/lanes"
)

// Modes of the program.
const (
	modeAuto         = "auto"
	modeDRA          = "dra"
	modeMixed        = "mixed"
	modeDevicePlugin = "device-plugin"
)

type options struct {
	mode, node, podUID, kubeconfig, root, kubelet string
	clusterKey                                    string
	units                                         int
	evict                                         bool
	poll, minPublish                              time.Duration
}

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "peerlane-kubelet:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:   "peerlane-kubelet",
		Short: "Offer the lanes of a node to Kubernetes",
		Long: `peerlane-kubelet offers the lanes of this node to Kubernetes. It reads the plan and
the state directory of Peerlane, and opens no GPU, so that it never blocks the unload of a driver.

Mode dra, for Kubernetes 1.36 and later, publishes a DRA device per lane, and the device "lanes"
for "the lanes of the GPUs that the container has"; an unhealthy lane has a taint. Mode mixed, for
Kubernetes 1.34 and 1.35, publishes a DRA device per healthy lane, and offers the extended resource
peerlane.dev/lanes by the device plugin API. Mode device-plugin, for older releases, offers only that
resource. With --mode dra, Kubernetes 1.34 and 1.35 require the feature gates
DRAConsumableCapacity, DRADeviceTaints and DRAExtendedResource.`,
		Example: `  peerlane-kubelet --node-name "$NODE_NAME" --pod-uid "$POD_UID"
  peerlane-kubelet --mode device-plugin --units 16`,
		Args:          cobra.NoArgs,
		Version:       version.Get().Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return run(ctx, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.mode, "mode", modeAuto, "API for lanes: auto, dra, mixed, device-plugin; auto takes the mode for "+
		"the release of the API server, and device-plugin where the server has no resource.k8s.io/v1")
	f.StringVar(&o.node, "node-name", os.Getenv("NODE_NAME"), "name of the node")
	f.StringVar(&o.podUID, "pod-uid", os.Getenv("POD_UID"),
		"UID of this pod, for rolling updates with two instances; empty outside of a pod")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file; empty for the service account of the pod")
	f.StringVar(&o.root, "root", "/", "root of the host: look for var/lib/peerlane and run/peerlane below it")
	f.StringVar(&o.kubelet, "kubelet-dir", "/var/lib/kubelet", "root directory of the kubelet")
	f.StringVar(&o.clusterKey, "cluster-key", "", "copy the cluster key from this file, a mounted Secret, to the host "+
		"after each change; empty: leave the host's key")
	f.IntVar(&o.units, "units", 64, "number of containers with lanes that the device plugin admits")
	f.BoolVar(&o.evict, "evict", false, "end running pods whose lane has lost the network (taint effect NoExecute)")
	f.DurationVar(&o.poll, "poll", 2*time.Second, "time between two observations of the host")
	f.DurationVar(&o.minPublish, "min-publish", 30*time.Second, "shortest time between two updates of the node's slices")
	c.AddCommand(installCommand(), exporterCommand(), explainCommand())
	c.CompletionOptions.DisableDefaultCmd = true
	return c
}

func run(ctx context.Context, o options) error {
	if err := o.check(); err != nil {
		return err
	}
	log := logrus.StandardLogger()
	layout := paths.Layout{Root: o.root}
	mode, client, err := o.choose(log)
	if err != nil {
		return err
	}
	log.WithField("mode", mode).Info("Starting")
	if o.clusterKey != "" {
		go hostinstall.FollowKey(ctx, o.clusterKey, layout.ClusterKey(), o.poll, log)
	}
	if mode == modeDevicePlugin {
		return o.runDevicePlugin(ctx, layout, log)
	}
	if o.node == "" {
		return errors.New("the name of the node is unknown: give --node-name, or set NODE_NAME from spec.nodeName")
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	recorder := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "peerlane-kubelet", Host: o.node})
	d := driver.New(driver.Config{
		Node: o.node, PlanFile: layout.PlanFile(), Proc: filepath.Join(o.root, "proc"),
		Version: strings.TrimPrefix(version.Get().Version, "v"),
		Policy:  health.Policy{Evict: o.evict}, WithoutTaints: mode == modeMixed,
		Poll: o.poll, MinPublish: o.minPublish, Reporter: events.New(recorder), Log: log,
	}, health.NewMonitor(layout, time.Now))
	helper, err := o.start(ctx, d, client)
	if err != nil {
		return fmt.Errorf("start the DRA driver %s: %w", lanes.DriverName, err)
	}
	defer helper.Stop()
	if mode == modeDRA {
		return d.Run(ctx, helper)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- o.runDevicePlugin(ctx, layout, log) }()
	err = d.Run(ctx, helper)
	cancel()
	return errors.Join(err, <-ended)
}

func (o options) runDevicePlugin(ctx context.Context, layout paths.Layout, log *logrus.Logger) error {
	return deviceplugin.New(deviceplugin.Config{
		Dir: filepath.Join(o.kubelet, "device-plugins"), Units: o.units, Poll: o.poll, Log: log,
	}, health.NewMonitor(layout, time.Now)).Run(ctx)
}

// check refuses flag values that no mode can use.
func (o options) check() error {
	switch {
	case o.poll <= 0:
		return &flagError{"--poll", o.poll.String(), "a time above 0"}
	case o.minPublish < 0:
		return &flagError{"--min-publish", o.minPublish.String(), "a time from 0"}
	case o.units < 1:
		return &flagError{"--units", strconv.Itoa(o.units), "a number from 1"}
	}
	return nil
}

// flagError is the error of a flag value that no mode can use.
type flagError struct{ name, value, required string }

func (e *flagError) Error() string {
	return fmt.Sprintf("%s %s: %s is required", e.name, e.value, e.required)
}

// Releases of Kubernetes at which auto changes the mode. By default, the API server of a release before
// minDRA drops AllowMultipleAllocations, so that the device lanes serves one claim of a node, and drops
// the taints of devices and the extended resource of a class. minMixed is the first release with
// resource.k8s.io/v1.
var (
	minDRA   = utilversion.MustParseGeneric("1.36")
	minMixed = utilversion.MustParseGeneric("1.34")
)

// choose returns the mode, and a client if the mode needs a client.
func (o options) choose(log *logrus.Logger) (mode string, client kubernetes.Interface, err error) {
	switch o.mode {
	case modeDevicePlugin:
		return modeDevicePlugin, nil, nil
	case modeAuto, modeDRA, modeMixed:
	default:
		return "", nil, fmt.Errorf("--mode %s: one of auto, dra, mixed, device-plugin is required", o.mode)
	}
	config, err := o.restConfig()
	if err != nil {
		return "", nil, fmt.Errorf("find the API server: %w; give --kubeconfig outside of a pod", err)
	}
	// The default of 5 requests a second delays pods that start together.
	config.QPS, config.Burst = 50, 100
	set, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", nil, err
	}
	if o.mode != modeAuto {
		return o.mode, set, nil
	}
	info, err := set.Discovery().ServerVersion()
	if err != nil {
		return "", nil, fmt.Errorf("ask the API server %s for its release: %w", config.Host, err)
	}
	release, err := emulatedRelease(info)
	if err != nil {
		return "", nil, fmt.Errorf("release of the API server: %w", err)
	}
	if release.LessThan(minMixed) {
		log.WithField("release", release).Infof("The API server is older than %s", minMixed)
		return modeDevicePlugin, nil, nil
	}
	served, err := hasDRA(set.Discovery())
	if err != nil {
		return "", nil, fmt.Errorf("ask the API server %s for resource.k8s.io/v1: %w", config.Host, err)
	}
	if !served {
		log.WithField("release", release).Info("The API server has no resource.k8s.io/v1")
		return modeDevicePlugin, nil, nil
	}
	if release.LessThan(minDRA) {
		log.WithField("release", release).Infof("The API server is older than %s", minDRA)
		return modeMixed, set, nil
	}
	return modeDRA, set, nil
}

// emulatedRelease returns the release whose API a server serves: an API server started with --emulated-version
// has the API of an older release.
func emulatedRelease(info *apiversion.Info) (*utilversion.Version, error) {
	if info.EmulationMajor != "" && info.EmulationMinor != "" {
		return utilversion.ParseGeneric(info.EmulationMajor + "." + info.EmulationMinor)
	}
	return utilversion.ParseGeneric(info.GitVersion)
}

// hasDRA reports whether the API server has resource.k8s.io/v1.
func hasDRA(d discovery.DiscoveryInterface) (bool, error) {
	_, err := d.ServerResourcesForGroupVersion("resource.k8s.io/v1")
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

func (o options) restConfig() (*rest.Config, error) {
	if o.kubeconfig != "" {
		return clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	return rest.InClusterConfig()
}

func (o options) start(ctx context.Context, d *driver.Driver, client kubernetes.Interface) (*kubeletplugin.Helper,
	error) {
	data := filepath.Join(o.kubelet, "plugins", lanes.DriverName)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return nil, err
	}
	with := []kubeletplugin.Option{
		kubeletplugin.DriverName(lanes.DriverName),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(o.node),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(o.kubelet, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(data),
	}
	if o.podUID != "" {
		with = append(with, kubeletplugin.RollingUpdate(types.UID(o.podUID)))
	}
	return kubeletplugin.Start(ctx, d, with...)
}
