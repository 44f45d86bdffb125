package doctor

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
)

// fault is a defect of a host, applied to a good host.
type fault struct {
	name string
	// of names the changed objects, so that the test does not combine two faults of one object.
	// The default is the name of the check.
	of string
	// finds are the findings other than OK, "STATUS CHECK". says is part of the text or the remedy
	// of the first finding.
	finds []string
	want  string
	// change runs before plan and specifications are installed, and after runs after that.
	change, after func(*made)
	// replan marks a fault that changes the plan or the tested pairs.
	replan bool
}

// faults returns the faults in the order of the checks. A check that examines several objects has
// several faults.
func faults() []fault {
	list := []fault{
		{name: "a driver that is too old", replan: true, finds: []string{"failure driver", "warning dma-buf"},
			want: "release 470.57", change: func(m *made) {
				m.edit("proc/driver/nvidia/version", "580.95.05", "470.57.02")
				m.write("sys/module/nvidia/version", "470.57.02")
				m.driver("470.57.02", 11040)
			}},
		{name: "libraries of another release", finds: []string{"failure driver"}, want: "libraries 575.51.03",
			change: func(m *made) { m.driver("575.51.03", 12090) }},
		{name: "a module of another release", replan: true, finds: []string{"failure driver"},
			want: "the module nvidia is 575", change: func(m *made) {
				m.write("sys/module/nvidia/version", "575.51.03")
			}},
		{name: "a CUDA that is too old", finds: []string{"failure driver"}, want: "CUDA 11.4",
			change: func(m *made) { m.driver("580.95.05", 11040) }},
		{name: "neither nvidia-peermem nor DMA-BUF", replan: true, of: "nvidia-peermem driver open",
			finds: []string{"warning nvidia-peermem", "warning dma-buf"}, want: "modprobe nvidia-peermem", change: func(
				m *made) {
				m.remove("sys/module/nvidia_peermem")
				m.edit("proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64",
					"NVIDIA UNIX x86_64 Kernel Module")
			}},
		{name: "closed kernel modules", replan: true, of: "open", finds: []string{"warning dma-buf"},
			want: "not the open ones", change: func(m *made) {
				m.edit("proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64",
					"NVIDIA UNIX x86_64 Kernel Module")
			}},
		{name: "an old kernel", replan: true, of: "kernel", finds: []string{"warning dma-buf"}, want: "5.12 is needed",
			change: func(m *made) {
				m.write("proc/sys/kernel/osrelease", "5.10.0-28-amd64")
			}},
		{name: "a kernel without DMA-BUF", of: "kernel", finds: []string{"warning dma-buf"},
			want: "CONFIG_DMA_SHARED_BUFFER", change: func(m *made) {
				m.write("boot/config-6.12.48-amd64", "# CONFIG_DMA_SHARED_BUFFER is not set\nCONFIG_INFINIBAND_USER_MEM=y")
			}},
		{name: "an old rdma-core", of: "rdma-core", finds: []string{"warning dma-buf"}, want: "of release 39",
			change: func(m *made) {
				m.link("usr/lib/x86_64-linux-gnu/libibverbs.so.1", "libibverbs.so.1.14.39.0")
				m.write("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.39.0", "")
			}},
		{name: "no rdma-core", of: "rdma-core", finds: []string{"warning dma-buf"}, want: "libibverbs.so.1 is not installed",
			change: func(m *made) {
				m.remove("usr/lib/x86_64-linux-gnu/libibverbs.so.1")
			}},

		{name: "a pair without peer-to-peer", finds: []string{"failure p2p"}, want: "the chipset does not support it",
			after: func(m *made) {
				names, err := m.host().pairs()
				must(m.t, err)
				_, health := m.gpu(names[0].GPU.BusID)
				health.NoP2P[names[0].Server.BusID] = "read: the chipset does not support it"
			}},
		{name: "a pair that copies wrong", of: "pairs", finds: []string{"failure self-test"}, want: "byte 4096",
			after: func(m *made) {
				m.passed(func(p *launch.Pair) { p.Verdict, p.Reason = launch.VerdictWrong, "byte 4096 is 0" })
			}},
		{name: "a pair that is slow", of: "pairs", finds: []string{"warning self-test"}, want: "slower",
			after: func(m *made) {
				m.passed(func(p *launch.Pair) { p.Verdict, p.Reason = launch.VerdictSlow, "3 of 20 GB/s" })
			}},
		{name: "a self-test of an earlier boot", of: "pairs", finds: []string{"could not tell self-test"},
			want: "16 pairs have not been tested", after: func(m *made) {
				m.edit("var/lib/peerlane/self-test.json", boot, strings.Repeat("0", 36))
			}},
		{name: "a damaged self-test", of: "pairs", finds: []string{"could not tell self-test"}, want: "self-test.json",
			after: func(m *made) {
				m.write("var/lib/peerlane/self-test.json", `{"version": 1, "pears": []}`)
			}},
		{name: "a small BAR1", of: "bar1", finds: []string{"failure bar1"}, want: "Resizable BAR", after: func(m *made) {
			_, health := m.gpu(m.server())
			health.BAR1, health.BAR1Free = 64<<20, 60<<20
		}},
		{name: "a full BAR1", of: "bar1", finds: []string{"warning bar1"}, want: "of its BAR1 are free",
			after: func(m *made) {
				_, health := m.gpu(m.server())
				health.BAR1Free = 1 << 20
			}},
		{name: "a BAR1 smaller than the memory", of: "bar1", finds: []string{"warning bar1"}, want: "cannot register all",
			after: func(m *made) {
				_, health := m.gpu(m.server())
				health.BAR1 = 64 << 30
			}},
		{name: "MIG", replan: true, of: "mig plan", finds: []string{"failure mig"}, want: "nvidia-smi -i 6 -mig 0",
			change: func(m *made) {
				g, _ := m.gpu("0000:ba:00.0")
				g.MIG = true
			}},
		{name: "a vGPU", replan: true, of: "vgpu plan", finds: []string{"failure vgpu"}, want: "pass a whole GPU",
			change: func(m *made) {
				g, _ := m.gpu("0000:ba:00.0")
				g.VGPU = true
			}},
		{name: "exclusive compute mode", replan: true, of: "compute-mode plan", finds: []string{"failure compute-mode"},
			want: "nvidia-smi -i 6 -c 0", change: func(m *made) {
				g, _ := m.gpu("0000:ba:00.0")
				g.ComputeMode = "exclusive-process"
			}},
		{name: "MPS", finds: []string{"warning mps"}, want: "process 800",
			change: func(m *made) { m.write("proc/800/comm", "nvidia-cuda-mps") }},
		{name: "no persistence", finds: []string{"warning persistence-mode"}, want: "nvidia-persistenced",
			change: func(m *made) {
				_, health := m.gpu(near)
				off := false
				health.Persistence = &off
			}},
		{name: "a GPU off the bus", of: "kmsg", finds: []string{"failure xid"}, want: "Xid 79, 2 times",
			change: func(m *made) {
				m.log("4,7,9,-;NVRM: Xid (PCI:0000:3a:00): 79, pid=1, name=x, GPU has fallen off the bus.\n4,8,9,-;NVRM: Xid " +
					"(PCI:0000:3A:00): 79, again")
			}},
		{name: "a program's fault", of: "kmsg", finds: []string{"warning xid"}, want: "Xid 31", change: func(m *made) {
			m.log("4,7,9,-;NVRM: Xid (PCI:0000:3a:00): 31, pid=7, name=python, Ch 00000008, MMU Fault")
		}},

		{name: "a narrow link", of: "link0", finds: []string{"warning pcie-link"}, want: "8 of 16 lanes",
			change: func(m *made) { m.edit(nic0+"/current_link_width", "16", "8") }},
		{name: "a slow link", of: "link1", finds: []string{"warning pcie-link"}, want: "runs at 8.0 GT/s",
			change: func(m *made) {
				m.edit(nic1+"/current_link_speed", "32.0 GT/s", "8.0 GT/s")
			}},
		{name: "ACS redirection", replan: true, of: "acs plan", finds: []string{"warning acs"},
			want: "setpci -s 0000:17:00.0 ECAP_ACS+6.w=0:2c", change: func(m *made) { m.redirect("0000:17:00.0") }},
		{name: "an IOMMU that translates", finds: []string{"warning iommu"}, want: "DMA-FQ",
			change: func(m *made) { m.write("sys/kernel/iommu_groups/1/type", "DMA-FQ") }},

		{name: "a NIC of iWARP", replan: true, of: "port0", finds: []string{"warning nic-flush"}, want: "iWARP cannot flush",
			change: func(m *made) {
				m.write(ib0+"/node_type", "4: RNIC")
			}},
		{name: "a port in INIT", replan: true, of: "state port0 plan", finds: []string{"warning port-state"}, want: "INIT",
			change: func(m *made) { m.write(ib0+"/ports/1/state", "2: INIT") }},
		{name: "a port without a signal", replan: true, of: "state plan",
			finds: []string{"warning port-state", "warning port-physical"}, want: "DOWN", change: func(m *made) {
				m.write(ib1+"/ports/1/state", "1: DOWN")
				m.write(ib1+"/ports/1/phys_state", "2: Polling")
			}},
		{name: "a cable at half its rate", replan: true, of: "rate state plan", finds: []string{"warning port-rate"},
			want: "200 Gb/s, and that of mlx5_0", change: func(m *made) {
				m.write(ib1+"/ports/1/rate", "200 Gb/sec (4X HDR)")
			}},
		{name: "a slot that is too narrow", replan: true, of: "link0 plan", finds: []string{"warning port-rate"},
			want: "its slot carries", change: func(m *made) {
				m.edit(nic0+"/max_link_width", "16", "8")
				m.edit(nic0+"/current_link_width", "16", "8")
			}},
		{name: "two link layers", replan: true, of: "layer", finds: []string{"warning link-layer"},
			want: "InfiniBand: mlx5_1 port 1", change: func(m *made) {
				m.write(ib1+"/ports/1/link_layer", "InfiniBand")
				m.write(ib1+"/ports/1/sm_lid", "0x1")
			}},
		{name: "no subnet manager", replan: true, of: "layer", finds: []string{"failure subnet-manager"}, want: "opensm",
			change: func(m *made) {
				m.write(ib0+"/ports/1/link_layer", "InfiniBand")
				m.write(ib1+"/ports/1/link_layer", "InfiniBand")
			}},
		{name: "two firmwares", finds: []string{"warning nic-firmware"}, want: "28.39.2048 on mlx5_1",
			change: func(m *made) { m.write(ib1+"/fw_ver", "28.39.2048") }},
		{name: "errors that rise", finds: []string{"warning error-counters"}, want: "symbol_error by 4 to 7",
			change: func(m *made) {
				m.between = func() { m.write(ib0+"/ports/1/counters/symbol_error", "7") }
				m.undone = append(m.undone, func() { m.between = func() {} })
			}},

		{name: "a slow governor", finds: []string{"warning cpu-governor"}, want: "powersave for 1 of 2",
			change: func(m *made) {
				m.write("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave")
			}},

		{name: "a specification that is gone", of: "specification", finds: []string{"failure specification"},
			want: "peerlane.dev/lane", after: func(m *made) { m.remove("etc/cdi/peerlane.dev-lane.json") }},
		{name: "a specification that is damaged", of: "specification", finds: []string{"failure specification"},
			want: "engines cannot load it", after: func(m *made) {
				m.write("etc/cdi/peerlane.dev-lane.json", `{"cdiVersion": "0.5.0"`)
			}},
		{name: "a specification of before", of: "specification", finds: []string{"failure specification"},
			want: "differs from the file that this version writes on this host", after: func(m *made) {
				m.edit("etc/cdi/peerlane.dev-lane.json", "GPU-a5a8a5c2", "GPU-a5a8ffff")
			}},
		{name: "a hook that cannot be run", of: "hook", finds: []string{"failure hook"}, want: "not an executable file",
			after: func(m *made) { m.chmod("usr/libexec/peerlane/peerlane-hook", 0o644) }},
		{name: "a hook on noexec", of: "mounts", finds: []string{"failure hook"}, want: "remount,exec",
			change: func(m *made) {
				m.write("proc/self/mountinfo",
					fmt.Sprintf("22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n30 22 8:2 / %s rw,nosuid,noexec - ext4 /dev/sda2 rw",
						m.path("usr")))
			}},
		{name: "a node without its link", finds: []string{"warning dev-char"}, want: "ln -s ../nvidia2 /dev/char/195:2",
			change: func(m *made) { m.remove("dev/char/195:2") }},

		{name: "Docker without CDI", of: "docker", finds: []string{"failure engine-cdi"}, want: "features.cdi",
			change: func(m *made) { m.write("etc/docker/daemon.json", "{}") }},
		{name: "Docker with CDI switched off", of: "docker", finds: []string{"failure engine-cdi"}, want: "switched off",
			change: func(m *made) {
				m.program("dockerd", "Docker version 29.1.0, build 1")
				m.write("etc/docker/daemon.json", `{"features": {"cdi": false}}`)
			}},
		{name: "Docker that reads elsewhere", of: "docker", finds: []string{"failure engine-cdi"},
			want: "it reads /run/cdi alone", change: func(m *made) {
				m.write("etc/docker/daemon.json", `{"features": {"cdi": true}, "cdi-spec-dirs": ["/run/cdi"]}`)
			}},
		{name: "containerd without CDI", of: "containerd", finds: []string{"warning engine-cdi"}, want: "enable_cdi = true",
			change: func(m *made) { m.write("etc/containerd/config.toml", "version = 2") }},
		{name: "an old CRI-O", of: "crio", finds: []string{"failure engine-cdi"}, want: "1.23",
			change: func(m *made) { m.program("crio", "crio version 1.22.5") }},
		{name: "an old Podman", of: "podman", finds: []string{"failure engine-cdi"}, want: "4.1",
			change: func(m *made) { m.program("podman", "podman version 3.4.4") }},
		{name: "an engine that does not say its version", of: "podman", finds: []string{"could not tell engine-cdi"},
			want: "no version", change: func(m *made) { m.program("podman", "hello") }},

		{name: "a container that may lock little", of: "memlock-init relay", finds: []string{"warning memlock-init"},
			want: "8.0 MiB", change: func(m *made) {
				m.edit("proc/900/limits", "unlimited            unlimited", "8388608              8388608")
			}},
		{name: "Docker may lock little", of: "memlock-exec", finds: []string{"warning memlock-exec"},
			want: "ends all of its containers", change: func(m *made) {
				m.edit("proc/700/limits", "unlimited            unlimited", "65536                unlimited")
			}},
		{name: "an engine that may lock little", finds: []string{"warning memlock-exec"}, want: "containerd.service.d",
			change: func(m *made) {
				m.edit("proc/701/limits", "unlimited            unlimited", "65536                unlimited")
			}},

		{name: "SELinux without devices", of: "selinux", finds: []string{"warning selinux"},
			want: "setsebool -P container_use_devices 1", change: func(m *made) {
				m.write("sys/fs/selinux/booleans/container_use_devices", "0 0")
			}},
		{name: "SELinux that denies", of: "kmsg", finds: []string{"failure selinux"}, want: "denied 1 accesses",
			change: func(m *made) {
				m.log(`5,7,9,-;audit: type=1400 audit(1.2:3): avc:  denied  { connectto } for pid=9 comm="python" path="/run/peerlane/relay.sock"`)
			}},
		{name: "SELinux that denies, and auditd", of: "kmsg audit", finds: []string{"failure selinux"},
			want: "denied 1 accesses", change: func(m *made) {
				m.write("proc/600/comm", "auditd")
				m.write("var/log/audit/audit.log", `type=AVC msg=audit(1600000000.1:3): avc:  denied  { open } for pid=9 comm="peerlane-relay" path="/of/an/earlier/boot"
type=AVC msg=audit(1700000009.1:3): avc:  denied  { open } for pid=9 comm="peerlane-relay" path="/dev/nvidia0"
type=AVC msg=audit(1700000009.2:4): avc:  denied  { open } for pid=9 comm="httpd" path="/etc/shadow"`)
			}},
		{name: "AppArmor that denies, and auditd", of: "kmsg audit", finds: []string{"failure apparmor"},
			want: "denied 1 accesses", change: func(m *made) {
				m.write("proc/600/comm", "auditd")
				m.write("var/log/audit/audit.log", `type=AVC msg=audit(1700000009.2:3): apparmor="DENIED" operation="open" profile="x" name="/var/lib/peerlane/plan.json"`)
			}},
		{name: "AppArmor that denies", of: "kmsg", finds: []string{"failure apparmor"}, want: "denied 1 accesses",
			change: func(m *made) {
				m.log(`5,7,9,-;audit: type=1400 audit(1.2:3): apparmor="DENIED" operation="open" profile="x" name="/var/lib/peerlane/plan.json"`)
			}},
		{name: "a key that others can read", finds: []string{"failure cluster-key"}, want: "peerlane key rotate",
			change: func(m *made) { m.chmod("etc/peerlane/cluster.key", 0o644) }},
		{name: "a relay program that each user can read", of: "relay-program", finds: []string{"warning sandbox"},
			want: "chmod 711", change: func(m *made) { m.chmod("usr/libexec/peerlane/peerlane-relay", 0o755) }},
		{name: "no pids controller", of: "controllers", finds: []string{"warning sandbox"}, want: "RLIMIT_NPROC",
			change: func(m *made) {
				m.write("sys/fs/cgroup/cgroup.controllers", "cpu io memory")
			}},
		{name: "a relay whose sandbox lacks Landlock", of: "relay", finds: []string{"warning sandbox"},
			want: "peerlane explain PL1303", after: func(m *made) {
				m.relay(func(g *generation.Info) {
					g.Status.Sandbox = &sandbox.Report{Missing: []string{"Landlock: this kernel lacks Landlock"}}
				})
			}},

		{name: "an image that names another network of NCCL", of: "nccl relay", finds: []string{"warning nccl"},
			want: "NCCL_NET=gIB", change: func(m *made) {
				m.write("proc/900/environ", "HOME=/root\x00NCCL_NET=gIB\x00NCCL_CUMEM_ENABLE=0\x00")
			}},
		{name: "a launcher that names another plugin of NCCL", of: "nccl relay", finds: []string{"warning nccl"},
			want: "NCCL_NET_PLUGIN=none", change: func(m *made) {
				m.write("proc/902/cgroup", "0::/system.slice/trainer\n")
				m.write("proc/902/comm", "python")
				m.write("proc/902/environ", "NCCL_NET_PLUGIN=none\x00")
				m.write("proc/902/root/etc/hosts", "")
			}},
		{name: "an image with a file of NCCL", of: "nccl relay", finds: []string{"warning nccl"},
			want: "NCCL_NET_PLUGIN is not set", change: func(m *made) {
				m.write("proc/900/root/etc/nccl.conf", "NCCL_DEBUG=INFO\n")
			}},

		{name: "a relay that is down", of: "relay", finds: []string{"failure relays"}, want: "died too often",
			change: func(m *made) {
				m.relay(func(g *generation.Info) { g.Status.State = generation.StateDown })
			}},
		{name: "a relay that hangs", of: "relay", finds: []string{"failure relays"},
			want: "did not answer: it gave no answer in time", change: func(m *made) {
				answer := m.answer
				m.answer = control.Answer{NoReport: "it gave no answer in time"}
				m.undone = append(m.undone, func() { m.answer = answer })
			}},
		{name: "the state of another machine", of: "relay", finds: []string{"failure leftovers"}, want: "shared disk",
			after: func(m *made) {
				m.write("etc/machine-id", strings.Repeat("1", 32))
				m.relay(func(g *generation.Info) { g.Machine = strings.Repeat("2", 32) })
			}},
		{name: "a relay without a supervisor", of: "relay", finds: []string{"failure relays"}, want: "restart the container",
			change: func(m *made) {
				m.relay(func(g *generation.Info) { g.Supervised = false })
			}},
		{name: "a relay that somebody stopped", of: "relay", finds: []string{"warning relays"}, want: "relay resume",
			change: func(m *made) {
				m.relay(func(g *generation.Info) { g.Status.State = generation.StateStopped })
			}},
		{name: "a container that has ended", of: "relay", finds: []string{"warning leftovers"}, want: "peerlane relay gc",
			change: func(m *made) {
				m.relay(func(g *generation.Info) { g.Alive, g.Supervised = false, false })
			}},
		{name: "a socket of nobody", of: "socket", finds: []string{"warning leftovers"}, want: "no generation",
			change: func(m *made) {
				m.write("run/peerlane/peers/"+strings.Repeat("b", 32)+".sock", "")
			}},
		{name: "a server GPU that is full", finds: []string{"warning staging"}, want: "of its memory are free",
			after: func(m *made) {
				_, health := m.gpu(m.server())
				health.MemoryFree = 1 << 20
			}},
		{name: "a cap that has no room", replan: true, of: "staging plan", finds: []string{"warning staging"},
			want: "raise staging.limit", change: func(m *made) {
				// The limit has room for the slots of one lane, which the plan requires, but not
				// of two.
				m.write("etc/peerlane/config.toml", "[relay]\nslots = 4\n[staging]\nlimit = \"140MiB\"")
			}},
	}
	for i := range list {
		if list[i].of == "" {
			_, check, _ := strings.Cut(strings.TrimPrefix(list[i].finds[0], "could not "), " ")
			list[i].of = check
		}
		if list[i].change == nil {
			list[i].change = func(*made) {}
		}
		if list[i].after == nil {
			list[i].after = func(*made) {}
		}
	}
	return list
}

