// Package testbed provides a host to run containers on, in a private directory: this machine's
// GPUs, or a recorded host on the CUDA simulator, with Peerlane's configuration, plan and CDI
// specifications, a fake of the GPU vendor's specification, and software devices as NICs.
// `peerlane demo` and the integration tests use the package.
package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/verbs/softdevice/engine"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/nvml"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/recorded"
)

// Kinds of GPUs of a Host.
const (
	GPUsAuto      = "auto" // real GPUs if the machine has any
	GPUsReal      = "real"
	GPUsSimulated = "simulated"
	GPUsOne       = "simulated-one"  // a single simulated GPU
	GPUsHalf      = "simulated-half" // the GPUs of the half-populated host of the README's picture
	GPUsOfKernel  = "kernel"         // simulated GPUs, on a kernel with PCI devices of GPUs
)

// containers returns the prefix of the names of this host's containers. It is unique, because a
// process may have several hosts, and other processes may have hosts too.
func (h *Host) containers() string {
	f := fnv.New32a()
	f.Write([]byte(h.Root)) // a hash's Write never fails
	return fmt.Sprintf("peerlane-testbed-%d-%08x-", os.Getpid(), f.Sum32())
}

// ContainerID returns the id of a container by its name on this host.
func (h *Host) ContainerID(name string) string { return h.containers() + name }

// Host is a real or simulated machine that runs containers.
type Host struct {
	// Root is the directory of the host, which the caller creates and removes.
	Root   string
	Layout paths.Layout
	// Binaries is the directory of peerlane, peerlane-hook and peerlane-relay.
	Binaries string
	// Words describes the host.
	Words     string
	Simulated bool
	Topology  *topo.Host
	// Config and Plan are the results of Configure.
	Config config.Config
	Plan   *planner.Plan
	// Environment is the environment of processes that use CUDA on the host.
	Environment []string
	// Libraries are the host's files to mount into containers.
	Libraries []string
	// Lanes are the lanes that the next Configure writes to the configuration.
	Lanes []planner.Assignment
	// ClientCopy shows plain processes the server GPUs of their lanes, so that they can copy
	// themselves.
	ClientCopy bool
	// Pace is the rate of a software device in GB/s; 0 means no limit.
	Pace float64
	// Triples are the results of the tests of GPUs and software devices by StartNICs; empty if the
	// self-test is off.
	Triples []launch.Triple

	// rdma is nil without software devices.
	rdma *softdevice.Host
	// key is the cluster key of relays with software devices.
	key []byte
	// down are the software devices whose port is down.
	down []string
	// engine is the last started process of the software devices.
	engine  *nicProcesses
	devRoot string
	proc    string
	simDir  string
}

// Bytes are the counters of a device's log, in bytes.
type Bytes struct{ In, Out uint64 }

// New makes a host below root. gpus is one of the constants above.
func New(root, binaries, gpus string) (*Host, error) {
	h := &Host{Root: root, Layout: paths.New(root), Binaries: binaries}
	if err := h.Layout.Create(); err != nil {
		return nil, err
	}
	if gpus == GPUsOfKernel {
		return h, h.ofKernel()
	}
	if gpus == GPUsHalf {
		return h, h.half()
	}
	if gpus != GPUsSimulated && gpus != GPUsOne {
		err := h.real()
		if err == nil || gpus == GPUsReal {
			return h, err
		}
	}
	return h, h.simulateRecorded(gpus == GPUsOne)
}

// OneGPU reports whether the host has a single GPU: its containers share that GPU, and route
// direct is the only route, because no other GPU can stage for it.
func (h *Host) OneGPU() bool { return len(h.Topology.GPUs) == 1 }

// RuntimeState returns the OCI runtime's own directory.
func (h *Host) RuntimeState() string { return filepath.Join(h.Root, "runtime") }

// CDIDir returns the directory of CDI specifications.
func (h *Host) CDIDir() string { return filepath.Join(h.Root, "cdi") }

// HookBinary returns the path of peerlane-hook.
func (h *Host) HookBinary() string { return filepath.Join(h.Binaries, "peerlane-hook") }

