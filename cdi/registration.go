package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// RegistrationVariable tells the programs of a container with a gpu= or nic= by
// which way GPU memory is registered with a NIC here.
const RegistrationVariable = "PEERLANE_REGISTRATION"

// Ways of registering GPU memory with a NIC, best first.
const (
	// RegistrationDMABUF is by a DMA-BUF descriptor of it (ibv_reg_dmabuf_mr).
	RegistrationDMABUF = "dmabuf"
	// RegistrationPeermem is by its address (ibv_reg_mr), which the module
	// nvidia-peermem, or nv_peer_mem before it, makes out.
	RegistrationPeermem = "peermem"
	// RegistrationBounce is not at all: host memory is registered, and data is
	// copied through it.
	RegistrationBounce = "bounce"
)

// Registration is a way of registering GPU memory with NICs.
type Registration struct {
	Kind string
	// Reason is a sentence on why it is not a better one; empty for the best.
	Reason string
}

func (r Registration) variable() string { return RegistrationVariable + "=" + r.Kind }

func (g *generator) registration() Registration {
	if g.o.Registration.Kind != "" {
		return g.o.Registration
	}
	return ReadRegistration(g.plan.Source.Sysfs, "/proc")
}

// What DMA-BUF needs: RDMA in the kernel takes it from 5.12 on, and NVIDIA's open
// kernel module gives it, from release 515 on.
const (
	dmabufKernelMajor, dmabufKernelMinor = 5, 12
	dmabufDriver                         = 515
)

// ReadRegistration finds the best way that the kernel of a host offers, without
// CUDA: what is loaded, SYSFS/module/nvidia_peermem or nv_peer_mem, and for
// DMA-BUF the kernel's release (PROC/sys/kernel/osrelease) and which of NVIDIA's
// two kernel modules it runs (PROC/driver/nvidia/version says "Open Kernel
// Module"). A kernel or driver that a distributor has changed may do more than
// its number says; whether one GPU and one NIC do it, only trying tells
// (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, ibv_reg_dmabuf_mr).
func ReadRegistration(sysfs, proc string) Registration {
	noDMABUF := dmabufMissing(proc)
	if noDMABUF == nil {
		return Registration{Kind: RegistrationDMABUF}
	}
	for _, module := range []string{"nvidia_peermem", "nv_peer_mem"} {
		if _, err := os.Stat(filepath.Join(sysfs, "module", module)); err == nil {
			return Registration{RegistrationPeermem, fmt.Sprintf("DMA-BUF, which needs no module, is not there: %v", noDMABUF)}
		}
	}
	return Registration{RegistrationBounce, fmt.Sprintf("no NIC can reach GPU memory: for DMA-BUF %v; and the module nvidia_peermem is not loaded (modprobe nvidia-peermem)", noDMABUF)}
}

var (
	kernelRelease = regexp.MustCompile(`^(\d+)\.(\d+)`)
	driverRelease = regexp.MustCompile(`\s(\d+)\.\d+(\.\d+)*\s`)
)

// dmabufMissing says what DMA-BUF lacks here; nil for nothing.
func dmabufMissing(proc string) error {
	release, err := os.ReadFile(filepath.Join(proc, "sys/kernel/osrelease"))
	if err != nil {
		return fmt.Errorf("the kernel's release is unknown: %w", err)
	}
	m := kernelRelease.FindStringSubmatch(string(release))
	if m == nil {
		return fmt.Errorf("the kernel's release %q cannot be read", strings.TrimSpace(string(release)))
	}
	major, errMajor := strconv.Atoi(m[1])
	minor, errMinor := strconv.Atoi(m[2])
	if errors.Join(errMajor, errMinor) != nil || major < dmabufKernelMajor || major == dmabufKernelMajor && minor < dmabufKernelMinor {
		return fmt.Errorf("the kernel is %s and has to be %d.%d or newer", strings.TrimSpace(string(release)), dmabufKernelMajor, dmabufKernelMinor)
	}
	text, err := os.ReadFile(filepath.Join(proc, "driver/nvidia/version"))
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("NVIDIA's driver is not loaded")
	} else if err != nil {
		return fmt.Errorf("NVIDIA's driver does not tell its version: %w", err)
	}
	// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release
	// Build …", or "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03 …".
	line, _, _ := strings.Cut(string(text), "\n")
	if !strings.Contains(line, "Open Kernel Module") {
		return errors.New("NVIDIA's driver has to run its open kernel module, and this is not it")
	}
	if m := driverRelease.FindStringSubmatch(line); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil && n >= dmabufDriver {
			return nil
		}
	}
	return fmt.Errorf("NVIDIA's driver has to be of release %d or newer (%s)", dmabufDriver, line)
}
