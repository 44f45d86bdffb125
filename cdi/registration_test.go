package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Contents of /proc/driver/nvidia/version.
const (
	openModule = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  " +
		"(dvs-builder@U22-I3-AM02-24-3)  Wed Sep 17 08:33:35 UTC 2025\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
	closedModule = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC " +
		"version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
	earlyModule = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  495.29.05  Release Build  " +
		"(archlinux-builder@)\n"
)

// procfs returns a root of procfs that holds these files; empty content means no file.
func procfs(t *testing.T, osrelease, driver string) string {
	t.Helper()
	proc := t.TempDir()
	for name, text := range map[string]string{"sys/kernel/osrelease": osrelease, "driver/nvidia/version": driver} {
		path := filepath.Join(proc, name)
		if text == "" {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return proc
}

func TestRegistrationFollowsDriverAndKernel(t *testing.T) {
	for _, test := range []struct {
		name           string
		kernel, driver string
		module         string
		want, reason   string
	}{
		{"the open module on a new kernel", "6.12.0-amd64\n", openModule, "", registrationDMABUF, ""},
		{"both ways", "6.12.0-amd64\n", openModule, "nvidia_peermem", registrationDMABUF, ""},
		{"the first kernel that can", "5.12.0\n", openModule, "", registrationDMABUF, ""},
		{"the last kernel that cannot", "5.11.22\n", openModule, "nvidia_peermem", registrationPeermem,
			"nvidia_peermem is loaded, and DMA-BUF is not available: the kernel has version 5.11"},
		{"an old kernel", "4.18.0-553.el8.x86_64\n", openModule, "", RegistrationBounce, "4.18"},
		{"the closed module with peermem", "6.12.0\n", closedModule, "nvidia_peermem", registrationPeermem, "open ones"},
		{"the closed module with peermem's predecessor", "6.12.0\n", closedModule, "nv_peer_mem", registrationPeermem,
			"nv_peer_mem"},
		{"the closed module alone", "6.12.0\n", closedModule, "", RegistrationBounce, "modprobe nvidia-peermem"},
		{"an open module before DMA-BUF", "6.12.0\n", earlyModule, "", RegistrationBounce, "515 is needed"},
		{"no driver", "6.12.0\n", "", "", RegistrationBounce, "NVIDIA's driver is not loaded"},
		{"another module", "6.12.0\n", "", "nvidia_peermem_not", RegistrationBounce, "not loaded"},
	} {
		t.Run(test.name, func(t *testing.T) {
			sysfs := t.TempDir()
			if test.module != "" {
				if err := os.MkdirAll(filepath.Join(sysfs, "module", test.module), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			found, err := FindPeermem(sysfs, procfs(t, test.kernel, test.driver))
			if err != nil {
				t.Fatal(err)
			}
			method, reason := found.Registration()
			if method != test.want || !strings.Contains(reason, test.reason) || (reason == "") != (test.reason == "") {
				t.Errorf("%s (%s), want %s for %q", method, reason, test.want, test.reason)
			}
			if strings.Contains(reason, "\n") {
				t.Errorf("the reason is no line: %q", reason)
			}
		})
	}
}
