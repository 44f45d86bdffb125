package hook_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
)

func TestHoldersListOpenDevices(t *testing.T) {
	t.Parallel()
	node := newTerminal(t)
	holder := exec.Command("sh", "-c", `exec sleep 1000000 <"$0"`, node)
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(holder) })
	own, err := os.Open(node) // the list skips the calling process
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	testutil.Succeeds(t, "the holder", func() error {
		list, err := control.HoldersOf(paths.New(t.TempDir()), node, nil)
		if err != nil || len(list) != 1 || list[0].PID != holder.Process.Pid || list[0].Devices[0] != node {
			return errors.Join(fmt.Errorf("holders %+v", list), err)
		}
		if list[0].Command != "sleep" {
			return fmt.Errorf("the command is %q", list[0].Command)
		}
		return nil
	})
}

// newTerminal makes a pseudo-terminal, a character device that no process has open.
func newTerminal(t *testing.T) (path string) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("/dev/pts/%d", number)
}

// A container can name a file as a device. HoldersOf reports only character devices.
func TestHoldersOmitFilesThatAreNoCharacterDevices(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "nvidia7\x1b[2J")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	node := newTerminal(t)
	holder := exec.Command("sh", "-c", `exec 3<"$0" && exec sleep 1000000 <"$1"`, node, file)
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(holder) })
	testutil.Succeeds(t, "the holder", func() error {
		target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", holder.Process.Pid))
		if err == nil && target != file {
			err = fmt.Errorf("standard input is %s", target)
		}
		return err
	})
	list, err := control.HoldersOf(paths.New(t.TempDir()), dir, nil)
	if err != nil || len(list) > 0 {
		t.Errorf("holders of a regular file: %+v, %v", list, err)
	}
	list, err = control.HoldersOf(paths.New(t.TempDir()), node, nil)
	if err != nil || len(list) != 1 || len(list[0].Devices) != 1 {
		t.Errorf("holders of %s: %+v, %v", node, list, err)
	}
}

// HoldersOf adds the processes that NVML names, once per process, with the container. The process
// can be the init of the container or a child.
func TestHoldersOfAddsProcessesOfNVML(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread() // the signal of Pdeathsig follows the end of the thread, and Launch ends threads of goroutines
	defer runtime.UnlockOSThread()
	h := newHost(t)
	inside := exec.Command("sh", "-c", "sleep 1000000 & echo $!; wait")
	inside.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		inside.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
	}
	out, err := inside.StdoutPipe()
	if err == nil {
		err = inside.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(inside) })
	var child int
	if _, err := fmt.Fscan(out, &child); err != nil {
		t.Fatal(err)
	}
	outside := startProcess(t)
	h.launch(t, "trainer", inside.Process.Pid, "")
	const gone = 1 << 30 // above the largest pid of the kernel
	list, err := control.HoldersOf(h.layout, "/no/such/node", []topo.GPUProcess{
		{GPU: 3, PID: child, Memory: 512 << 20},
		{GPU: 5, PID: child, Graphics: true},
		{GPU: 3, PID: outside.Process.Pid},
		{GPU: 3, PID: os.Getpid()},
		{GPU: 0, PID: gone},
		{GPU: 3, PID: inside.Process.Pid},
	})
	if err != nil {
		t.Fatal(err)
	}
	got := map[int]control.Holder{}
	for i, holder := range list {
		got[holder.PID] = holder
		if i > 0 && list[i-1].PID >= holder.PID {
			t.Errorf("not in order, or twice: %+v", list)
		}
	}
	want := map[int]control.Holder{
		child: {
			PID:       child,
			Command:   "sleep",
			Container: "trainer",
			Devices:   []string{},
			Uses:      []control.Use{{GPU: 3, Kind: "compute", Memory: 512 << 20}, {GPU: 5, Kind: "graphics"}},
		},
		inside.Process.Pid: {
			PID:       inside.Process.Pid,
			Command:   "sh",
			Container: "trainer",
			Devices:   []string{},
			Uses:      []control.Use{{GPU: 3, Kind: "compute"}},
		},
		gone: {PID: gone, Devices: []string{}, Uses: []control.Use{{GPU: 0, Kind: "compute"}}},
	}
	// Where the tests run in a container of an engine, the process is in that container too.
	other := got[outside.Process.Pid]
	want[other.PID] = control.Holder{
		PID:       outside.Process.Pid,
		Command:   other.Command,
		Container: other.Container,
		Devices:   []string{},
		Uses:      []control.Use{{GPU: 3, Kind: "compute"}},
	}
	if diff := cmp.Diff(want, got); diff != "" || other.Container == "trainer" {
		t.Errorf("outside is in %q: %s", other.Container, diff)
	}
	end(inside)
	h.gone(t)
}

func TestControlGroupPathNamesContainer(t *testing.T) {
	id, outer := strings.Repeat("4f2a", 16), strings.Repeat("0b1c", 16)
	for text, want := range map[string]string{
		"0::/system.slice/docker-" + id + ".scope\n":                                                                     id,
		"0::/machine.slice/libpod-" + id + ".scope/container\n":                                                          id,
		"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + id + ".scope":                            id,
		"0::/machine.slice/libpod-conmon-" + id + ".scope\n":                                                             "",
		"12:devices:/docker/" + id + "\n0::/\n":                                                                          id,
		"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podd6b5.slice/cri-containerd-" + id + ".scope": id,
		"0::/kubepods/besteffort/podd6b5/" + id + "\n":                                                                   id,
		// nested
		"0::/docker/" + outer + "/docker/" + id + "/init.scope\n": id,
		"0::/user.slice/session-1.scope\n":                        "",
		"0::/" + id + "0\n":                                       "",
		"4:pids:/x\n":                                             "",
		"nonsense":                                                "",
	} {
		if got := control.ContainerOfCgroup(text); got != want {
			t.Errorf("%q is of container %q, want %q", text, got, want)
		}
	}
}
