package hook_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// launcher acts as systemd with peerlane-relay.socket: per connection, launcher starts
// peerlane-hook accept with the connection as standard input and a file as journal.
type launcher struct {
	journal string
	// before runs before the service of a connection starts; false prevents the start.
	before func(*net.UnixConn) bool

	mutex    sync.Mutex
	services []*exec.Cmd
}

// startLauncher adds systemd to host h.
func startLauncher(t *testing.T, h host, before func(*net.UnixConn) bool) *launcher {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(h.layout.Root, "run/systemd/system"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	// Services of systemd inherit no descriptors.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	l := &launcher{journal: filepath.Join(t.TempDir(), "journal"), before: before}
	// The address of a Unix socket has at most 108 bytes.
	dir, err := os.Open(h.layout.Run())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	address := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(h.layout.Launcher()))
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: address, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.AcceptUnix()
			if err != nil {
				return // closed
			}
			serving.Go(func() {
				if err := l.serve(conn); err != nil {
					t.Error(err)
				}
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		serving.Wait()
	})
	return l
}

func (l *launcher) serve(conn *net.UnixConn) error {
	defer conn.Close()
	if l.before != nil && !l.before(conn) {
		return nil
	}
	file, err := conn.File()
	if err != nil {
		return err
	}
	defer file.Close()
	journal, err := os.OpenFile(l.journal, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer journal.Close()
	cmd := exec.Command(filepath.Join(bin, "peerlane-hook"), "accept")
	cmd.Dir, cmd.Env = "/", []string{"LANG=C", "NOTIFY_SOCKET=/nowhere"}
	cmd.Stdin, cmd.Stderr = file, journal
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	conn.Close() // as systemd does
	file.Close()
	l.mutex.Lock()
	l.services = append(l.services, cmd)
	l.mutex.Unlock()
	_ = cmd.Wait() // tests examine the results and the journal
	return nil
}

// started returns the services that launcher started.
func (l *launcher) started() []*exec.Cmd {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return slices.Clone(l.services)
}

// awaitJournal waits until the journal has a text.
func (l *launcher) awaitJournal(t *testing.T, text string) {
	t.Helper()
	testutil.Succeeds(t, "the journal", func() error {
		journal, err := os.ReadFile(l.journal)
		if err == nil && !strings.Contains(string(journal), text) {
			err = fmt.Errorf("%q is not in %q", text, journal)
		}
		return err
	})
}

func (h host) requestBy(launcher, id string, pid int, faults string) hook.Request {
	r := h.request(id, pid, faults, lane(3))
	r.Config.Relay.Launcher = launcher
	return r
}

func (h host) launchBy(t *testing.T, launcher, id string, pid int, faults string) *generation.Generation {
	t.Helper()
	g, err := hook.Launch(h.layout, h.requestBy(launcher, id, pid, faults))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestServiceIsTheSupervisor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	l := startLauncher(t, h, nil)
	init := startProcess(t)
	g := h.launchBy(t, config.LauncherAuto, "sixty four", init.Process.Pid, "")
	info := h.state(t, g.ID, generation.StateReady)
	pid, err := h.ask(g.ID)
	if err != nil || pid != info.Status.Relay.PID || !info.Supervised {
		t.Errorf("a client reaches relay %d (%v), and List says %+v", pid, err, info)
	}
	services := l.started()
	if len(services) != 1 {
		t.Fatalf("%d services for one container", len(services))
	}
	service := services[0].Process.Pid
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, fields, _ := strings.Cut(string(stat), ") ") // state, parent, …
	if f := strings.Fields(fields); err != nil || len(f) < 2 || f[1] != strconv.Itoa(service) {
		t.Errorf("the service %d is not the parent of %s (%v)", service, stat, err)
	}

	// The relay gets the descriptors that a forked supervisor passes.
	starts := reports[relayStart](t, h.dir, "start")
	if len(starts) != 1 {
		t.Fatalf("%d relays were started", len(starts))
	}
	want := []string{
		"0 /dev/null",
		"1 /dev/null",
		"2 pipe:",
		"3 socket:",
		"4 socket:",
		"5 socket:",
		"6 anon_inode:[pidfd",
	}
	if got := starts[0].Descriptors; strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the relay's descriptors are %q", got)
	}
	if !starts[0].OwnSession || len(starts[0].Environment) != 4 {
		t.Errorf("the relay was started with %+v", starts[0])
	}
	if got, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", service)); err != nil || got != "/dev/null" {
		t.Errorf("the service's standard input is %s, %v", got, err)
	}

	// Journal and relay.log have the messages.
	l.awaitJournal(t, `container="sixty four"`)
	l.awaitJournal(t, "is ready")
	log, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(g.ID), "relay.log"))
	if err != nil || !bytes.Contains(log, []byte("is ready")) {
		t.Errorf("log %q, %v", log, err)
	}
	noCgroup(t, g.ID)

	// The supervisor restarts a dead relay. A second lane goes to the same relay.
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDead(t, pid)
	if second, err := h.ask(g.ID); err != nil || second == pid {
		t.Errorf("relay %d answers after %d died: %v", second, pid, err)
	}
	l.awaitJournal(t, "starting it again")
	r := h.requestBy(config.LauncherAuto, "sixty four", init.Process.Pid, "")
	r.Lanes[0] = lane(4)
	if same, err := hook.Launch(h.layout, r); err != nil || same.ID != g.ID || len(same.Config.Lanes) != 2 {
		t.Errorf("a second lane: %+v, %v", same, err)
	}
	end(init)
	h.gone(t)
	waitDead(t, service)
	if n := len(l.started()); n != 1 {
		t.Errorf("%d services were started", n)
	}
}

