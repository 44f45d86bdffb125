package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/internal/handover"
	"github.com/peerlane/peerlane/hook/internal/programs"
	"github.com/peerlane/peerlane/hook/internal/unixsocket"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// Request is the request to Launch.
type Request struct {
	Container generation.Container
	Lanes     []launch.Lane
	Config    config.Config
	// HookBinary is the program with the command supervise. If it is empty, Launch uses the
	// running program if its name is peerlane-hook, or else peerlane-hook in the same directory.
	HookBinary string
	// ignored is Generation.Ignored.
	ignored []string
	// tenant is the value of the container's annotation network.tenant_annotation.
	tenant string
	// pod is Generation.Pod.
	pod *generation.Pod
}

// Launch makes a generation for a container, with sockets that accept connections from now on, and
// a supervisor that has executed the relay. It does not wait for the relay's answer. If the
// container already has a generation, Launch adds the missing lanes.
//
// All descriptors above 2 of the calling process become close-on-exec.
//
// Launch requires no privilege, and Container.PID may be any process: the generation ends with
// that process. After an error, nothing of the generation is left.
func Launch(l paths.Layout, r Request) (*generation.Generation, error) {
	g, s, err := start(l, r, func(*generation.Generation) error { return nil })
	if err == nil {
		err = s.wait(l, g)
	}
	if err != nil {
		return nil, startError(r, err)
	}
	return g, nil
}

func startError(r Request, err error) error {
	return &StartError{r.Container.ID, err}
}

// StartError is the error of a container whose relay does not start.
type StartError struct {
	Container string // id
	Err       error
}

func (e *StartError) Error() string {
	return fmt.Sprintf("start the relay of container %q: %v", e.Container, e.Err)
}

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// ErrNoLane is the error of a request without a lane.
var ErrNoLane = errors.New("no lane is asked for")

// LanesError is the error of a configuration that exceeds a message to the relay.
type LanesError struct{ Lanes, Bytes int }

func (e *LanesError) Error() string {
	return fmt.Sprintf("the relay's configuration has %d bytes, more than %d: %d lanes are too many for one container",
		e.Bytes, launch.MaxDatagram, e.Lanes)
}

// SupervisorError is the error of a supervisor that ended before it executed the relay.
type SupervisorError struct {
	Program string
	// Exit is a phrase such as "exit status 1".
	Exit string
	// Log is the end of the generation's log.
	Log string
}

func (e *SupervisorError) Error() string {
	return fmt.Sprintf("the supervisor %s ended early (%s); its log: %s", e.Program, e.Exit, e.Log)
}

// ReportedError is an error that the supervisor or the systemd service reports as text.
type ReportedError struct{ Text string }

func (e *ReportedError) Error() string { return e.Text }

// start finds or makes the generation, and calls meanwhile while the supervisor starts. The
// returned starting is nil if a supervisor was already running.
func start(l paths.Layout, r Request, meanwhile func(*generation.Generation) error) (*generation.Generation, *starting,
	error) {
	if !filepath.IsAbs(l.Root) {
		return nil, nil, fmt.Errorf("the root %q is not an absolute path", l.Root)
	}
	if len(r.Lanes) == 0 {
		return nil, nil, ErrNoLane
	}
	supervisor, relay, err := programs.Find(r.HookBinary, r.Config.Relay.Binary)
	if err != nil {
		return nil, nil, err
	}
	init, pidfd, err := process.Identify(r.Container.PID)
	if err != nil {
		return nil, nil, err
	}
	defer pidfd.Close()
	if err := l.Create(); err != nil {
		return nil, nil, err
	}
	// Another process can remove the found generation before the lock: its init may end, or the
	// hook that makes it may fail.
	for {
		g, held, found, err := claim(l, init, r, relay)
		switch {
		case errors.Is(err, fs.ErrNotExist) && found:
			continue
		case err != nil:
			return nil, nil, err
		}
		defer held.Close()
		if found {
			if g.Container.ID != r.Container.ID { // impossible with one runtime
				return nil, nil, fmt.Errorf("process %d is the init of container %q", init.PID, g.Container.ID)
			}
			if err := extend(l, g, r.Lanes); err != nil {
				return nil, nil, err
			}
			return g, nil, meanwhile(g)
		}
		s, err := startSupervisor(g, l, supervisor, r.Config.Relay.Launcher, pidfd, meanwhile)
		if err != nil {
			return nil, nil, errors.Join(err, collector.Remove(l, g.ID), g.ReturnUID(l))
		}
		return g, s, nil
	}
}

