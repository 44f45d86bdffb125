package doctor

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/topo/nvml"
)

var driverChecks = []Check{
	{
		Name: "driver", subject: "driver",
		source: "/proc/driver/nvidia/version, /sys/module/nvidia/version, and NVML's versions of driver and CUDA",
		why: "relays need the CUDA driver API 11.7 (release 515); kernel modules and libraries of two releases refuse " +
			"each other",
		remedy: "install NVIDIA's driver, release 515 or newer, and restart the host",
		run:    checkDriver,
	},
	{
		Name: "nvidia-peermem", subject: "driver",
		source: "/sys/module/nvidia_peermem and its predecessor nv_peer_mem",
		why: "without DMA-BUF, and for programs that pass a CUDA pointer to ibv_reg_mr, a NIC reaches GPU memory by " +
			"this module only",
		remedy: "modprobe nvidia-peermem, and for each start: echo nvidia-peermem > /etc/modules-load.d/nvidia-peermem.conf",
		run:    checkPeermem,
	},
	{
		Name: "dma-buf", subject: "driver",
		source: "/proc/driver/nvidia/version (open kernel modules), /proc/sys/kernel/osrelease and the kernel's " +
			"configuration, the release of libibverbs.so.1",
		why: "a NIC registers GPU memory without nvidia-peermem; NVIDIA recommends it",
		remedy: "install NVIDIA's open kernel modules, release 515 or newer, on Linux 5.12 or newer, and rdma-core 41 or " +
			"newer",
		run: checkDMABUF,
	},
}

// oldestDriver and oldestCUDA are the minimum versions of package cuda.
const (
	oldestDriver = 515
	oldestCUDA   = 11070
)

// driverRelease matches the version in /proc/driver/nvidia/version, "... 580.95.05 Release Build".
var driverRelease = regexp.MustCompile(`\s((\d{1,6})\.\d[0-9.]*)\s`)

func checkDriver(_ context.Context, h *Host) []Finding {
	gpus := 0
	if t, err := h.topology(); err == nil {
		for _, g := range t.GPUs {
			if g.Vendor == "" {
				gpus++
			}
		}
	}
	text, err := read(h.proc("driver/nvidia/version"))
	switch {
	case absent(err) && gpus == 0:
		return []Finding{warning("host", "neither a GPU of NVIDIA nor its driver is here: no lane can be made").remedy(
			"if there is a GPU, see whether lspci -d 10de: shows it")}
	case absent(err):
		return []Finding{failure("host", "%d GPUs are here, and NVIDIA's driver is not loaded",
			gpus).remedy("modprobe nvidia; where there is no such module, install the driver")}
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	}
	first, _, _ := strings.Cut(text, "\n")
	m := driverRelease.FindStringSubmatch(first + " ")
	if m == nil {
		return []Finding{unknown("host", "the driver's version is %.100q, which is no release", first)}
	}
	kernel := m[1]
	if major, _ := strconv.Atoi(m[2]); major < oldestDriver {
		return []Finding{failure("host", "the driver is of release %s, and %d is needed", kernel, oldestDriver)}
	}
	if loaded, err := read(h.sys("module/nvidia/version")); err == nil && loaded != kernel {
		return []Finding{failure("host", "the module nvidia is %s, and the driver says %s", loaded,
			kernel).remedy("restart the host, so that one release is loaded")}
	}
	health, err := h.nvml()
	switch {
	case err != nil && strings.Contains(err.Error(), "version mismatch"):
		return []Finding{failure("host", "the kernel modules are %s, and the libraries another release: %v", kernel,
			err).remedy("restart the host, or unload and load the modules: modprobe -r nvidia_uvm nvidia_drm nvidia_modeset " +
			"nvidia && modprobe nvidia")}
	case err != nil:
		return []Finding{unknown("host", "the kernel modules are %s; of the libraries NVML tells nothing: %v", kernel, err)}
	case health.Driver != "" && health.Driver != kernel:
		return []Finding{failure("host", "the kernel modules are %s and the libraries %s", kernel,
			health.Driver).remedy("restart the host, so that the modules of %s are loaded", health.Driver)}
	case health.CUDA == 0:
		return []Finding{unknown("host", "driver %s; of CUDA NVML tells nothing: %s", kernel,
			strings.Join(health.Failures, "; "))}
	case health.CUDA < oldestCUDA:
		return []Finding{failure("host", "driver %s does CUDA %s, and 11.7 is needed", kernel, cudaVersion(health.CUDA))}
	}
	return []Finding{ok("host", "driver %s, CUDA %s", kernel, cudaVersion(health.CUDA))}
}

func cudaVersion(number int) string { return fmt.Sprintf("%d.%d", number/1000, number%1000/10) }

