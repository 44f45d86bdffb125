package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/nvml"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/recorded"
)

// made is a fake host in a directory: the recorded host with everything that checks examine. The
// host has no fault until a test changes it, and again after undo.
type made struct {
	t    *testing.T
	root string
	fake fake
	// generations is the result of generation.List, and staged of staging.StagingByGPU.
	generations []generation.Info
	generateErr error
	staged      map[string]uint64
	// answer is the answer of relays.
	answer control.Answer
	// between runs between two readings of counters.
	between func()
	undone  []func()
}

// fake is a fake NVML.
type fake struct {
	gpus   []topo.NVMLGPU
	health nvml.Health
	err    error
}

func (f *fake) GPUs() ([]topo.NVMLGPU, error) { return f.gpus, f.err }
func (f *fake) Health() (nvml.Health, error)  { return f.health, f.err }

// Devices of the recorded host.
const (
	nic0 = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1a:00.0"
	nic1 = "sys/devices/pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:02.0/0000:9c:00.0"
	ib0  = nic0 + "/infiniband/mlx5_0"
	ib1  = nic1 + "/infiniband/mlx5_1"
	// far is a GPU under a host bridge without a NIC, and near is a GPU beside mlx5_0.
	near = "0000:18:00.0"
	far  = "0000:3a:00.0"
	boot = "6c1a2f0e-0d0c-4b4e-9d49-55f3b1a6c001"

	containerdConfig = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n"
	limits           = "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory   " +
		"      unlimited            unlimited            bytes\n"
)