// driver changes the versions that NVML reports.
func (m *made) driver(version string, cuda int) {
	old := m.fake.health
	m.fake.health.Driver, m.fake.health.CUDA = version, cuda
	m.undone = append(m.undone, func() { m.fake.health.Driver, m.fake.health.CUDA = old.Driver, old.CUDA })
}

// log appends lines to the kernel's log.
func (m *made) log(lines string) {
	text, err := os.ReadFile(m.path("dev/kmsg"))
	must(m.t, err)
	m.write("dev/kmsg", string(text)+lines)
}

// relay changes the host's only container.
func (m *made) relay(change func(*generation.Info)) {
	g := trainer()
	change(&g)
	m.generations = []generation.Info{g}
	m.undone = append(m.undone, func() { m.generations = []generation.Info{trainer()} })
}

// redirect enables request and completion redirection in a port's configuration space.
func (m *made) redirect(port string) {
	m.t.Helper()
	path := "sys/bus/pci/devices/" + port + "/config"
	config, err := os.ReadFile(m.path(path))
	must(m.t, err)
	for at := 0x100; at >= 0x100 && at+8 <= len(config); {
		header := binary.LittleEndian.Uint32(config[at:])
		if header&0xffff == 0xd {
			m.keep(m.path(path))
			config[at+6] |= 0xc
			must(m.t, os.WriteFile(m.path(path), config, 0o644))
			return
		}
		at = int(header >> 20 &^ 3)
	}
	m.t.Fatalf("port %s has no ACS", port)
}
