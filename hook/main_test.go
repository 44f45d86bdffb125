package hook_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/hook/supervisor"
	"github.com/peerlane/peerlane/relay/launch"
)

// bin is a folder with links to the test binary. A link has the name of a program that package
// hook starts, and the test binary acts as that program.
var bin string

func TestMain(m *testing.M) {
	self, err := os.Executable()
	if err != nil {
		fatal(err)
	}
	switch filepath.Base(self) {
	case "peerlane-hook":
		hookMain()
	case "peerlane-relay":
		relayMain()
	case "peerlane-probe":
		probeMain()
	default:
		os.Exit(test(m, self))
	}
}

func test(m *testing.M, self string) int {
	var err error
	if bin, err = os.MkdirTemp("", "peerlane-hook-test-"); err != nil {
		fatal(err)
	}
	defer os.RemoveAll(bin)
	if err := os.Chmod(bin, 0o755); err != nil {
		fatal(err)
	}
	for _, name := range []string{"peerlane-hook", "peerlane-relay", "peerlane-probe"} {
		if os.Link(self, filepath.Join(bin, name)) == nil {
			continue
		}
		// bin is on another file system.
		text, err := os.ReadFile(self)
		if err == nil {
			err = os.WriteFile(filepath.Join(bin, name), text, 0o755)
		}
		if err != nil {
			fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(bin, "peerlane-relay"), 0o711); err != nil { // the mode in the packages
		fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(bin, "uverbs/uverbs0"), 0o755); err != nil {
		fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bin, "uverbs/uverbs0/ibdev"), []byte("verbs0\n"), 0o644); err != nil {
		fatal(err)
	}
	status := m.Run()
	if text, err := os.ReadFile(filepath.Join(bin, "races")); err == nil {
		fmt.Fprintf(os.Stderr, "in a supervisor: %s\n", text)
		return 1
	}
	return status
}