// claim finds the generation of an init, or makes one, and returns it locked.
func claim(l paths.Layout, init process.Process, r Request, relay string) (g *generation.Generation, held *os.File,
	found bool, err error) {
	host, err := generation.LockHost(l)
	if err != nil {
		return nil, nil, false, err
	}
	defer host.Close()
	all, err := generation.IDs(l)
	if err != nil {
		return nil, nil, false, err
	}
	for _, id := range all {
		if _, err := os.Lstat(generation.InitMark(l, id, init)); err != nil {
			continue
		}
		g, err := generation.Read(l, id)
		if err != nil || g.Init != init {
			continue // an unreadable generation is of another boot; Collect removes it
		}
		// The hook that makes this generation may take seconds: do not block other hooks.
		host.Close()
		held, err := generation.LockGeneration(l, id, generation.LockTimeout)
		if err != nil {
			return nil, nil, true, err
		}
		if g, err = generation.Read(l, id); err != nil { // another hook may have added lanes
			held.Close()
			return nil, nil, true, err
		}
		return g, held, true, nil
	}

	g = &generation.Generation{
		ID: generation.NewID(), Container: r.Container, Init: init, Created: time.Now().UTC(),
		Machine: generation.MachineID(l),
		Ignored: r.ignored, LogFormat: r.Config.Log.Format,
		Relay:   generation.Command{Path: relay, Environment: r.Config.Relay.Environment},
		Network: r.Config.Network, Tenant: r.tenant, Pod: r.pod, Rails: r.Config.Plan.Rails,
		NetworkMemory: uint64(min(r.Config.Staging.BounceLimit, r.Config.Relay.Memory/4)),
	}
	if g.Sandbox, err = generation.NewSandbox(r.Config.Relay); err != nil {
		return nil, nil, false, err
	}
	lanes, _ := merge(nil, r.Lanes)
	g.Config = launch.Config{
		Generation: g.ID, Container: r.Container.ID, Lanes: lanes,
		Route: r.Config.Relay.Route, Transport: r.Config.Relay.Transport,
		Slots: r.Config.Relay.Slots, SlotBytes: uint64(r.Config.Relay.SlotSize),
		Peers:         l.Peers(),
		OwnHostMemory: ownHostMemory(init.PID),
		Reserve:       r.Config.Relay.Reserve, Bounce: r.Config.Bounce(),
		CUDAIPC: r.Config.Relay.CUDAIPC == config.CUDAIPCAllow, IPCEvents: r.Config.Relay.Events == config.EventsIPC,
		Limits: r.Config.Relay.Launch(),
		Scope:  r.Config.Relay.Scope, SelfTest: r.Config.Relay.SelfTest,
		Calibrated: r.Config.Relay.Calibration == config.CalibrationAuto,
		Verbs:      r.Config.Verbs.Launch(),
		Chunk:      uint64(r.Config.Relay.Chunk), Depth: r.Config.Relay.Depth, Streams: r.Config.Relay.Streams,
	}
	if err := checkConfig(g); err != nil {
		return nil, nil, false, err
	}
	if err := os.Mkdir(l.GenerationDir(g.ID), 0o700); err != nil {
		return nil, nil, false, err
	}
	held, err = generation.LockGeneration(l, g.ID, generation.LockTimeout)
	if err == nil {
		if err = generation.MakeSupervisorLock(l, g.ID); err == nil {
			err = g.ClaimUID(l, r.Config.Relay)
		}
		if err == nil {
			err = g.Write(l)
		}
		if err == nil {
			err = os.WriteFile(generation.InitMark(l, g.ID, init), nil, 0o600)
		}
		if err == nil {
			return g, held, false, nil
		}
		held.Close()
	}
	return nil, nil, false, errors.Join(err, os.RemoveAll(l.GenerationDir(g.ID)), generation.SweepUIDsLocked(l))
}