// shared is the host of all tests, which run in sequence.
var shared *made

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // the tests read a hundred hosts and keep none
	code := m.Run()
	if shared != nil {
		_, err := paths.New(shared.root).UnmountAnchor()
		if err := errors.Join(err, os.RemoveAll(shared.root)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// newMade returns the shared host without a fault, and undoes the changes of the test at its end.
func newMade(t *testing.T) *made {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a hook that is not root's is a fault, and only root can make one that is")
	}
	if shared == nil {
		root, err := os.MkdirTemp("", "peerlane-doctor-")
		must(t, err)
		root, err = filepath.EvalSymlinks(root)
		must(t, err)
		m := &made{t: t, root: root, between: func() {}, answer: control.Answer{Report: &launch.Report{}}}
		m.build()
		must(t, paths.New(root).MountAnchor())
		shared = m
	}
	shared.t = t
	t.Cleanup(func() {
		shared.t = t
		shared.undo()
	})
	return shared
}

// build creates the host's files.
func (m *made) build() {
	t, root := m.t, m.root
	_, _, err := recorded.Unpack(root)
	must(t, err)
	for path, text := range map[string]string{
		"proc/sys/kernel/random/boot_id": boot,
		"proc/sys/kernel/osrelease":      "6.12.48-amd64",
		"proc/self/mountinfo":            "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n",
		"proc/devices": "Character devices:\n195 nvidia\n231 infiniband_verbs\n510 nvidia-uvm\n\nBlock " +
			"devices:\n  8 sd\n",
		"proc/1/comm":                 "systemd",
		"proc/700/comm":               "dockerd",
		"proc/700/limits":             limits,
		"proc/701/comm":               "containerd",
		"proc/701/limits":             limits,
		"proc/900/comm":               "python",
		"proc/900/limits":             limits,
		"proc/900/cgroup":             "0::/system.slice/trainer\n",
		"proc/900/environ":            "PATH=/usr/bin\x00HOME=/root\x00",
		"proc/900/root/etc/nccl.conf": "NCCL_NET_PLUGIN=peerlane\n",
		"sys/module/nvidia/version":   "580.95.05",
		"sys/module/nvidia_peermem":   "a directory, elsewhere",
		"boot/config-6.12.48-amd64":   "CONFIG_DMA_SHARED_BUFFER=y\nCONFIG_INFINIBAND_USER_MEM=y\n",
		"usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.52.0":     "",
		"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
		"sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
		"proc/stat":                                     "cpu  1 2 3\nbtime 1700000000\nprocesses 9",
		"sys/module/apparmor/parameters/enabled":        "Y",
		"sys/fs/selinux/enforce":                        "1",
		"sys/fs/cgroup/cgroup.controllers":              "cpuset cpu io memory pids",
		"sys/fs/selinux/booleans/container_use_devices": "1 1",
		"dev/kmsg": "6,1,0,-;Linux version 6.12.48-amd64\n SUBSYSTEM=none\n4,2,100,-;NVRM: loading " +
			"NVIDIA UNIX Open Kernel Module\n",
		"etc/docker/daemon.json":         `{"features": {"cdi": true}}`,
		"etc/containerd/config.toml":     containerdConfig,
		"etc/peerlane/config.toml":       "[relay]\nslots = 4\n",
		"sys/kernel/iommu_groups/1/type": "identity",
	} {
		m.write(path, text)
	}
	for _, ib := range []string{ib0, ib1} {
		m.write(ib+"/fw_ver", "28.43.1014")
		for _, c := range badCounters {
			m.write(ib+"/ports/1/"+c, "3")
		}
		m.write(ib+"/ports/1/sm_lid", "0x0")
	}
	m.link("usr/lib/x86_64-linux-gnu/libibverbs.so.1", "libibverbs.so.1.14.52.0")
	for name, output := range map[string]string{
		"dockerd": "Docker version 27.5.1, build 9f9e405", "containerd": "containerd github.com/containerd/containerd " +
			"1.7.24 abcdef0",
		"crio": "crio version 1.34.1\nGitCommit: unknown", "podman": "podman version 5.4.2",
	} {
		m.program(name, output)
	}
	m.write("usr/libexec/peerlane/peerlane-hook", "")
	must(t, os.Chmod(m.path("usr/libexec/peerlane/peerlane-hook"), 0o755))
	m.write("usr/libexec/peerlane/peerlane-relay", "")
	must(t, os.Chmod(m.path("usr/libexec/peerlane/peerlane-relay"), 0o711))
	m.write("etc/peerlane/cluster.key", "")
	must(t, os.Chmod(m.path("etc/peerlane/cluster.key"), 0o600))

	h, err := reader.Sysfs(topo.Options{Sysfs: m.path("sys"), Proc: m.path("proc")})
	must(t, err)
	nodes := map[string]string{"nvidiactl": "195:255", "nvidia-uvm": "510:0", "nvidia-uvm-tools": "510:1",
		"infiniband/rdma_cm": "10:58"}
	on := true
	m.fake.health = nvml.Health{Driver: "580.95.05", CUDA: 13000}
	for _, g := range h.GPUs {
		nodes["nvidia"+string(rune('0'+g.Minor))] = "195:" + string(rune('0'+g.Minor))
		m.fake.gpus = append(m.fake.gpus, topo.NVMLGPU{Index: g.Index, BusID: g.BusID, UUID: g.UUID, Name: g.Name,
			Minor: g.Minor, Capability: 90})
		m.fake.health.GPUs = append(m.fake.health.GPUs, nvml.GPUHealth{
			Index: g.Index, BusID: g.BusID, BAR1: 128 << 30, BAR1Free: 127 << 30, Memory: 80 << 30, MemoryFree: 79 << 30,
			Persistence: &on, NoP2P: map[string]string{},
		})
	}
	for _, n := range h.NICs {
		number, err := read(m.path("sys/class/infiniband_verbs", n.Uverbs, "dev"))
		must(t, err)
		nodes["infiniband/"+n.Uverbs] = number
	}
	for node, number := range nodes {
		path := m.path("dev", node)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, unix.Mkfifo(path, 0o600)) // CDI accepts FIFOs
		m.link("dev/char/"+number, "../"+node)
	}
	for _, d := range h.PCIePorts {
		real, err := filepath.EvalSymlinks(m.path("sys/bus/pci/devices", d.BusID))
		must(t, err)
		up, err := filepath.Rel(real, m.path("sys/kernel/iommu_groups/1"))
		must(t, err)
		below, err := filepath.Rel(root, filepath.Join(real, "iommu_group"))
		must(t, err)
		m.link(below, up)
	}
	m.generations = []generation.Info{trainer()}
	m.undone = nil // keep the host itself
	m.install()
	m.passed(func(*launch.Pair) {})
	m.undone = nil
}