// reportRace saves output of the race detector from the log of the supervisor. By then the log is
// unlinked and still open.
func reportRace() error {
	if info, err := os.Stderr.Stat(); err != nil || !info.Mode().IsRegular() {
		return err
	}
	text, err := os.ReadFile("/proc/self/fd/2")
	if err == nil && bytes.Contains(text, []byte("DATA RACE")) {
		var self string
		if self, err = os.Executable(); err == nil {
			err = os.WriteFile(filepath.Join(filepath.Dir(self), "races"), text, 0o600)
		}
	}
	return err
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// hookMain does the work of cmd/peerlane-hook, with simpler errors for the command line.
func hookMain() {
	if os.Args[1] == "confine" {
		if strings.Contains(os.Getenv("TEST_FAULT"), "killed in its sandbox") &&
			os.Mkdir(filepath.Join(os.Getenv("TEST_DIR"), "killed"), 0o700) == nil {
			fatal(unix.Kill(os.Getpid(), unix.SIGKILL))
		}
		fatal(sandbox.Main(os.Args[2:]))
	}
	flags := flag.NewFlagSet("", flag.ExitOnError)
	root := flags.String("root", "/", "")
	generation := flags.String("generation", "", "")
	var devices hook.Devices
	for name, list := range map[string]*[]string{"lane": &devices.Lanes, "gpu": &devices.GPUs, "nic": &devices.NICs} {
		flags.Func(name, "", func(value string) error { *list = append(*list, value); return nil })
	}
	flags.BoolVar(&devices.Auto, "auto", false, "")
	if err := flags.Parse(os.Args[2:]); err != nil {
		fatal(err)
	}
	l := paths.New(*root)
	var err error
	if self, err := os.Executable(); err == nil {
		sandbox.Uverbs = filepath.Join(filepath.Dir(self), "uverbs")
	}
	switch os.Args[1] {
	case "supervise":
		err = errors.Join(supervisor.Supervise(l, *generation), reportRace())
	case "accept":
		err = errors.Join(supervisor.TakeOver(os.Stdin), reportRace())
	case "create":
		var state hook.State
		var warning error
		if state, err = hook.ReadState(os.Stdin); err == nil {
			warning, err = hook.Create(hook.ReadAhead(l), state, "", devices)
		}
		if err == nil && len(devices.GPUs)+len(devices.NICs) == 0 && os.Getenv("TEST_WARNINGS") == "" {
			err = warning // with GPUs or NICs the warning stays a warning: a machine may refuse to raise limits
		} else if warning != nil {
			fmt.Fprintln(os.Stderr, warning)
		}
	case "remove":
		_, err = collector.Collect(l)
	}
	if err != nil {
		fatal(err)
	}
	syscall.Exit(0) // os.Exit sleeps a second under the race detector
}

// relayMain is a relay in the form of package launch, with the faults of TEST_FAULT. It reports
// the start and the received messages to TEST_DIR.
func relayMain() {
	fault := func(name string) bool { return strings.Contains(os.Getenv("TEST_FAULT"), name) }
	var fds []string
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		fatal(err)
	}
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		// The Go runtime of the process has opened these files.
		own := to == "anon_inode:[eventpoll]" || to == "anon_inode:[eventfd]" || strings.HasPrefix(to, "/proc/") ||
			strings.HasPrefix(to, "/sys/fs/cgroup/")
		if err == nil && !own {
			fds = append(fds, e.Name()+" "+strings.TrimRight(to, "0123456789[]"))
		}
	}
	cwd, err := os.Getwd()
	if err != nil {
		fatal(err)
	}
	session, err := unix.Getsid(0)
	if err != nil {
		fatal(err)
	}
	report(
		"start",
		relayStart{
			PID:         os.Getpid(),
			Args:        os.Args[1:],
			Environment: os.Environ(),
			Descriptors: fds,
			Directory:   cwd,
			OwnSession:  session != 0 && session == os.Getppid(),
		},
	)

	if os.Args[1] == "self-test" {
		testerMain(fault)
	}
	if os.Args[1] == "rdma-test" {
		tripleTesterMain(fault)
	}
	if fault("attacks") {
		attackMain(fault("only"))
	}
	if fault("dies") {
		fmt.Fprintln(os.Stderr, "test relay: no libcuda")
		os.Exit(3)
	}
	if fault("stubborn") {
		signal.Ignore(unix.SIGTERM)
	}
	if fault("silent") {
		time.Sleep(time.Hour)
	}
	if fault("forks") {
		report("forks", makeProcesses())
	}
	if fault("talks") {
		signal.Ignore(unix.SIGPIPE)
		for line := range 20_000 { // 20 MB
			fmt.Fprintf(os.Stderr, "test relay: %0986d\n", line)
		}
	}
	if fault("lingers") {
		linger()
	}
	if fault("late") {
		time.Sleep(300 * time.Millisecond)
	}
	supervisor, err := net.FileConn(os.NewFile(launch.FDSupervisor, "supervisor"))
	if err != nil {
		fatal(err)
	}
	go func() {
		buffer := make([]byte, launch.MaxDatagram)
		for n := 0; ; n++ {
			size, err := supervisor.Read(buffer)
			if err != nil || size == 0 {
				return // the supervisor has ended; the relay goes on
			}
			status := launch.Status{OK: true}
			var message struct {
				launch.Request
				launch.Config
			}
			var admission launch.Admission
			if err := json.Unmarshal(buffer[:size], &admission); err == nil && admission.Claim != 0 {
				report("admission", admission)
				continue
			}
			if err := json.Unmarshal(buffer[:size], &message); err != nil {
				status = launch.Status{Error: err.Error()}
			}
			switch message.Request.Request {
			case launch.RequestReport:
				if fault("no report") {
					report("asked", message.Request)
					continue
				}
				status.Report = &launch.Report{Contexts: []string{"0000:17:00.0"}}
			case launch.RequestEnd:
				go func() {
					switch {
					case fault("stubborn"), fault("never drained"):
						return
					case fault("slow drain"):
						time.Sleep(time.Second)
						report("end", "drained")
					}
					syscall.Exit(0)
				}()
			default:
				report("config", message.Config)
			}
			if fault("refuses all") || fault("refuses changes") && n > 0 {
				status = launch.Status{Error: "no such GPU"}
			}
			text, err := json.Marshal(status)
			if err == nil {
				_, err = supervisor.Write(text)
			}
			if err != nil {
				fatal(err)
			}
		}
	}()
	go func() { // send the claims of the test
		for name := filepath.Join(os.Getenv("TEST_DIR"), "claim"); ; time.Sleep(10 * time.Millisecond) {
			text, err := os.ReadFile(name)
			if err != nil {
				continue
			}
			if err := os.Remove(name); err != nil {
				fatal(err)
			}
			if _, err := supervisor.Write(text); err != nil {
				report("admission", launch.Admission{Error: "nobody answers"})
			}
		}
	}()
	if fault("ends") {
		go endAs(supervisor)
	}
	listener, err := net.FileListener(os.NewFile(launch.FDClients, "clients"))
	if err != nil {
		fatal(err)
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				fatal(err)
			}
			if fault("talks") {
				fmt.Fprintln(os.Stderr, "test relay: a client")
				// The message is unrequested. After the end of the supervisor the write fails.
				_, _ = supervisor.Write([]byte(`{"error":"no such GPU"}`))
			}
			fmt.Fprintf(conn, "relay %d", os.Getpid())
			conn.Close()
		}
	}()
	fds3 := []unix.PollFd{{Fd: launch.FDInit, Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds3, -1); err != unix.EINTR {
			break
		}
	}
	if fault("stubborn") {
		time.Sleep(time.Hour)
	}
	if fault("slow end") {
		time.Sleep(300 * time.Millisecond)
		report("end", "of itself")
	}
	syscall.Exit(0) // os.Exit sleeps a second under the race detector
}

type relayStart struct {
	PID         int
	Args        []string
	Environment []string
	Descriptors []string
	Directory   string
	OwnSession  bool
}

// report writes value as a JSON file to TEST_DIR.
func report(kind string, value any) {
	text, err := json.Marshal(value)
	if err == nil {
		name := filepath.Join(os.Getenv("TEST_DIR"), fmt.Sprintf("%s-%d-%d", kind, os.Getpid(), time.Now().UnixNano()))
		if err = os.WriteFile(name+".new", text, 0o600); err == nil {
			err = os.Rename(name+".new", name)
		}
	}
	if err != nil {
		fatal(err)
	}
}

// reports reads the documents of a kind; those of a process are sorted by time.
func reports[T any](t *testing.T, dir, kind string) []T {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, kind+"-*[0-9]"))
	if err != nil {
		t.Fatal(err)
	}
	var out []T
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var v T
		if err := json.Unmarshal(text, &v); err != nil {
			t.Fatal(err)
		}
		out = append(out, v)
	}
	return out
}

// startProcess starts a program that runs until the test kills the process.
func startProcess(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(cmd) })
	return cmd
}

// end kills a process and reaps it.
func end(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // the process may have ended
	_ = cmd.Wait()         // killed
}