// merge adds the lanes of new GPUs, and marks the lanes whose server GPUs the container now sees.
// changed reports a difference.
func merge(current, more []launch.Lane) (merged []launch.Lane, changed bool) {
	merged = slices.Clone(current)
	for _, lane := range more {
		i := slices.IndexFunc(merged, func(h launch.Lane) bool { return h.GPU.BusID == lane.GPU.BusID })
		switch {
		case i < 0:
			merged = append(merged, lane)
		case lane.Copy && !merged[i].Copy:
			merged[i].Copy = true
		default:
			continue
		}
		changed = true
	}
	return merged, changed
}

// aLane is the maximum size in bytes of the JSON of one lane, and of the rest of the
// configuration.
const aLane = 2 << 10

// checkConfig refuses a configuration that a relay cannot use or cannot receive.
func checkConfig(g *generation.Generation) error {
	if err := g.Config.Check(); err != nil {
		return err
	}
	if len(g.Config.Lanes) < launch.MaxDatagram/aLane-1 {
		return nil // fits: save the time of encoding at every start
	}
	text, err := json.Marshal(g.Config)
	if err == nil && len(text) > launch.MaxDatagram {
		err = &LanesError{len(g.Config.Lanes), len(text)}
	}
	return err
}

// extend adds lanes to a running generation, and notifies the supervisor.
func extend(l paths.Layout, g *generation.Generation, lanes []launch.Lane) error {
	before := g.Config
	var changed bool
	if g.Config.Lanes, changed = merge(before.Lanes, lanes); !changed {
		return nil
	}
	if err := checkConfig(g); err != nil {
		return err
	}
	if err := g.Write(l); err != nil {
		return err
	}
	if err := admin.NotifyLanesChanged(l, g.ID); err != nil {
		g.Config = before
		return errors.Join(fmt.Errorf("add a lane to generation %s: %w", g.ID, err), g.Write(l))
	}
	return nil
}

