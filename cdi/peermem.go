package cdi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/peerlane/peerlane/internal/fault"
)

// Peermem describes how NICs can read and write GPU memory on this host: through the kernel's
// DMA-BUF, or through a module that registers the memory behind a CUDA pointer.
type Peermem struct {
	// DMABUF reports that the kernel and NVIDIA's driver can export a GPU's memory as a DMA-BUF.
	DMABUF bool `json:"dmabuf"`
	// NoDMABUF is the reason if DMABUF is false.
	NoDMABUF string `json:"noDmabuf,omitempty"`
	// Module is nvidia_peermem, or its predecessor nv_peer_mem; empty if neither is loaded.
	Module string `json:"module,omitempty"`
	// Loaded reports that this call loaded the module.
	Loaded bool `json:"loaded,omitempty"`
}

// peermemModules are the names of the modules for modprobe.
var peermemModules = []string{"nvidia-peermem", "nv_peer_mem"}

// String returns a phrase such as "DMA-BUF and nvidia_peermem".
func (p Peermem) String() string {
	var methods []string
	if p.DMABUF {
		methods = append(methods, "DMA-BUF")
	}
	if p.Module != "" {
		methods = append(methods, p.Module)
	}
	if len(methods) == 0 {
		return "neither DMA-BUF (" + p.NoDMABUF + ") nor nvidia-peermem (not loaded)"
	}
	return strings.Join(methods, " and ")
}

var (
	kernelVersion = regexp.MustCompile(`^(\d+)\.(\d+)`)
	driverVersion = regexp.MustCompile(`\s(\d+)\.\d[0-9.]*\s`)
)

// FindPeermem detects the loaded module below sysfs (module/), and DMA-BUF support from the
// versions of driver and kernel below proc (driver/nvidia/version, sys/kernel/osrelease).
func FindPeermem(sysfs, proc string) (Peermem, error) {
	var p Peermem
	for _, module := range peermemModules {
		name := strings.ReplaceAll(module, "-", "_")
		_, err := os.Stat(filepath.Join(sysfs, "module", name))
		if err == nil {
			p.Module = name
			break
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return p, fmt.Errorf("find the module %s: %w", name, err)
		}
	}
	driver, err := readIfThere(proc, "driver/nvidia/version")
	if err != nil {
		return p, err
	}
	kernel, err := readIfThere(proc, "sys/kernel/osrelease")
	if err != nil {
		return p, err
	}
	p.NoDMABUF = noDMABUF(driver, kernel)
	p.DMABUF = p.NoDMABUF == ""
	return p, nil
}

func readIfThere(root, name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(text), err
}

// noDMABUF returns the reason why the host has no DMA-BUF, from /proc/driver/nvidia/version and
// /proc/sys/kernel/osrelease. The driver exports DMA-BUFs since 515 with open kernel modules, and
// RDMA imports DMA-BUFs since Linux 5.12.
func noDMABUF(driver, kernel string) string {
	if driver == "" {
		return "NVIDIA's driver is not loaded"
	}
	first, _, _ := strings.Cut(driver, "\n")
	if !strings.Contains(first, "Open Kernel Module") {
		return "NVIDIA's kernel modules are not the open ones"
	}
	if m := driverVersion.FindStringSubmatch(first); m != nil {
		if major, err := strconv.Atoi(m[1]); err == nil && major < 515 {
			return fmt.Sprintf("NVIDIA's driver has version %d; version 515 is needed", major)
		}
	}
	m := kernelVersion.FindStringSubmatch(kernel)
	if m == nil {
		return "the kernel's version is unknown"
	}
	major, _ := strconv.Atoi(m[1]) // digits
	minor, _ := strconv.Atoi(m[2])
	if major < 5 || major == 5 && minor < 12 {
		return fmt.Sprintf("the kernel has version %s; version 5.12 is needed", m[0])
	}
	return ""
}

// LoadPeermem is FindPeermem for a host that needs the module: modprobe loads a missing module.
// On a host without RDMA devices it loads nothing. The result is valid beside an error.
func LoadPeermem(sysfs, proc string, modprobe func(module string) error) (Peermem, error) {
	p, err := FindPeermem(sysfs, proc)
	if err != nil || p.Module != "" {
		return p, err
	}
	if rdma, err := os.ReadDir(filepath.Join(sysfs, "class/infiniband")); err != nil || len(rdma) == 0 {
		return p, nil
	}
	if _, err := os.Stat(filepath.Join(proc, "driver/nvidia/version")); err != nil {
		return p, nil // the driver is not loaded; a later refresh loads the module
	}
	var failures []error
	for _, module := range peermemModules {
		if err := modprobe(module); err != nil {
			failures = append(failures, err)
			continue
		}
		if p, err = FindPeermem(sysfs, proc); err != nil {
			return p, err
		}
		if p.Module != "" {
			p.Loaded = true
			return p, nil
		}
		failures = append(
			failures,
			fmt.Errorf("modprobe %s: it reports success, but %s/module does not list the module", module, sysfs),
		)
	}
	return p, &fault.Error{Operation: "load nvidia-peermem, as cdi.load_peermem requires", Cause: errors.Join(failures...),
		Remedy: "install the module of your driver, or remove the key of the configuration"}
}

// modprobeError is the error of a module that modprobe did not load.
type modprobeError struct {
	module string
	err    error
	// output is the output of modprobe in one line.
	output string
}

func (e *modprobeError) Error() string {
	return fmt.Sprintf("modprobe %s: %v: %s", e.module, e.err, e.output)
}

func (e *modprobeError) Unwrap() error { return e.err }

// Modprobe loads a kernel module.
func Modprobe(module string) error {
	path, err := exec.LookPath("modprobe")
	if err != nil {
		path = "/sbin/modprobe" // udev runs programs with a short PATH
	}
	// modprobe can block on a module that waits for its device.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	output, err := exec.CommandContext(ctx, path, module).CombinedOutput()
	if err != nil {
		return &modprobeError{module, err, strings.Join(strings.Fields(string(bytes.TrimSpace(output))), " ")}
	}
	return nil
}
