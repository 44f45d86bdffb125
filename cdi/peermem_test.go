package cdi

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

const openDriver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  " +
	"(dvs-builder)  Wed\nGCC version: gcc 12\n"

// trees returns roots of sysfs and procfs that hold these files.
func trees(t *testing.T, files map[string]string) (sysfs, proc string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "sys"), filepath.Join(dir, "proc")
}

func TestFindPeermemReportsModuleAndDMABUF(t *testing.T) {
	const (
		driver = "proc/driver/nvidia/version"
		kernel = "proc/sys/kernel/osrelease"
		closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Wed\n"
	)
	for _, test := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"nothing", nil, "neither DMA-BUF (NVIDIA's driver is not loaded) nor nvidia-peermem (not loaded)"},
		{"a kernel without a version", map[string]string{driver: openDriver},
			"neither DMA-BUF (the kernel's version is unknown"},
		{"no driver", map[string]string{kernel: "6.8.0\n"},
			"neither DMA-BUF (NVIDIA's driver is not loaded) nor nvidia-peermem (not loaded)"},
		{"the open modules", map[string]string{driver: openDriver, kernel: "6.8.0-45-generic\n"}, "DMA-BUF"},
		{"nvidia-peermem", map[string]string{driver: closed, kernel: "6.8.0\n",
			"sys/module/nvidia_peermem/version": "535.161.08\n"}, "nvidia_peermem"},
		{"the predecessor", map[string]string{driver: closed, kernel: "6.8.0\n", "sys/module/nv_peer_mem/version": "1.3\n"},
			"nv_peer_mem"},
		{"both", map[string]string{driver: openDriver, kernel: "6.8.0\n", "sys/module/nvidia_peermem/version": "580\n"},
			"DMA-BUF and nvidia_peermem"},
	} {
		t.Run(test.name, func(t *testing.T) {
			found, err := FindPeermem(trees(t, test.files))
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(found.String(), test.want) || found.DMABUF != strings.HasPrefix(test.want, "DMA-BUF") {
				t.Errorf("found %q, want %q", found, test.want)
			}
		})
	}
}

func TestLoadPeermemLoadsMissingModule(t *testing.T) {
	host := map[string]string{
		"proc/sys/kernel/osrelease":   "6.8.0\n",
		"proc/driver/nvidia/version":  openDriver,
		"sys/class/infiniband/mlx5_0": "",
		"sys/module/nvidia/version":   "580\n",
	}
	without := func(name string) map[string]string {
		files := map[string]string{}
		for n, text := range host {
			if n != name {
				files[n] = text
			}
		}
		return files
	}
	for _, test := range []struct {
		name  string
		files map[string]string
		// exists is the module that the host has.
		exists string
		tried  []string
		want   string
		fails  bool
	}{
		{"the module", host, "nvidia-peermem", []string{"nvidia-peermem"}, "DMA-BUF and nvidia_peermem", false},
		{"the predecessor", host, "nv_peer_mem", []string{"nvidia-peermem", "nv_peer_mem"}, "DMA-BUF and nv_peer_mem", false},
		{"neither", host, "", []string{"nvidia-peermem", "nv_peer_mem"}, "DMA-BUF", true},
		{"no NIC", without("sys/class/infiniband/mlx5_0"), "nvidia-peermem", nil, "DMA-BUF", false},
		{"no driver", without("proc/driver/nvidia/version"), "nvidia-peermem", nil, "neither", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			sysfs, proc := trees(t, test.files)
			var tried []string
			modprobe := func(module string) error {
				tried = append(tried, module)
				if module != test.exists {
					return &modprobeError{module: module, err: fs.ErrNotExist}
				}
				return os.MkdirAll(filepath.Join(sysfs, "module", strings.ReplaceAll(module, "-", "_")), 0o755)
			}
			for again := range 2 {
				found, err := LoadPeermem(sysfs, proc, modprobe)
				if (err != nil) != test.fails {
					t.Errorf("error %v", err)
				}
				if f, ok := errors.AsType[*fault.Error](err); test.fails && (!ok || f.Remedy == "" ||
					f.Operation != "load nvidia-peermem, as cdi.load_peermem requires") {
					t.Errorf("error %v", err)
				}
				for _, module := range test.tried {
					if test.fails && !testutil.HasError(err, &modprobeError{module: module, err: fs.ErrNotExist}) {
						t.Errorf("error %v does not have the failure of %s", err, module)
					}
				}
				if !strings.HasPrefix(found.String(), test.want) {
					t.Errorf("found %q, want %q", found, test.want)
				}
				if want := again == 0 && !test.fails && len(test.tried) > 0; found.Loaded != want {
					t.Errorf("the time %d, loaded is %t", again, found.Loaded)
				}
				if test.fails {
					break
				}
			}
			if diff := cmp.Diff(test.tried, tried); diff != "" {
				t.Errorf("modprobe (-want +got):\n%s", diff)
			}
		})
	}
}

// The error includes the output of modprobe.
func TestLoadPeermemReportsModprobeOutput(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	write := func(script string) {
		if err := os.WriteFile(filepath.Join(dir, "modprobe"), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("[ $# = 1 ] && [ \"$1\" = nvidia-peermem ]\n")
	if err := Modprobe("nvidia-peermem"); err != nil {
		t.Error(err)
	}
	write("echo 'modprobe: FATAL: Module not found.' >&2; exit 1\n")
	err := Modprobe("nvidia-peermem")
	exit, exited := errors.AsType[*exec.ExitError](err)
	if e, ok := errors.AsType[*modprobeError](err); !ok || e.module != "nvidia-peermem" || !exited ||
		exit.ExitCode() != 1 ||
		e.output != "modprobe: FATAL: Module not found." {
		t.Errorf("error %v", err)
	}
}