// systemctl stop sends SIGTERM to the service.
func TestServiceStopsOnRequest(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	l := startLauncher(t, h, nil)
	g := h.launchBy(t, config.LauncherSystemd, "c", startProcess(t).Process.Pid, "")
	pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	if err := unix.Kill(l.started()[0].Process.Pid, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	h.gone(t)
	waitDead(t, pid)
	l.awaitJournal(t, "received a stop request")
}

// The relay survives the service, ends with the container, and is collected.
func TestKilledServiceLeavesTheRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	l := startLauncher(t, h, nil)
	init := startProcess(t)
	g := h.launchBy(t, config.LauncherSystemd, "c", init.Process.Pid, "")
	pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	service := l.started()[0].Process.Pid
	if err := unix.Kill(service, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDead(t, service)
	// The threads of the service end one after the other. The last thread releases the lock.
	testutil.Succeeds(t, "end of the supervisor", func() error {
		if h.info(t, g.ID).Supervised {
			return errors.New("the supervisor runs")
		}
		return nil
	})
	if again, err := h.ask(g.ID); err != nil || again != pid {
		t.Errorf("relay %d answers, want %d: %v", again, pid, err)
	}
	end(init)
	waitDead(t, pid)
	if _, err := collector.Collect(h.layout); err != nil {
		t.Error(err)
	}
	h.gone(t)
}

func TestConcurrentServicesStartOneEach(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	l := startLauncher(t, h, nil)
	var hooks sync.WaitGroup
	var inits []*exec.Cmd
	const n = 12
	for range n {
		init := startProcess(t)
		inits = append(inits, init)
		hooks.Go(func() {
			g, err := hook.Launch(h.layout, h.requestBy(config.LauncherSystemd, "same id", init.Process.Pid, ""))
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := h.ask(g.ID); err != nil {
				t.Error(err)
			}
		})
	}
	hooks.Wait()
	if got := len(l.started()); got != n {
		t.Errorf("%d services for %d containers", got, n)
	}
	for _, init := range inits {
		end(init)
	}
	h.gone(t)
}

// relay.launcher decides whether the hook starts the relay where systemd does not.
func TestLauncherMissingOnHostFollowsConfiguration(t *testing.T) {
	t.Parallel()
	hangUp := func(*net.UnixConn) bool { return false }
	stale := func(t *testing.T, h host) {
		startLauncher(t, h, nil)
		if err := os.Remove(h.layout.Launcher()); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		dir, err := os.Open(h.layout.Run())
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/launcher.sock",
			dir.Fd())}); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name string
		host func(*testing.T, host)
		want error  // with launcher systemd
		note string // in the log with launcher auto; empty if the host does not offer systemd
	}{
		{"no systemd, no socket", func(*testing.T, host) {}, hook.ErrNoLauncher, ""},
		{"systemd without the package", func(t *testing.T, h host) {
			startLauncher(t, h, nil)
			if err := os.Remove(h.layout.Launcher()); err != nil {
				t.Fatal(err)
			}
		}, hook.ErrNoLauncher, ""},
		{"a socket that nobody has", stale, hook.ErrNoListener, "no process listens on it"},
		{"it hangs up", func(t *testing.T, h host) { startLauncher(t, h, hangUp) }, hook.ErrLauncherDisconnected,
			"it disconnected"},
		{"a service of another version", func(t *testing.T, h host) {
			startLauncher(t, h, func(conn *net.UnixConn) bool {
				_, err := conn.Write([]byte(`{"version":2}`))
				if err == nil {
					_, err = conn.Read(make([]byte, 1))
				}
				if err != nil && !errors.Is(err, io.EOF) {
					t.Error(err)
				}
				return false
			})
		}, &hook.LauncherVersionError{Version: 2},
			"the service has protocol version 2 and this hook has version 1"},
		{"a service with an invalid message", func(t *testing.T, h host) {
			startLauncher(t, h, func(conn *net.UnixConn) bool {
				conn.Write([]byte("220 mail.example.org ESMTP"))
				return false
			})
		}, &json.UnmarshalTypeError{Value: "number"}, "invalid message"},
		{"a service that gives up", func(t *testing.T, h host) {
			startLauncher(t, h, func(conn *net.UnixConn) bool {
				conn.Write([]byte(`{"version":1,"error":"no relays today"}`))
				return false
			})
		}, &hook.ReportedError{Text: "no relays today"}, "no relays today"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			test.host(t, h)
			init := startProcess(t)
			_, err := hook.Launch(h.layout, h.requestBy(config.LauncherSystemd, "c", init.Process.Pid, ""))
			var f *fault.Error
			if !errors.As(err, &f) || f.Code != fault.NoSystemd || f.Object != h.layout.Launcher() || f.Remedy == "" ||
				!testutil.HasError(f.Cause, test.want) {
				t.Errorf("with launcher systemd: %v; want %v", err, test.want)
			}
			// A child that a parallel test forks has the files of the process until the execve,
			// and so the lock of the mark of the uid. Then a later collection removes the mark.
			testutil.Succeeds(t, "what collectors leave", func() error {
				if _, err := collector.Collect(h.layout); err != nil {
					return err
				}
				left, err := os.ReadDir(h.layout.UIDs())
				if err == nil && len(left) > 0 {
					err = fmt.Errorf("%v", left)
				}
				return err
			})
			h.gone(t)

			g := h.launchBy(t, config.LauncherAuto, "c", init.Process.Pid, "")
			h.state(t, g.ID, generation.StateReady)
			supervisorPID(t, g.ID) // forked
			log, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(g.ID), "relay.log"))
			if noted := strings.Contains(string(log), "systemd starts no relay"); err != nil || noted != (test.note != "") ||
				!strings.Contains(string(log), test.note) {
				t.Errorf("log %q, %v; want %q in the log", log, err, test.note)
			}
			end(init)
			h.gone(t)
		})
	}
}