// Configure writes the configuration, edited by change, the plan and the specifications, like an
// administrator and `peerlane cdi generate`.
func (h *Host) Configure(change func(*config.Config)) error {
	h.Config = config.Default()
	h.Config.Relay.Environment = h.Environment
	h.Config.Relay.SandboxRead = h.Libraries
	if h.simDir != "" { // a relay that copies writes the logs of the devices
		h.Config.Relay.SandboxWrite = []string{h.simDir}
	}
	h.Config.Relay.Binary = filepath.Join(h.Binaries, "peerlane-relay")
	h.Config.Plan.Lanes = h.Lanes
	// The self-test copies, and makes contexts on server GPUs, and tests count both. A test of the
	// self-test enables it.
	h.Config.Relay.SelfTest = launch.SelfTestOff
	change(&h.Config)
	if err := h.chooseNICs(&h.Config); err != nil {
		return err
	}
	if err := h.Config.Write(h.Layout.ConfigFile()); err != nil {
		return err
	}
	var err error
	if h.Plan, err = planner.Make(h.Topology, h.Config.PlannerConfig()); err != nil {
		return err
	}
	if err := h.Plan.Write(h.Layout.PlanFile()); err != nil {
		return err
	}
	if h.Software() {
		if err := h.setSoftwareDevices(); err != nil {
			return err
		}
	}
	list, err := cdi.Generate(h.Plan, cdi.Options{
		Layout: h.Layout, HookPath: h.HookBinary(), Tenancy: h.Config.CDI.Tenancy, DevRoot: h.devRoot, Proc: h.proc,
	})
	if err != nil {
		return err
	}
	vendor, err := h.vendorSpec()
	if err != nil {
		return err
	}
	return cdi.Write(h.CDIDir(), append(list, vendor))
}

// Bundle makes a bundle of a program with its libraries, and injects CDI devices.
func (h *Host) Bundle(name string, program bundle.File, devices []string, arguments ...string) (*bundle.Bundle, error) {
	dir := filepath.Join(h.Root, "bundles", name)
	b := bundle.New(dir, append([]string{program.Container}, arguments...)...)
	if err := bundle.RootFS(filepath.Join(dir, "rootfs"), []bundle.File{program}, h.Libraries...); err != nil {
		return nil, err
	}
	if err := b.Inject(h.CDIDir(), devices...); err != nil {
		return nil, err
	}
	return b, b.Write()
}

// Devices returns the CDI devices of a GPU and its lane.
func Devices(g topo.GPU) []string {
	return []string{fmt.Sprintf("nvidia.com/gpu=%d", g.Index), fmt.Sprintf("%s=%d", cdi.KindLane, g.Index)}
}

// DevicesWithServers returns the CDI devices of a container that also sees the lane's server GPUs:
// the vendor's devices, which add the driver's libraries, and peerlane.dev/gpu=.
func DevicesWithServers(g topo.GPU) []string {
	return []string{fmt.Sprintf("nvidia.com/gpu=%d", g.Index), fmt.Sprintf("%s=%d", cdi.KindGPU, g.Index)}
}

// StartNICs starts the process that moves the bytes of software devices, and verifies the GPUs and
// NICs of lanes unless the self-test is off. stop ends the process. Without software devices,
// StartNICs does nothing.
func (h *Host) StartNICs(ctx context.Context, lanes ...planner.Lane) (stop func() error, err error) {
	if !h.Software() {
		return func() error { return nil }, nil
	}
	socket := filepath.Join(h.softwareDir(), engine.SocketName)
	processes := &nicProcesses{host: h}
	err = processes.start(ctx, "the software devices' engine", socket, "software-device", "--socket", socket,
		"--log-level", "warning")
	h.engine = processes
	if err == nil && h.Config.Relay.SelfTest != launch.SelfTestOff {
		h.Triples, err = h.verify(ctx, lanes)
	}
	if err != nil {
		return nil, errors.Join(err, processes.stop())
	}
	return processes.stop, nil
}

// nicProcesses are processes of peerlane-relay that act as NICs.
type nicProcesses struct {
	host    *Host
	started []*exec.Cmd
	sockets []string
}