// trainer is a container whose relay works.
func trainer() generation.Info {
	return generation.Info{
		Generation: generation.Generation{
			ID: strings.Repeat("a", 32), Container: generation.Container{ID: "trainer"}, Init: process.Process{PID: 900},
			Config: launch.Config{Lanes: []launch.Lane{{GPU: launch.GPU{Index: 2, BusID: far}, Copy: true}}},
		},
		Alive: true, Supervised: true, Status: generation.Status{State: generation.StateReady,
			Relay: &process.Process{PID: 901}, Starts: 1},
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (m *made) path(elem ...string) string {
	return filepath.Join(append([]string{m.root}, elem...)...)
}

// keep registers an undo of the path's current state: a file, a link or nothing.
func (m *made) keep(path string) {
	m.t.Helper()
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		for { // also the directories that the write creates
			dir := filepath.Dir(path)
			if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
				break
			}
			path = dir
		}
		m.undone = append(m.undone, func() { must(m.t, os.RemoveAll(path)) })
	case err != nil:
		m.t.Fatal(err)
	case info.Mode().Type() == fs.ModeSymlink:
		target, err := os.Readlink(path)
		must(m.t, err)
		m.undone = append(m.undone, func() {
			must(m.t, os.RemoveAll(path))
			must(m.t, os.Symlink(target, path))
		})
	case info.Mode().IsRegular():
		text, err := os.ReadFile(path)
		must(m.t, err)
		m.undone = append(m.undone, func() {
			must(m.t, os.WriteFile(path, text, 0o600))
			must(m.t, os.Chmod(path, info.Mode().Perm()))
		})
	default:
		m.t.Fatalf("a fault changes %s, which is neither a file nor a link", path)
	}
}