func TestLauncherForkWithSystemdStartsNoUnit(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	l := startLauncher(t, h, nil)
	init := startProcess(t)
	g := h.launchBy(t, config.LauncherFork, "c", init.Process.Pid, "")
	h.state(t, g.ID, generation.StateReady)
	if n := len(l.started()); n > 0 {
		t.Errorf("%d services were started", n)
	}
	end(init)
	h.gone(t)
}

// systemd is late: the hook forks the supervisor, and the late service has no generation to
// supervise.
func TestLateServiceFindsNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	come := make(chan struct{})
	l := startLauncher(t, h, func(*net.UnixConn) bool {
		<-come
		return true
	})
	init := startProcess(t)
	g := h.launchBy(t, config.LauncherAuto, "c", init.Process.Pid, "")
	h.state(t, g.ID, generation.StateReady)
	log, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(g.ID), "relay.log"))
	if err != nil || !strings.Contains(string(log), "no service started within") {
		t.Errorf("log %q, %v", log, err)
	}
	close(come)
	l.awaitJournal(t, "the hook disconnected without handing over a relay")
	if starts := reports[relayStart](t, h.dir, "start"); len(starts) != 1 {
		t.Errorf("%d relays were started", len(starts))
	}
	if info := h.info(t, g.ID); !info.Supervised || info.Status.Starts != 1 {
		t.Errorf("List says %+v", info)
	}
	end(init)
	h.gone(t)
}

// An error of the service after the handover fails the start: by then the hook cannot fall back.
func TestServiceThatFailsFailsTheStart(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	script := filepath.Join(t.TempDir(), "script")
	if err := programs.Write(script, []byte("#!/nowhere/interpreter\n")); err != nil {
		t.Fatal(err)
	}
	startLauncher(t, h, nil)
	r := h.requestBy(config.LauncherAuto, "c", startProcess(t).Process.Pid, "")
	r.Config.Relay.Binary = script
	_, err := hook.Launch(h.layout, r)
	f, _ := errors.AsType[*fault.Error](err)
	reported, ok := errors.AsType[*hook.ReportedError](err)
	if f == nil || f.Remedy != "see `journalctl -u 'peerlane-relay@*'`" ||
		!ok || !strings.Contains(reported.Text, "exec "+script+": no such file or directory") {
		t.Errorf("error %v", err)
	}
	h.gone(t)
}