// registers returns the reason why the host registers no GPU memory; empty if a GPU and a NIC are
// present.
func (h *Host) registers() (none string) {
	t, err := h.topology()
	if err != nil {
		return ""
	}
	if len(t.GPUs) == 0 {
		return "there is no GPU whose memory could be registered"
	}
	for _, n := range t.NICs {
		if !n.Software && !n.Ethernet {
			return ""
		}
	}
	return "there is no RDMA NIC that could reach a GPU's memory"
}

func checkPeermem(_ context.Context, h *Host) []Finding {
	if none := h.registers(); none != "" {
		return notApplicable("%s", none)
	}
	p, err := cdi.FindPeermem(h.Sysfs, h.Proc)
	switch {
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	case p.Module == "" && p.DMABUF:
		return []Finding{ok("host", "it is not loaded; DMA-BUF takes its place")}
	case p.Module == "":
		return []Finding{
			warning("host", "neither nvidia-peermem nor nv_peer_mem is loaded, and DMA-BUF does not take its place: %s",
				p.NoDMABUF)}
	}
	return []Finding{ok("host", "%s is loaded", p.Module)}
}

// oldestRDMACore is the first release in which DMA-BUF works for GPUs (openucx/ucx#11002).
const oldestRDMACore = 41

// ibverbsFile matches the target of libibverbs.so.1: 1.14 is the interface, 41.0 the release of
// rdma-core.
var ibverbsFile = regexp.MustCompile(`^libibverbs\.so\.1\.\d{1,4}\.(\d{1,4})\.\d{1,4}$`)

func checkDMABUF(_ context.Context, h *Host) []Finding {
	if none := h.registers(); none != "" {
		return notApplicable("%s", none)
	}
	p, err := cdi.FindPeermem(h.Sysfs, h.Proc)
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	if !p.DMABUF {
		list = append(list, warning("host", "%s", p.NoDMABUF))
	}
	release, _ := read(h.proc("sys/kernel/osrelease"))
	options, where := h.kernelConfig(release)
	for _, option := range []string{"CONFIG_DMA_SHARED_BUFFER", "CONFIG_INFINIBAND_USER_MEM"} {
		if where != "" && !strings.Contains("\n"+options, "\n"+option+"=y") {
			list = append(list, warning("host", "the kernel is built without %s (%s)", option,
				where).remedy("use a kernel that is built with %s=y", option))
		}
	}
	core, path := h.rdmaCore()
	switch {
	case path == "":
		list = append(list, warning("host", "libibverbs.so.1 is not installed on the host").remedy(
			"apt install libibverbs1 ibverbs-providers, or dnf install libibverbs"))
	case core == 0:
		list = append(list, unknown("host", "%s does not say of which release of rdma-core it is", path))
	case core < oldestRDMACore:
		list = append(list, warning("host", "rdma-core is of release %d (%s), and %d is needed", core, path,
			oldestRDMACore).remedy("install rdma-core %d or newer", oldestRDMACore))
	}
	return orFine(list, "open kernel modules, Linux %s, rdma-core %d", release, core)
}

// kernelConfig returns the build configuration of the kernel and the path of its file; both are
// empty without such a file.
func (h *Host) kernelConfig(release string) (text, path string) {
	if filepath.Base(release) == release {
		path = h.path("boot", "config-"+release)
		if text, err := read(path); err == nil {
			return text, path
		}
	}
	path = h.proc("config.gz")
	f, err := os.Open(path)
	if err != nil {
		return "", ""
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return "", ""
	}
	all, err := io.ReadAll(io.LimitReader(z, maxText))
	if err != nil {
		return "", ""
	}
	return string(all), path
}

// rdmaCore returns the release and the path of the host's rdma-core. release is 0 if the file name
// does not contain it, and path is empty if the library is absent.
func (h *Host) rdmaCore() (release int, path string) {
	for _, pattern := range []string{"usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "lib64", "lib/*-linux-gnu"} {
		found, err := filepath.Glob(h.path(pattern, "libibverbs.so.1"))
		if err != nil || len(found) == 0 {
			continue
		}
		path = found[0]
		real, err := filepath.EvalSymlinks(path)
		if err != nil {
			return 0, path
		}
		if m := ibverbsFile.FindStringSubmatch(filepath.Base(real)); m != nil {
			release, _ = strconv.Atoi(m[1]) // at most four digits
		}
		return release, path
	}
	return 0, ""
}

// healthOf returns NVML's data of a GPU, or in why the text of the finding that reports the error.
func (h *Host) healthOf(busID string) (g *nvml.GPUHealth, why string) {
	health, err := h.nvml()
	for i := range health.GPUs {
		if health.GPUs[i].BusID == busID {
			return &health.GPUs[i], ""
		}
	}
	if err != nil {
		return nil, err.Error()
	}
	return nil, "NVML does not know it"
}
