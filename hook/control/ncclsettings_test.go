package control

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

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

// Opening a device of the container can have an effect on the host, and reading a file of procfs, too.
func TestNCCLSettingsOpenRegularFilesOnly(t *testing.T) {
	for kind, fill := range map[string]func(path string) error{
		"directory": func(path string) error { return os.Mkdir(path, 0o755) },
		"pipe":      func(path string) error { return unix.Mkfifo(path, 0o644) },
		"socket": func(path string) error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			return errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Close(fd))
		},
		// Without a driver for the number, opening the node is an error.
		"device": func(path string) error { return unix.Mknod(path, unix.S_IFCHR|0o644, int(unix.Mkdev(239, 239))) },
	} {
		proc := procWith(t, map[string]string{"9/cgroup": "0::/a\n", "9/environ": environ("NCCL_NET=IB"),
			"9/root/etc/hosts": ""})
		path := filepath.Join(proc, "9/root/etc/nccl.conf")
		err := fill(path)
		if errors.Is(err, unix.EPERM) {
			t.Logf("%s: %v", kind, err)
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		opened := opens(t, path)
		got, err := NCCLSettings(proc, container(9))
		if diff := cmp.Diff([]NCCLSetting{{[]int{9}, map[string]string{"NCCL_NET": "IB"}}}, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", kind, err, diff)
		}
		if opened() {
			t.Errorf("%s: opened", kind)
		}
	}
}

// opens watches a file, and returns a function that reports whether a process has opened the file since.
func opens(t *testing.T, path string) func() bool {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	return func() bool {
		_, err := unix.Read(fd, make([]byte, 4096))
		return err == nil
	}
}

func TestNCCLSettingsOfProcfsAreIgnored(t *testing.T) {
	proc := procWith(t, map[string]string{"9/cgroup": "0::/a\n"})
	if err := os.Symlink("/proc", filepath.Join(proc, "9/root")); err != nil {
		t.Fatal(err)
	}
	child := exec.Command("cat")
	child.Env = []string{"NCCL_NET=IB"}
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(in.Close(), child.Wait()) })
	text := environ(fmt.Sprintf("NCCL_CONF_FILE=/%d/environ", child.Process.Pid))
	if err := os.WriteFile(filepath.Join(proc, "9/environ"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := NCCLSettings(proc, container(9))
	if err != nil || len(got) != 1 || got[0].Variables["NCCL_NET"] != "" {
		t.Errorf("settings %v, %v", got, err)
	}
}

// A container chooses the number and the size of its variables.
func TestNCCLSettingsOfManyVariablesAreLimited(t *testing.T) {
	files := map[string]string{"9/cgroup": "0::/a\n"}
	var many []string
	for i := range 2 * maxNCCLVariables {
		many = append(many, fmt.Sprintf("NCCL_A%d=1", i))
	}
	for pid := range 2 * maxNCCLSettings {
		dir := fmt.Sprint(9 + pid)
		files[dir+"/cgroup"], files[dir+"/root/etc/hosts"] = "0::/a\n", ""
		files[dir+"/environ"] = environ(append([]string{"NCCL_LONG=" + strings.Repeat("a", maxNCCLValue),
			fmt.Sprintf("NCCL_B=%d", pid)}, many...)...)
	}
	got, err := NCCLSettings(procWith(t, files), container(9))
	if len(got) != maxNCCLSettings || err != nil {
		t.Fatalf("%d sets, %v", len(got), err)
	}
	for _, s := range got {
		if _, set := s.Variables["NCCL_LONG"]; set || len(s.Variables) != maxNCCLVariables {
			t.Errorf("process %v has %d variables, long: %v", s.PIDs, len(s.Variables), set)
		}
	}
}