// playHook connects to a launcher as a hook, and sends the messages of a test.
type playHook struct {
	*testing.T
	host
	conn *net.UnixConn
}

func newPlayHook(t *testing.T, h host) *playHook {
	t.Helper()
	dir, err := os.Open(h.layout.Run())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	conn, err := net.DialUnix(
		"unixpacket",
		nil,
		&net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/launcher.sock", dir.Fd()), Net: "unixpacket"},
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	return &playHook{t, h, conn}
}

// receive returns the next answer of the service, and the number of descriptors with the answer.
func (p *playHook) receive() (answer struct {
	Version int
	Error   string
}, files int) {
	p.Helper()
	text, rights := make([]byte, 4096), make([]byte, 4096)
	n, oobn, _, _, err := p.conn.ReadMsgUnix(text, rights)
	if err != nil {
		p.Fatal(err)
	}
	if err := json.Unmarshal(text[:n], &answer); err != nil {
		p.Fatalf("%q: %v", text[:n], err)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:oobn])
	if err != nil {
		p.Fatal(err)
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			p.Fatal(err)
		}
		for _, fd := range fds {
			unix.Close(fd)
			files++
		}
	}
	return answer, files
}

// A service refuses an invalid handover, names the cause, and exits.
func TestHostileHandoversAreRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	startLauncher(t, h, nil)
	init := startProcess(t)
	// A generation with a supervisor.
	g := h.launchBy(t, config.LauncherFork, "c", init.Process.Pid, "")
	h.state(t, g.ID, generation.StateReady)

	// A generation without a supervisor, as the hook makes it.
	const id = "00112233445566778899aabbccddeeff"
	dir := h.layout.GenerationDir(id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	text, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(g.ID), "generation.json"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "generation.json"), bytes.ReplaceAll(text, []byte(g.ID), []byte(id)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	open := func(path string, flags int) *os.File {
		f, err := os.OpenFile(path, flags, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	pidfd := func(pid int) *os.File {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "pidfd")
		t.Cleanup(func() { f.Close() })
		return f
	}
	socket := func(kind int, listen bool) *os.File {
		fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrUnix{})
		}
		if err == nil && listen {
			err = unix.Listen(fd, 1)
		}
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "socket")
		t.Cleanup(func() { f.Close() })
		return f
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { read.Close(); write.Close() })
	good := socket(unix.SOCK_SEQPACKET, true)
	lockFile := filepath.Join(dir, "supervisor")
	locked := open(lockFile, os.O_RDWR|os.O_CREATE)
	if err := unix.Flock(int(locked.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	unlocked := open(lockFile, os.O_RDWR)
	busy := open(filepath.Join(h.layout.GenerationDir(g.ID), "supervisor"), os.O_RDWR)
	free := open(filepath.Join(t.TempDir(), "free"), os.O_RDWR|os.O_CREATE)
	null := open(os.DevNull, os.O_RDWR)
	files := func(change func(f []*os.File) []*os.File) []*os.File {
		return change([]*os.File{good, good, pidfd(init.Process.Pid), write, good, locked})
	}
	with := func(i int, other *os.File) []*os.File {
		return files(func(f []*os.File) []*os.File { f[i] = other; return f })
	}
	all := files(func(f []*os.File) []*os.File { return f })
	message := func(root, id string) string {
		return fmt.Sprintf(`{"version":1,"root":%q,"generation":%q}`, root, id)
	}
	right := message(h.layout.Root, id)
	for _, test := range []struct {
		name, text string
		files      []*os.File
		want       string
	}{
		{"no JSON", "hello", all, "invalid message"},
		{"more than one message", right + right, all, "invalid message"},
		{"an unknown key", strings.Replace(right, "}", `,"uid":0}`, 1), all, "invalid message"},
		{"another version", strings.Replace(right, "1", "99", 1), all, "the hook has protocol version 99"},
		{"no version", "{}", all, "the hook has protocol version 0"},
		{"too long", right + strings.Repeat(" ", 64<<10), all, "more than 32768 bytes"},
		{"a relative root", message("tmp", id), all, "is not a clean absolute path"},
		{"a root that climbs", message("/tmp/../"+h.layout.Root, id), all, "is not a clean absolute path"},
		{"another root", message("/", id), all, "no such file"},
		{"a generation that is a path", message(h.layout.Root, "../generations/"+id), all, "not 32 hexadecimal digits"},
		{"no such generation", message(h.layout.Root, strings.Repeat("0", 32)), all, "no such file"},
		{"no descriptor", right, nil, "received 0 descriptors"},
		{"a descriptor too few", right, all[:5], "received 5 descriptors"},
		{"a descriptor too many", right, append(files(func(f []*os.File) []*os.File { return f }), good),
			"received 7 descriptors"},
		{"as many as the kernel passes", right, slices.Repeat([]*os.File{good}, 253), "received 253 descriptors"},
		{"the lock is another file", right, with(5, free), "is not " + lockFile},
		{"the lock of a generation that has a supervisor", message(h.layout.Root, g.ID), with(5, busy), "has a supervisor"},
		{"the lock not locked", right, with(5, unlocked), "has a supervisor"}, // another open file description holds the lock
		{"a client's socket that is none", right, with(0, null), "not a listening"},
		{"peers' socket that does not listen", right, with(1, socket(unix.SOCK_SEQPACKET, false)), "not a listening"},
		{"an administration socket of another type", right, with(4, socket(unix.SOCK_STREAM, true)), "not a listening"},
		{"no pidfd", right, with(2, null), "not a pidfd"},
		{"a pidfd of another process", right, with(2, pidfd(os.Getpid())), fmt.Sprintf("is a pidfd of process "+
			"%d", os.Getpid())},
		{"a file instead of the pipe", right, with(3, free), "not a pipe"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPlayHook(t, h)
			if greeting, n := p.receive(); greeting.Version != 1 || greeting.Error != "" || n != 1 {
				t.Fatalf("greeting %+v with %d descriptors", greeting, n)
			}
			var fds []int
			for _, f := range test.files {
				fds = append(fds, int(f.Fd()))
			}
			if _, _, err := p.conn.WriteMsgUnix([]byte(test.text), unix.UnixRights(fds...), nil); err != nil {
				t.Fatal(err)
			}
			if refused, _ := p.receive(); !strings.Contains(refused.Error, test.want) {
				t.Errorf("answer %q, want %q", refused.Error, test.want)
			}
			if n, err := p.conn.Read(make([]byte, 10)); n > 0 || !errors.Is(err, io.EOF) {
				t.Errorf("the service sent %d more bytes, %v", n, err)
			}
		})
	}
	// Without the lock the service refuses the handover.
	if err := unix.Flock(int(locked.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	p := newPlayHook(t, h)
	p.receive()
	var fds []int
	for _, f := range all {
		fds = append(fds, int(f.Fd()))
	}
	if _, _, err := p.conn.WriteMsgUnix([]byte(right), unix.UnixRights(fds...), nil); err != nil {
		t.Fatal(err)
	}
	if refused, _ := p.receive(); !strings.Contains(refused.Error, "its lock is not held") {
		t.Errorf("answer without a lock: %q", refused.Error)
	}
	// No refused handover started a relay.
	if starts := reports[relayStart](t, h.dir, "start"); len(starts) != 1 {
		t.Errorf("%d relays were started", len(starts))
	}
	end(init)
}

// The service refuses another user, even if the mode of the socket allows the connection.
func TestServiceRefusesOtherUsers(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it connects as another user")
	}
	h := newHost(t)
	// By default the folders above the socket are closed to users except root.
	for dir := h.layout.Run(); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	l := startLauncher(t, h, nil)
	if err := os.Chmod(h.layout.Launcher(), 0o666); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	connected := make(chan *playHook)
	go func() {
		// The uid changes only for the thread, which ends with the goroutine.
		runtime.LockOSThread()
		defer close(connected)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			t.Errorf("setresuid: %v", errno)
			return
		}
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: h.layout.Launcher(), Net: "unixpacket"})
		if err != nil {
			t.Error(err)
			return
		}
		connected <- &playHook{t, h, conn}
	}()
	p, ok := <-connected
	if !ok {
		return
	}
	defer p.conn.Close()
	if refused, n := p.receive(); n > 0 ||
		!strings.Contains(refused.Error, "of user 65534 requests a relay; only user 0 may") {
		t.Errorf("answer %+v, with %d descriptors", refused, n)
	}
	l.awaitJournal(t, "only user 0 may")
}
