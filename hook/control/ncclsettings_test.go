package control

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
)

// procWith makes a procfs from files below its directory.
func procWith(t *testing.T, files map[string]string) string {
	t.Helper()
	proc := t.TempDir()
	for name, text := range files {
		path := filepath.Join(proc, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return proc
}

func container(pid int) generation.Info {
	return generation.Info{Generation: generation.Generation{Init: process.Process{PID: pid}}}
}

func environ(variables ...string) string { return strings.Join(variables, "\x00") + "\x00" }

func TestNCCLSettingsFollowNCCLsOrderOfFiles(t *testing.T) {
	proc := procWith(t, map[string]string{
		"9/cgroup":                  "0::/a\n",
		"9/environ":                 environ("PATH=/bin", "HOME=/home/u", "NCCL_NET=gIB"),
		"9/root/home/u/.nccl.conf":  "# NCCL_A=0\nNCCL_NET=Socket\nNCCL_PROTO=Simple\r\nOTHER=1\n",
		"9/root/etc/nccl.conf":      "NCCL_PROTO=LL\nNCCL_NET_PLUGIN=peerlane\n",
		"10/cgroup":                 "0::/a\n",
		"10/environ":                environ("HOME=/home/u", "NCCL_CONF_FILE=/mine"),
		"10/root/mine":              "NCCL_NET_PLUGIN=ofi\n",
		"10/root/home/u/.nccl.conf": "NCCL_PROTO=Simple\n",
		"10/root/etc/nccl.conf":     "NCCL_NET_PLUGIN=peerlane\n",
		"11/cgroup":                 "0::/b\n", // of another container
		"11/environ":                environ("NCCL_NET=IB"),
		"11/root/etc/hosts":         "",
	})
	got, err := NCCLSettings(proc, container(9))
	want := []NCCLSetting{
		{[]int{9}, map[string]string{"NCCL_NET": "gIB", "NCCL_PROTO": "Simple", "NCCL_NET_PLUGIN": "peerlane"}},
		{[]int{10}, map[string]string{"NCCL_CONF_FILE": "/mine", "NCCL_NET_PLUGIN": "ofi"}},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestNCCLSettingsOfEqualProcessesAreOne(t *testing.T) {
	proc := procWith(t, map[string]string{
		"9/cgroup": "0::/a\n", "9/environ": environ("A=1"), "9/root/etc/hosts": "",
		"8/cgroup": "0::/a\n", "8/environ": environ("A=2"), "8/root/etc/hosts": "",
		"7/cgroup": "0::/a\n", // the process ends
	})
	got, err := NCCLSettings(proc, container(9))
	want := []NCCLSetting{{[]int{8, 9}, map[string]string{}}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestNCCLSettingsOfEndedContainerAreEmpty(t *testing.T) {
	got, err := NCCLSettings(procWith(t, map[string]string{"1/cgroup": "0::/\n"}), container(9))
	if len(got) != 0 || err != nil {
		t.Errorf("settings %v, %v", got, err)
	}
}

// The container chooses the links of its root directory.
func TestNCCLSettingsStayBelowTheRootOfTheContainer(t *testing.T) {
	proc := procWith(t, map[string]string{"9/cgroup": "0::/a\n", "9/environ": environ("A=1"), "9/root/etc/hosts": "",
		"9/root/run/peerlane/nccl.conf": "NCCL_NET_PLUGIN=peerlane\n"})
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("NCCL_SECRET=1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for target, want := range map[string]map[string]string{
		secret:                    {},
		"../../../../" + secret:   {},
		"/run/peerlane/nccl.conf": {"NCCL_NET_PLUGIN": "peerlane"},
		"/run/peerlane":           {},
	} {
		link := filepath.Join(proc, "9/root/etc/nccl.conf")
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		got, err := NCCLSettings(proc, container(9))
		if diff := cmp.Diff([]NCCLSetting{{[]int{9}, want}}, got); diff != "" || err != nil {
			t.Errorf("link to %s: %v (-want +got):\n%s", target, err, diff)
		}
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
	}
}
