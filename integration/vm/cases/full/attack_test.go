//go:build vm

package full_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/attack"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
)

// attacked is the output of the program in a hostile container: the test binary with the arguments
// attack, the pid and the uid of a relay, a number of threads and a uid outside the container.
type attacked struct {
	Label     string   `json:"label"` // of AppArmor
	Filtered  bool     `json:"filtered"`
	Threads   int      `json:"threads"`   // with the relay's uid
	Control   []string `json:"control"`   // methods that trace a process of the container
	Succeeded []string `json:"succeeded"` // methods that trace the relay
	Outside   string   `json:"outside"`   // error of the uid outside
}

// beAttacker runs the attack, prints the output, and stays until the input ends.
func beAttacker(arguments []string) error {
	var numbers [4]int
	for i := range numbers {
		var err error
		if numbers[i], err = strconv.Atoi(arguments[i]); err != nil {
			return err
		}
	}
	relay, uid, threads, outside := numbers[0], uint32(numbers[1]), numbers[2], numbers[3]
	label, err := os.ReadFile("/proc/self/attr/current")
	if err != nil {
		return err
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/stat", relay)); err != nil {
		return fmt.Errorf("the relay is not in this PID namespace: %w", err)
	}
	a := attacked{Label: strings.TrimRight(string(label), "\x00\n"),
		Filtered: strings.Contains(string(status), "\nSeccomp:\t2\n")}
	own := exec.Command("/bin/busybox", "sleep", "1000000")
	own.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
	if err := own.Start(); err != nil {
		return err
	}
	trace := func(pid int) []string {
		result := make(chan []string)
		go attack.OnThread(func() { result <- attack.Trace(pid, uid, attack.For(time.Second)) })
		return <-result
	}
	a.Control = trace(own.Process.Pid)
	// Without control groups Podman does not end a process of the host's PID namespace.
	_ = own.Process.Kill()
	_ = own.Wait() // the status is that of SIGKILL
	a.Succeeded = trace(relay)
	made := make(chan syscall.Errno)
	for range threads {
		go attack.OnThread(func() {
			made <- attack.TakeUID(uid)
			select {}
		})
	}
	for range threads {
		if errno := <-made; errno != 0 {
			return fmt.Errorf("setresuid to %d: %w", uid, errno)
		}
		a.Threads++
	}
	if outside != 0 {
		go attack.OnThread(func() { made <- attack.TakeUID(uint32(outside)) })
		a.Outside = (<-made).Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// attackRelay runs the attack in a container of Podman with the default profiles and the host's PID
// namespace, during the caller's next steps, until end.
func attackRelay(t *testing.T, podman []string, rootfs string, relay, uid, threads, outside int) (a attacked,
	end func()) {
	t.Helper()
	argv := slices.Concat(podman, []string{"run", "--rm", "--interactive", "--network=none", "--pid=host", "--rootfs",
		rootfs, "/usr/bin/test", "attack",
		strconv.Itoa(relay), strconv.Itoa(uid), strconv.Itoa(threads), strconv.Itoa(outside)})
	cmd := exec.Command(argv[0], argv[1:]...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end = func() {
		in.Close()
		_ = cmd.Wait() // the status is that of Podman
	}
	if err := json.NewDecoder(out).Decode(&a); err != nil {
		end()
		t.Fatalf("the attack does not run: %v: %s", err, stderr.String())
	}
	t.Logf("the attack says %+v", a)
	if !a.Filtered {
		t.Error("Podman's seccomp profile is not in effect")
	}
	if !slices.Contains(a.Control, "/proc/PID/mem") {
		t.Errorf("the attacker cannot trace its own process: %q", a.Control)
	}
	if len(a.Succeeded) > 0 {
		t.Errorf("the attacker traces the relay by %q", a.Succeeded)
	}
	return a, end
}

// hostileRootFS makes a root file system with this test binary.
func hostileRootFS(t *testing.T, dir string) {
	t.Helper()
	self, err := os.Executable()
	if err == nil {
		err = bundle.RootFS(dir, []bundle.File{{Host: self, Container: "/usr/bin/test"}, {Host: "/bin/busybox"}})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A container of root's Podman, with Podman's seccomp and AppArmor profiles, capabilities and the
// host's PID namespace, takes the uid of another container's relay. The container cannot trace the
// relay. Twice as many threads as the relay may have tasks do not prevent a restart of the relay.
func TestPodmanContainerWithRelayUIDIsHarmless(t *testing.T) {
	const tasks = 128 // the minimum of the configuration
	root, err := os.MkdirTemp("/var/tmp", "pl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(root, 0o711); err != nil { // relays traverse the directory
		t.Fatal(err)
	}
	h, err := testbed.New(root, inside.Binaries, testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	testbed.MountAnchor(t, h.Layout)
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Slots, c.Relay.SlotSize, c.Relay.Tasks = 4, 1<<20, tasks
	}); err != nil {
		t.Fatal(err)
	}
	quiet, hostile := filepath.Join(root, "quiet"), filepath.Join(root, "hostile")
	if err := bundle.RootFS(quiet, []bundle.File{{Host: "/bin/busybox"}}); err != nil {
		t.Fatal(err)
	}
	hostileRootFS(t, hostile)
	cmd := exec.Command("podman", "--runtime", inside.Binaries+"/peerlane-runtime",
		"--runtime-flag", "peerlane-root="+root,
		"--runtime-flag", "peerlane-spec-dir="+h.CDIDir(), "--runtime-flag", "peerlane-device=peerlane.dev/lane=0",
		"run", "--rm", "--interactive", "--network=none", "--rootfs", quiet, "/bin/busybox", "sh", "-c", "read end")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Logf("the container: %v: %s", err, out.String())
		}
		inside.Eventually(t, "the relay ends", func() (bool, string) {
			all, err := generation.List(h.Layout)
			return err == nil && len(all) == 0, fmt.Sprint(all, err)
		})
	}()
	ready := func(starts int) (g generation.Info) {
		t.Helper()
		// The first Podman of a boot takes most of a minute in an emulated machine.
		for end := testutil.BeginFor(4 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
			all, err := generation.List(h.Layout)
			if len(all) == 1 && all[0].Status.State == generation.StateReady && all[0].Status.Starts == starts {
				return all[0]
			}
			if end.Over() {
				t.Fatalf("no relay after start %d: %+v (%v): %s", starts, all, err, out.String())
			}
		}
	}
	g := ready(1)
	relay := g.Status.Relay.PID
	limits := strings.Join(strings.Fields(read(t, fmt.Sprintf("/proc/%d/limits", relay))), " ")
	if !strings.Contains(limits, "Max processes unlimited unlimited") {
		t.Errorf("other processes of its uid count in the relay's limit: %s", limits)
	}
	a, end := attackRelay(t, []string{"podman"}, hostile, relay, g.Sandbox.UID, 2*tasks, 0)
	defer end()
	if !strings.HasPrefix(a.Label, "containers-default-") {
		t.Errorf("the container's AppArmor profile is %q", a.Label)
	}
	if a.Threads != 2*tasks {
		t.Errorf("%d threads of the relay's uid are made", a.Threads)
	}
	if err := unix.Kill(relay, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	g = ready(2)
	ctx, cancel := testutil.WithLimit(t.Context(), time.Minute)
	defer cancel()
	s, err := client.Dial(ctx, filepath.Join(h.Layout.SocketDir(g.ID), paths.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Statistics(ctx)
	if err := errors.Join(err, s.Close()); err != nil {
		t.Error(err)
	}
}