// start starts a process and waits for its socket.
func (p *nicProcesses) start(ctx context.Context, what, socket string, arguments ...string) error {
	c := exec.CommandContext(ctx, filepath.Join(p.host.Binaries, "peerlane-relay"), arguments...)
	c.Env = append([]string{"PATH=/usr/bin:/bin"}, p.host.Environment...)
	c.Stderr = &bytes.Buffer{}
	c.Cancel, c.WaitDelay = func() error { return c.Process.Signal(syscall.SIGTERM) }, 10*time.Second
	if err := c.Start(); err != nil {
		return err
	}
	p.started, p.sockets = append(p.started, c), append(p.sockets, socket)
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s did not start: %s", what, c.Stderr)
		}
	}
}

func (p *nicProcesses) stop() error {
	var err error
	for _, c := range p.started {
		if signalled := c.Process.Signal(syscall.SIGTERM); !errors.Is(signalled, os.ErrProcessDone) {
			err = errors.Join(err, signalled)
		}
		if ended := c.Wait(); ended != nil {
			err = errors.Join(err, fmt.Errorf("software devices: %w: %s", ended, c.Stderr))
		}
	}
	for _, socket := range p.sockets { // a NIC that was killed leaves its socket
		if removed := os.Remove(socket); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return err
}

// ErrNoGPU is the cause of a measurement on real GPUs on a host without GPUs.
var ErrNoGPU = errors.New("this host has no NVIDIA GPU; use --gpus simulated for the CUDA simulator")

// real makes h this machine, which must have a GPU and a driver.
func (h *Host) real() error {
	topology, err := reader.Sysfs(topo.Options{NVML: nvml.New()})
	if err != nil {
		return err
	}
	if len(topology.GPUs) == 0 {
		return ErrNoGPU
	}
	library, err := driverLibrary()
	if err != nil {
		return err
	}
	h.Topology = topology
	h.Words = fmt.Sprintf("this machine, with %s (%s) and %s", counted(len(topology.GPUs), "GPU"), topology.GPUs[0].Name,
		counted(len(topology.NICs), "RDMA NIC"))
	h.Libraries = []string{library}
	h.Environment = []string{cuda.LibraryVariable + "=" + library}
	plan, err := planner.Make(topology, planner.Config{})
	if err != nil {
		return err
	}
	if len(relayed(plan)) >= 2 || len(topology.GPUs) == 1 {
		return nil
	}
	// No NIC of this host makes a GPU a server, so configure servers beside software devices.
	name := func(i int) string { return topology.GPUs[i].BusID }
	a, serverA, b, serverB := 0, 1, 1, 0
	if len(topology.GPUs) >= 4 {
		a, serverA, b, serverB = 0, 1, 3, 2
	}
	h.Lanes = []planner.Assignment{
		{GPU: name(a), Servers: []string{name(serverA)}, NICs: []string{"software0"}},
		{GPU: name(b), Servers: []string{name(serverB)}, NICs: []string{"software1"}},
	}
	h.Words += "; no NIC makes a GPU a server here, so configuration does, with software devices"
	return nil
}

// counted returns a number with its noun: "1 GPU", "2 GPUs".
func counted(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// driverLibrary returns the path of the driver's library. It loads the library to find the path.
func driverLibrary() (string, error) {
	d, err := cuda.Open()
	if err != nil {
		return "", err
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return "", err
	}
	for _, line := range strings.Split(string(maps), "\n") {
		if f := strings.Fields(line); len(f) == 6 && strings.Contains(filepath.Base(f[5]),
			filepath.Base(strings.TrimSuffix(d.Library(), ".1"))) {
			return f[5], nil
		}
	}
	return "", fmt.Errorf("the CUDA driver's library %s is loaded from no file", d.Library())
}

// simulateRecorded makes h a recorded host on the CUDA simulator, with every GPU or with the first GPU.
func (h *Host) simulateRecorded(one bool) error {
	sysfs, proc, err := recorded.Unpack(filepath.Join(h.Root, "host"))
	if err != nil {
		return err
	}
	topology, err := reader.Sysfs(topo.Options{Sysfs: sysfs, Proc: proc})
	if err != nil {
		return err
	}
	if one {
		topology.GPUs = topology.GPUs[:1]
	}
	h.proc, h.devRoot = proc, filepath.Join(h.Root, "nodes")
	h.Words = fmt.Sprintf("a recorded host with %s and %s, on the CUDA simulator: its figures say nothing about hardware",
		counted(len(topology.GPUs), "GPU"), counted(len(topology.NICs), "NIC"))
	if err := h.simulate(topology); err != nil {
		return err
	}
	return h.makeNodes(h.devRoot)
}

// ofKernel makes h this machine, whose PCI tree has GPUs without hardware: a guest of
// integration/vm. The device nodes remain after the test.
func (h *Host) ofKernel() error {
	topology, err := reader.Sysfs(topo.Options{})
	if err != nil {
		return err
	}
	h.Words = fmt.Sprintf("this kernel's PCIe tree, with %d GPUs and %d NICs, on the CUDA simulator", len(topology.GPUs),
		len(topology.NICs))
	if err := h.simulate(topology); err != nil {
		return err
	}
	return h.makeNodes("/")
}

// simulate makes the CUDA simulator present the GPUs of a topology.
func (h *Host) simulate(topology *topo.Host) error {
	h.simDir = filepath.Join(h.Root, "simulator")
	var devices []sim.Device
	for _, g := range topology.GPUs {
		devices = append(devices, sim.Device{Index: g.Index, Minor: g.Minor, UUID: g.UUID, BusID: g.BusID, Name: g.Name,
			Memory: 16 << 30})
	}
	if err := sim.Write(h.simDir, devices); err != nil {
		return err
	}
	var err error
	if h.Environment, err = sim.Environment(h.simDir); err != nil {
		return err
	}
	library, err := sim.Library()
	if err != nil {
		return err
	}
	h.Simulated = true
	h.Topology = topology
	h.Libraries = []string{library}
	return nil
}

// makeNodes makes fakes of the GPUs' device nodes. CDI requires device nodes: with permission they
// have the GPUs' numbers or those of the null device. Otherwise they are files.
func (h *Host) makeNodes(root string) error {
	names := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for _, g := range h.Topology.GPUs {
		names = append(names, fmt.Sprintf("nvidia%d", g.Minor))
	}
	for _, n := range h.Topology.NICs {
		if n.Uverbs != "" {
			names = append(names, "infiniband/"+n.Uverbs)
		}
	}
	names = append(names, "infiniband/rdma_cm")
	if err := os.MkdirAll(filepath.Join(root, "dev/infiniband"), 0o755); err != nil {
		return err
	}
	for _, name := range names {
		path := filepath.Join(root, "dev", name)
		number := unix.Mkdev(1, 3)
		var minor uint32
		if n, _ := fmt.Sscanf(name, "nvidia%d", &minor); n == 1 {
			number = unix.Mkdev(195, minor) // the hook identifies a GPU by the number, and no process opens the node
		}
		err := unix.Mknod(path, unix.S_IFCHR|0o666, int(number))
		switch {
		case errors.Is(err, unix.EPERM):
			err = os.WriteFile(path, nil, 0o644)
		case errors.Is(err, unix.EEXIST): // the kernel's node of an RDMA device
			err = nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// relayed returns the lanes that stage.
func relayed(p *planner.Plan) []planner.Lane {
	var list []planner.Lane
	for _, l := range p.Lanes {
		if l.Relay {
			list = append(list, l)
		}
	}
	return list
}

// TwoClients returns the lanes of two far GPUs of the plan, with different NICs if possible. On a
// host with one GPU, both lanes are the lane of that GPU.
func (h *Host) TwoClients() (lanes [2]planner.Lane, err error) {
	if !h.OneGPU() {
		return twoOf(h.Plan)
	}
	lane, err := h.Plan.Lane(h.Topology.GPUs[0].BusID)
	if err == nil && lane.Role == planner.RoleRefused {
		err = fmt.Errorf("GPU %s has no lane: %s", lane.GPU, lane.Reason)
	}
	return [2]planner.Lane{lane, lane}, err
}

func twoOf(p *planner.Plan) (lanes [2]planner.Lane, err error) {
	list := relayed(p)
	if len(list) < 2 {
		return lanes, fmt.Errorf("the plan has %d lanes that are relayed; two are needed", len(list))
	}
	lanes[0], lanes[1] = list[0], list[len(list)-1]
	for _, other := range slices.Backward(list[1:]) {
		if !slices.Equal(other.NICs, list[0].NICs) {
			lanes[1] = other
			break
		}
	}
	return lanes, nil
}

// vendorSpec returns a specification like that of the GPU vendor's toolkit.
func (h *Host) vendorSpec() (*specs.Spec, error) {
	s := &specs.Spec{Version: "0.5.0", Kind: "nvidia.com/gpu"}
	shared := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for _, library := range h.Libraries {
		s.ContainerEdits.Mounts = append(s.ContainerEdits.Mounts, readOnly(library))
	}
	s.ContainerEdits.Env = slices.Clone(h.Environment)
	if h.Simulated {
		// The process that copies writes the logs of the devices.
		s.ContainerEdits.Mounts = append(s.ContainerEdits.Mounts,
			&specs.Mount{HostPath: h.simDir, ContainerPath: h.simDir,
				Options: []string{"rw", "bind", "nosuid", "nodev", "noexec"}})
		s.ContainerEdits.Env = append(s.ContainerEdits.Env, "PEERLANE_SIM_VISIBLE=nodes")
	}
	for _, g := range h.Topology.GPUs {
		d := specs.Device{Name: fmt.Sprint(g.Index)}
		for _, name := range append([]string{fmt.Sprintf("nvidia%d", g.Minor)}, shared...) {
			node := &specs.DeviceNode{Path: "/dev/" + name, Permissions: "rw"}
			if h.devRoot != "" {
				node.HostPath = filepath.Join(h.devRoot, "dev", name)
			}
			if _, err := os.Stat(filepath.Join("/", h.devRoot, "dev", name)); err != nil {
				if name == shared[2] {
					continue // some hosts lack the file
				}
				return nil, err
			}
			d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, node)
		}
		s.Devices = append(s.Devices, d)
	}
	return s, nil
}

func readOnly(path string) *specs.Mount {
	return &specs.Mount{HostPath: path, ContainerPath: path, Options: []string{"ro", "bind", "nosuid", "nodev"}}
}

// PlainEnvironment returns the environment of a process outside of a container that sees only one
// GPU. With ClientCopy, the process also gets the device nodes of the lane's servers.
func (h *Host) PlainEnvironment(g topo.GPU) ([]string, error) {
	if !h.Simulated {
		return append(slices.Clone(h.Environment), "CUDA_VISIBLE_DEVICES="+g.UUID), nil
	}
	dir := filepath.Join(h.Root, fmt.Sprintf("dev-of-%d", g.Index))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	var servers []string
	if h.ClientCopy {
		lane, err := h.Plan.Lane(g.BusID)
		if err != nil {
			return nil, err
		}
		servers = lane.Servers
	}
	for _, other := range h.Topology.GPUs {
		if other.BusID != g.BusID && !slices.Contains(servers, other.BusID) {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("nvidia%d", other.Minor)), nil, 0o644); err != nil {
			return nil, err
		}
	}
	return append(slices.Clone(h.Environment), "PEERLANE_SIM_VISIBLE=nodes", "PEERLANE_SIM_DEV="+dir,
		"CUDA_VISIBLE_DEVICES="+g.UUID), nil
}

// Log returns the logged bytes of every simulated device by PCI address; empty on real GPUs.
func (h *Host) Log() (map[string]Bytes, error) {
	if !h.Simulated {
		return nil, nil
	}
	logs, err := sim.ReadLog(h.simDir)
	if err != nil {
		return nil, err
	}
	m := map[string]Bytes{}
	for _, l := range logs {
		m[l.BusID] = Bytes{l.BytesIn, l.BytesOut}
	}
	return m, nil
}
