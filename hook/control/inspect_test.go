package control

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/sandbox"
)

func TestParseStatusReadsEachField(t *testing.T) {
	none := func() *Confined { return &Confined{Groups: []int{}} }
	with := func(change func(*Confined)) *Confined {
		c := none()
		change(c)
		return c
	}
	for _, c := range []struct {
		name, text string
		want       *Confined // nil for an error
	}{
		{"nothing", "", none()},
		{"other lines", "Name:\tUid:\nUid\n\nThreads:\t4\n", none()},
		{"effective ids", "Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\n", with(func(c *Confined) { c.UID, c.GID = 2, 6 })},
		{"single ids", "Uid:\t1\nGid:\t5\n", with(func(c *Confined) { c.UID, c.GID = 1, 5 })},
		{"an id that is no number", "Uid:\t1\tx\n", nil},
		{"groups", "Groups:\t4 20 \n", with(func(c *Confined) { c.Groups = []int{4, 20} })},
		{"no groups", "Groups:\t\n", none()},
		{"a group that is no number", "Groups:\t4 x\n", nil},
		{"sets of capabilities", "CapInh:\t1\nCapPrm:\t2\nCapEff:\t4\nCapBnd:\t8\nCapAmb:\t10\n",
			with(func(c *Confined) { c.Capabilities = 0x1f })},
		{"all capabilities", "CapEff:\tffffffffffffffff\n", with(func(c *Confined) { c.Capabilities = ^uint64(0) })},
		{"a set above 64 bits", "CapEff:\t1ffffffffffffffff\n", nil},
		{"no new privileges", "NoNewPrivs:\t1\n", with(func(c *Confined) { c.NoNewPrivs = true })},
		{"new privileges", "NoNewPrivs:\t0\n", none()},
		{"a filter", "Seccomp:\t2\n", with(func(c *Confined) { c.Seccomp = true })},
		{"the strict mode", "Seccomp:\t1\n", none()},
	} {
		got, err := parseStatus(c.text)
		if (err == nil) != (c.want != nil) || err == nil && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
}

func TestUsageOfProcessIsParsed(t *testing.T) {
	for text, want := range map[string]uint64{
		"": 0, "VmSize:\t9 kB\nVmRSS:\t   12 kB\n": 12 << 10, "VmRSS: 12\n": 0, "VmRSS: x kB\n": 0, "RSS: 1 kB\n": 0,
	} {
		if got := resident(text); got != want {
			t.Errorf("%q: %d bytes, want %d", text, got, want)
		}
	}
	fields := strings.Repeat("x ", 11)
	for text, want := range map[string]float64{
		"": 0, "1 (a) " + fields + "150 75": 2.25, "1 (a) b) c) " + fields + "100 0 9": 1, "1 (a b) " + fields + "300 0 9": 3,
		"1 (a) " + fields + "100": 0, "1 (a) " + fields + "y 200": 2,
	} {
		if got := cpuTime(text); got != want {
			t.Errorf("%q: %v s, want %v", text, got, want)
		}
	}
	if u := usage(os.Getpid(), "role"); u.PID != os.Getpid() || u.Role != "role" || u.Resident == 0 || u.Devices == nil {
		t.Errorf("%+v", u)
	}
	if u := usage(1<<30, "gone"); !reflect.DeepEqual(u, Usage{PID: 1 << 30, Role: "gone", Devices: []string{}}) {
		t.Errorf("a process that has ended: %+v", u)
	}
}

// A file with the name of a device node is no device.
func TestOpenNodesListsDevicesOnce(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{os.DevNull, os.DevNull, "/dev/zero", filepath.Join(dir, "nvidia0")} {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	for nodes, want := range map[string][]string{
		"/dev/zer": {"/dev/zero"}, dir: {}, "/dev/none": {}, "zero": {},
	} {
		if got := openNodes(os.Getpid(), nodes); !slices.Equal(got, want) || got == nil {
			t.Errorf("%s: %v, want %v", nodes, got, want)
		}
	}
	if got := openNodes(os.Getpid(), "/dev/"); !slices.IsSorted(got) || !slices.Contains(got, os.DevNull) {
		t.Errorf("all devices: %v", got)
	}
	if got := openNodes(1<<30, "/"); got == nil || len(got) > 0 {
		t.Errorf("a process that has ended: %v", got)
	}
}

func TestConfinementDescribesLiveRelayOnly(t *testing.T) {
	own, pidfd, err := process.Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	pidfd.Close()
	info := generation.Info{}
	info.Sandbox.Mode = "auto"
	if got, want := confinement(info), (Confinement{Mode: "auto", Missing: []string{}}); !reflect.DeepEqual(got, want) {
		t.Errorf("without a relay: %+v", got)
	}
	info.Status.Sandbox = &sandbox.Report{Landlock: 3, Missing: []string{"a"}}
	info.Status.Relay = &own
	got := confinement(info)
	if got.Landlock != 3 || !slices.Equal(got.Missing, []string{"a"}) || got.Relay == nil {
		t.Fatalf("a relay: %+v", got)
	}
	if r := got.Relay; r.UID != os.Geteuid() || r.GID != os.Getegid() || r.OwnRoot || r.OwnNetwork {
		t.Errorf("this process: %+v", r)
	}
	other := own
	other.Start++
	info.Status.Relay = &other
	if got := confinement(info); got.Relay != nil {
		t.Errorf("a reused process id: %+v", got.Relay)
	}
	if c, err := readConfined(1 << 30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that has ended: %+v, %v", c, err)
	}
}

func TestConfinedReportsOwnNetworkNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes a network namespace")
	}
	for flags, want := range map[uintptr]Confined{
		0: {}, unix.CLONE_NEWNET: {OwnNetwork: true}, unix.CLONE_NEWNS: {}, // with the same root
	} {
		c := exec.Command("sleep", "1000")
		c.SysProcAttr = &unix.SysProcAttr{Cloneflags: flags}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		got, err := readConfined(c.Process.Pid)
		if err != nil || got.OwnNetwork != want.OwnNetwork || got.OwnRoot != want.OwnRoot {
			t.Errorf("flags %#x: %+v, %v", flags, got, err)
		}
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = c.Wait() // the signal
	}
}
