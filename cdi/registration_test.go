package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadRegistration(t *testing.T) {
	const (
		open        = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3-AM02-24-3)  Wed Sep 17 08:33:35 UTC 2025\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
		closed      = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
		beforeItWas = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  495.29.05  Release Build  (archlinux-builder@)\n"
	)
	for _, test := range []struct {
		name            string
		kernel, driver  string
		module          string
		want, butReason string
	}{
		{"the open module on a new kernel", "6.12.0-amd64\n", open, "", RegistrationDMABUF, ""},
		{"both ways", "6.12.0-amd64\n", open, "nvidia_peermem", RegistrationDMABUF, ""},
		{"the first kernel that can", "5.12.0\n", open, "", RegistrationDMABUF, ""},
		{"the last kernel that cannot", "5.11.22\n", open, "nvidia_peermem", RegistrationPeermem, "the kernel is 5.11.22 and has to be 5.12"},
		{"an old kernel", "4.18.0-553.el8.x86_64\n", open, "", RegistrationBounce, "4.18.0-553.el8.x86_64"},
		{"the closed module with peermem", "6.12.0\n", closed, "nvidia_peermem", RegistrationPeermem, "open kernel module"},
		{"the closed module with peermem's predecessor", "6.12.0\n", closed, "nv_peer_mem", RegistrationPeermem, "open kernel module"},
		{"the closed module alone", "6.12.0\n", closed, "", RegistrationBounce, "modprobe nvidia-peermem"},
		{"an open module before DMA-BUF", "6.12.0\n", beforeItWas, "", RegistrationBounce, "515 or newer"},
		{"no driver", "6.12.0\n", "", "", RegistrationBounce, "NVIDIA's driver is not loaded"},
		{"another module", "6.12.0\n", "", "nvidia_peermem_not", RegistrationBounce, "not loaded"},
		{"no kernel that says what it is", "", open, "", RegistrationBounce, "the kernel's release is unknown"},
		{"a kernel of words", "linux\n", open, "", RegistrationBounce, `"linux" cannot be read`},
		{"a driver of words", "6.12.0\n", "Open Kernel Module\n", "", RegistrationBounce, "515 or newer"},
	} {
		t.Run(test.name, func(t *testing.T) {
			sysfs, proc := t.TempDir(), t.TempDir()
			write := func(path, text string) {
				if text == "" {
					return
				}
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			write(filepath.Join(proc, "sys/kernel/osrelease"), test.kernel)
			write(filepath.Join(proc, "driver/nvidia/version"), test.driver)
			if test.module != "" {
				write(filepath.Join(sysfs, "module", test.module, "refcnt"), "0\n")
			}
			got := ReadRegistration(sysfs, proc)
			if got.Kind != test.want || !strings.Contains(got.Reason, test.butReason) || got.Reason == "" && test.butReason != "" {
				t.Errorf("%+v, want %s for %q", got, test.want, test.butReason)
			}
			if strings.Contains(got.Reason, "\n") {
				t.Errorf("the reason is no line: %q", got.Reason)
			}
		})
	}
}