// startSupervisor makes the sockets of a new generation, starts the supervisor, and calls
// meanwhile. It returns when the supervisor has been executed.
func startSupervisor(g *generation.Generation, l paths.Layout, supervisor, launcher string, pidfd *os.File,
	meanwhile func(*generation.Generation) error) (*starting, error) {
	group := sync.OnceValues(func() (*os.File, error) { return cgroup.Make(l, g.ID) })
	if !bySystemd(l, launcher) {
		go group()
		defer group() // the cleanup after an error must find the group
	}
	if err := os.Mkdir(l.SocketDir(g.ID), 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(l.SocketDir(g.ID), 0o755); err != nil { // the umask changes the mode of Mkdir
		return nil, err
	}
	// Every user of the container may connect.
	clients, err := unixsocket.Listen(filepath.Join(l.SocketDir(g.ID), paths.SocketName), 0o666)
	if err != nil {
		return nil, err
	}
	defer clients.Close()
	peers, err := unixsocket.Listen(l.PeerSocket(g.ID), 0o600)
	if err != nil {
		return nil, err
	}
	defer peers.Close()
	if g.Sandbox.Group != 0 { // other relays connect as members of the group
		path := l.PeerSocket(g.ID)
		if err := errors.Join(os.Chown(path, -1, g.Sandbox.Group), os.Chmod(path, 0o660)); err != nil {
			return nil, fmt.Errorf("allow other relays to connect: %w", err)
		}
	}
	admin, err := unixsocket.Listen(admin.Socket(l, g.ID), 0o600)
	if err != nil {
		return nil, err
	}
	defer admin.Close()
	alive, err := os.OpenFile(generation.SupervisorLock(l, g.ID), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer alive.Close()
	if err := generation.Lock(alive, unix.LOCK_EX, generation.LockTimeout); err != nil {
		return nil, err
	}
	files := map[int]*os.File{
		handover.FDClients: clients, handover.FDPeers: peers, handover.FDInit: pidfd, handover.FDAdmin: admin,
		handover.FDAlive: alive,
	}
	var s *starting
	run := make(chan error)
	go func() {
		var err error
		s, err = runBySystemd(g, l, launcher, files)
		if err == nil && s == nil {
			s, err = forkSupervisor(g, l, supervisor, files, group)
		}
		run <- err
	}()
	err = meanwhile(g)
	if failed := <-run; failed != nil {
		return nil, errors.Join(failed, err)
	}
	if err != nil {
		defer s.close()
		_, stop := s.stop()
		return nil, errors.Join(err, stop)
	}
	return s, nil
}

// logTo returns a logger that writes to a generation's log.
func logTo(g *generation.Generation, log *os.File) *logrus.Entry {
	l := logrus.New()
	l.SetOutput(log)
	l.SetFormatter(config.LogFormatter(g.LogFormat))
	return l.WithFields(logrus.Fields{"generation": g.ID, "container": g.Container.ID})
}

// starting is an executed supervisor that may not have executed the relay yet.
type starting struct {
	program string
	// answer is the read end of FDStarted; nil if the relay has already been executed.
	answer *os.File
	// log is the generation's log.
	log *os.File
	// stop kills the supervisor, unless it has ended, and returns its exit status in words: a
	// stuck supervisor must not write while the generation is removed.
	stop func() (exit string, err error)
	// held are closed when the wait ends.
	held []io.Closer
}

// forkSupervisor starts the supervisor with these descriptors, and returns when it has been
// executed. If the host has cgroup2, the kernel creates the process in its control group.
func forkSupervisor(g *generation.Generation, l paths.Layout, supervisor string, files map[int]*os.File,
	group func() (*os.File, error)) (*starting, error) {
	log, err := os.OpenFile(filepath.Join(l.GenerationDir(g.ID), generation.LogName), os.O_RDWR|os.O_CREATE|os.O_APPEND,
		0o600)
	if err != nil {
		return nil, err
	}
	started, startedWrite, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	defer startedWrite.Close()
	s := &starting{program: supervisor, answer: started, log: log, held: []io.Closer{started, log}}
	files[handover.FDStarted] = startedWrite

	// If a runtime leaks a descriptor into hooks, it waits until every copy is closed: pass only
	// the listed descriptors to the supervisor.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		s.close()
		return nil, os.NewSyscallError("close_range", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		s.close()
		return nil, err
	}
	defer null.Close()
	// Package os would first test pidfds with a child process, which takes too long for a hook.
	pidfd := -1
	attributes := &syscall.ProcAttr{
		Dir: "/",
		// One processor is enough for a supervisor, and takes less setup.
		Env:   []string{programs.SearchPath, "GOMAXPROCS=1"},
		Files: []uintptr{null.Fd(), null.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd},
	}
	for fd := 3; files[fd] != nil; fd++ {
		attributes.Files = append(attributes.Files, files[fd].Fd())
	}
	// After a failure the supervisor stays in the runtime's group, as on a host without cgroup2.
	dir, err := group()
	if err != nil {
		logTo(g, log).Warn(withoutCgroup(g.Container.ID, err))
	} else if dir != nil {
		defer dir.Close()
		// Create the process in the group: moving it later takes a lock of the whole host.
		attributes.Sys.UseCgroupFD, attributes.Sys.CgroupFD = true, int(dir.Fd())
	}
	start := func() (pid int, err error) {
		err = onDisposableThread(func() error { // the supervisor inherits the attributes of the thread
			if kept := resetInherited(); kept != nil {
				logTo(g, log).WithError(kept).Warn("the relay keeps attributes of the container runtime")
			}
			pid, err = syscall.ForkExec(supervisor, []string{supervisor, "supervise", "--root", l.Root, "--generation", g.ID},
				attributes)
			return err
		})
		return pid, err
	}
	pid, err := start()
	if err != nil && attributes.Sys.UseCgroupFD {
		logTo(g, log).Warn(withoutCgroup(g.Container.ID, err))
		attributes.Sys.UseCgroupFD = false
		pid, err = start()
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("start the supervisor: %w", &os.PathError{Op: "exec", Path: supervisor, Err: err})
	}
	s.held = append(s.held, os.NewFile(uintptr(pidfd), "supervisor"))
	ended := make(chan string, 1)
	go func() { ended <- reap(pid) }() // for a caller that outlives the supervisor
	s.stop = func() (string, error) {
		err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
		if err != nil && err != unix.ESRCH {
			return "", os.NewSyscallError("pidfd_send_signal", err)
		}
		return <-ended, nil
	}
	return s, nil
}

func (s *starting) close() {
	for _, h := range s.held {
		h.Close()
	}
}

// wait returns when the supervisor has executed the relay. After an error, nothing of the
// generation is left.
func (s *starting) wait(l paths.Layout, g *generation.Generation) error {
	if s == nil {
		return nil // the supervisor was already running
	}
	defer s.close()
	if s.answer == nil {
		return nil
	}
	err := s.answer.SetReadDeadline(time.Now().Add(handover.StartTimeout))
	var answer []byte
	if err == nil {
		answer, err = io.ReadAll(io.LimitReader(s.answer, 64<<10))
	}
	if err == nil && string(answer) == handover.Started {
		return nil
	}
	exit, stop := s.stop()
	switch {
	case err != nil:
		err = fmt.Errorf("the supervisor %s has not started a relay within %v: %w; its log: %s", s.program,
			handover.StartTimeout, err, generation.Tail(s.log))
	case len(answer) > 0:
		err = &ReportedError{string(answer)}
	default:
		err = &SupervisorError{s.program, exit, generation.Tail(s.log)}
	}
	err = errors.Join(err, stop)
	held, locked := generation.LockGeneration(l, g.ID, generation.LockTimeout)
	if locked != nil {
		return errors.Join(err, locked)
	}
	defer held.Close()
	return errors.Join(err, collector.Remove(l, g.ID), g.ReturnUID(l))
}

// poll is wait without blocking: most relays that cannot be executed fail before the mount of
// the socket. The supervisor reports later failures to the clients.
func (s *starting) poll(l paths.Layout, g *generation.Generation) error {
	if s == nil || s.answer == nil {
		return nil
	}
	fds := []unix.PollFd{{Fd: int32(s.answer.Fd()), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 0); n == 0 || err != nil {
		return nil
	}
	return s.wait(l, g)
}

// reap waits for a child, and returns its exit status in words.
func reap(pid int) string {
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return os.NewSyscallError("wait4", err).Error()
		case status.Signaled():
			return "signal: " + status.Signal().String()
		default:
			return fmt.Sprintf("exit status %d", status.ExitStatus())
		}
	}
}

// withoutCgroup returns the error, for the log, of a relay that stays in the container runtime's
// control group.
func withoutCgroup(container string, cause error) *fault.Error {
	return &fault.Error{Code: fault.NoSandbox, Operation: "make a control group for the relay of container",
		Object: container, Cause: cause,
		Remedy: "mount cgroup2 where the container runtime starts, or enable peerlane-relay.socket; until then the relay " +
			"is in the runtime's control group, and relay.memory may not hold"}
}