func (m *made) write(path, text string) {
	m.t.Helper()
	path = m.path(path)
	m.keep(path)
	must(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(m.t, os.WriteFile(path, []byte(text+"\n"), 0o644))
}

// edit replaces a part of a file, which must be present.
func (m *made) edit(path, old, with string) {
	m.t.Helper()
	text, err := os.ReadFile(m.path(path))
	must(m.t, err)
	if !strings.Contains(string(text), old) {
		m.t.Fatalf("%s has no %q", path, old)
	}
	m.keep(m.path(path))
	must(m.t, os.WriteFile(m.path(path), []byte(strings.ReplaceAll(string(text), old, with)), 0o644))
}

func (m *made) link(path, target string) {
	m.t.Helper()
	path = m.path(path)
	m.keep(path)
	must(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(m.t, os.RemoveAll(path))
	must(m.t, os.Symlink(target, path))
}

func (m *made) remove(path string) {
	m.t.Helper()
	m.keep(m.path(path))
	must(m.t, os.Remove(m.path(path)))
}

func (m *made) chmod(path string, mode os.FileMode) {
	m.t.Helper()
	m.keep(m.path(path))
	must(m.t, os.Chmod(m.path(path), mode))
}

func (m *made) program(name, output string) {
	m.t.Helper()
	path := "usr/bin/" + name
	m.write(path, "#!/bin/sh\ncat <<'E'\n"+output+"\nE")
	must(m.t, os.Chmod(m.path(path), 0o755))
}

// gpu returns NVML's data of a GPU for a fault to change.
func (m *made) gpu(busID string) (*topo.NVMLGPU, *nvml.GPUHealth) {
	for i := range m.fake.gpus {
		if m.fake.gpus[i].BusID == busID {
			g, health := &m.fake.gpus[i], &m.fake.health.GPUs[i]
			oldGPU, oldHealth := *g, *health
			health.NoP2P = maps.Clone(health.NoP2P)
			m.undone = append(m.undone, func() { *g, *health = oldGPU, oldHealth })
			return g, health
		}
	}
	m.t.Fatalf("no GPU %s", busID)
	return nil, nil
}

// server returns a GPU that lanes of the current host stage on.
func (m *made) server() string {
	p, err := m.host().readPlan()
	must(m.t, err)
	return p.Staging[0].GPU
}

func (m *made) undo() {
	for i := len(m.undone) - 1; i >= 0; i-- {
		m.undone[i]()
	}
	m.undone = nil
}

// host returns the Host that checks examine.
func (m *made) host() *Host {
	return &Host{
		Sysfs: m.path("sys"), Proc: m.path("proc"), Root: m.root, Layout: paths.New(m.root), SpecDirs: []string{
			m.path("etc/cdi"), m.path("var/run/cdi")},
		NVML:   &m.fake,
		Relays: func(paths.Layout) ([]generation.Info, error) { return m.generations, m.generateErr },
		Ask: func(_ paths.Layout, list []generation.Info, _ time.Duration) control.Reports {
			all := control.Reports{}
			for _, info := range list {
				all[info.ID] = m.answer
			}
			return all
		},
		Staged: func(paths.Layout) (map[string]uint64, error) { return m.staged, nil },
		wait:   func(context.Context, time.Duration) { m.between() },
		ask: func(_ context.Context, path string) (string, error) {
			script, err := read(path) // running every script would take most of the test's time
			return strings.TrimPrefix(script, "#!/bin/sh\ncat <<'E'\n"), err
		},
	}
}

// keepInstalled registers an undo of the files that install can change.
func (m *made) keepInstalled() {
	m.keep(m.path("var/lib/peerlane/plan.json"))
	for _, kind := range cdi.Kinds {
		m.keep(m.path("etc/cdi", cdi.JSON.FileName(kind)))
	}
}

// install installs plan and specifications of the current host.
func (m *made) install() { m.installFrom(m.host()) }

func (m *made) installFrom(h *Host) {
	m.t.Helper()
	c, err := h.configuration()
	must(m.t, err)
	i := cdi.Installation{Layout: h.Layout, Dirs: h.SpecDirs[:1]}
	_, err = i.Install(false, func() (*planner.Plan, []*specs.Spec, error) {
		plan, err := h.readPlan()
		if err != nil {
			return nil, nil, err
		}
		list, err := cdi.Generate(plan, cdi.Options{
			Layout: h.Layout, HookPath: m.path(
				"usr/libexec/peerlane/peerlane-hook"), Tenancy: c.CDI.Tenancy, DevRoot: m.root, Proc: h.Proc,
		})
		return plan, list, err
	})
	must(m.t, err)
}

// passed writes a self-test that every pair has passed, except that change modifies the first pair.
func (m *made) passed(change func(*launch.Pair)) { m.passedOn(m.host(), change) }

func (m *made) passedOn(h *Host, change func(*launch.Pair)) {
	m.t.Helper()
	names, err := h.pairs()
	must(m.t, err)
	module, err := read(m.path("sys/module/nvidia/version"))
	must(m.t, err)
	r := launch.PairRecord{Version: launch.PairVersion, Boot: boot, Module: module, Pairs: []launch.Pair{}}
	for _, n := range names {
		r.Pairs = append(r.Pairs, launch.Pair{PairName: n, Verdict: launch.VerdictGood, Bytes: 1 << 20, At: 1})
	}
	change(&r.Pairs[0])
	text, err := json.Marshal(r)
	must(m.t, err)
	m.write("var/lib/peerlane/self-test.json", string(text))
}
