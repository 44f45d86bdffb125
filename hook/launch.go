package hook

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// startTimeout is how long a supervisor may take until it has executed the
// relay: milliseconds, on a host that is not starved. One that is starved shall
// start its containers late, and not never.
const startTimeout = 30 * time.Second

// searchPath is the PATH of supervisors and relays. Nothing else of the
// environment of a runtime, which may be an image's, reaches them.
const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Request is what Launch is asked for.
type Request struct {
	Container Container
	Lanes     []launch.Lane
	Config    config.Config
	// HookBinary is the program whose `supervise` is Supervise; empty for the
	// running one, if it is peerlane-hook, or else the peerlane-hook beside it.
	HookBinary string
	// Ignored becomes the generation's.
	Ignored []string
	// Tenant is the value of the container's annotation network.tenant_annotation.
	Tenant string
}

// Launch gives a container its generation: sockets that accept connections
// from now on, and a supervisor that has executed the relay. It does not wait
// until the relay answers. For a container that has a generation the lanes
// that it lacks are added to it.
//
// All descriptors of the calling process above 2 become close-on-exec.
//
// Launch needs no privilege of its own, and any process will do as
// Container.PID: the generation ends when that has ended. If Launch fails it
// leaves nothing.
func Launch(l paths.Layout, r Request) (*Generation, error) {
	g, s, err := start(l, r, func(*Generation) error { return nil })
	if err == nil {
		err = s.wait(l, g)
	}
	if err != nil {
		return nil, startError(r, err)
	}
	return g, nil
}

func startError(r Request, err error) error {
	return fmt.Errorf("starting the relay of container %q: %w", r.Container.ID, err)
}

// start finds or makes the generation, and runs a function while the supervisor
// of a new one is executed. A supervisor that was there already is no starting.
func start(l paths.Layout, r Request, meanwhile func(*Generation) error) (*Generation, *starting, error) {
	if !filepath.IsAbs(l.Root) {
		return nil, nil, fmt.Errorf("the root %q is not an absolute path", l.Root)
	}
	if len(r.Lanes) == 0 {
		return nil, nil, errors.New("no lane is asked for")
	}
	supervisor, relay, err := binaries(r)
	if err != nil {
		return nil, nil, err
	}
	init, pidfd, err := identify(r.Container.PID)
	if err != nil {
		return nil, nil, err
	}
	defer pidfd.Close()
	if err := l.Create(); err != nil {
		return nil, nil, err
	}
	// A generation that is found can be gone before it is locked: its init ends,
	// or the hook that makes it fails.
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
			if g.Container.ID != r.Container.ID { // no runtime says so of its own container
				return nil, nil, fmt.Errorf("process %d is the init of container %q", init.PID, g.Container.ID)
			}
			if err := extend(l, g, r.Lanes); err != nil {
				return nil, nil, err
			}
			return g, nil, meanwhile(g)
		}
		s, err := g.start(l, supervisor, r.Config.Relay.Launcher, pidfd, meanwhile)
		if err != nil {
			return nil, nil, errors.Join(err, remove(l, g.ID), g.returnUID(l))
		}
		return g, s, nil
	}
}

// claim finds the generation of an init or makes one, and returns it locked.
func claim(l paths.Layout, init Process, r Request, relay string) (g *Generation, held *os.File, found bool, err error) {
	host, err := lockHost(l)
	if err != nil {
		return nil, nil, false, err
	}
	defer host.Close()
	all, err := ids(l)
	if err != nil {
		return nil, nil, false, err
	}
	for _, id := range all {
		if _, err := os.Lstat(initMark(l, id, init)); err != nil {
			continue
		}
		g, err := readGeneration(l, id)
		if err != nil || g.Init != init {
			continue // an unreadable one is of another boot, and Collect's
		}
		// Its maker may need seconds, and nobody else shall wait for them.
		host.Close()
		held, err := lockGeneration(l, id, lockTimeout)
		if err != nil {
			return nil, nil, true, err
		}
		if g, err = readGeneration(l, id); err != nil { // others may have added lanes
			held.Close()
			return nil, nil, true, err
		}
		return g, held, true, nil
	}

	g = &Generation{
		ID: newID(), Container: r.Container, Init: init, Created: time.Now().UTC(), Machine: machineID(l),
		Ignored: r.Ignored, LogFormat: r.Config.Log.Format,
		Relay:   Command{Path: relay, Environment: r.Config.Relay.Environment},
		Network: r.Config.Network, Tenant: r.Tenant, Rails: r.Config.Plan.Rails, NetworkMemory: uint64(min(r.Config.Staging.BounceLimit, r.Config.Relay.Memory/4)),
	}
	if g.Sandbox, err = newSandbox(r.Config.Relay); err != nil {
		return nil, nil, false, err
	}
	lanes, _ := merge(nil, r.Lanes)
	g.Config = launch.Config{
		Generation: g.ID, Container: r.Container.ID, Lanes: lanes,
		Route: r.Config.Relay.Route, Transport: r.Config.Relay.Transport,
		Slots: r.Config.Relay.Slots, SlotBytes: uint64(r.Config.Relay.SlotSize),
		Peers: l.Peers(), NICs: l.EmulatedNICs(),
		OwnHostMemory: ownHostMemory(init.PID),
		Reserve:       r.Config.Relay.Reserve, Bounce: r.Config.Bounce(), CUDAIPC: r.Config.Relay.CUDAIPC == config.CUDAIPCAllow, IPCEvents: r.Config.Relay.Events == config.EventsIPC, Limits: r.Config.Relay.Launch(),
		Scope: r.Config.Relay.Scope, SelfTest: r.Config.Relay.SelfTest, Calibrated: r.Config.Relay.Calibration == config.CalibrationAuto,
		Verbs: r.Config.Verbs.Launch(),
		Chunk: uint64(r.Config.Relay.Chunk), Depth: r.Config.Relay.Depth, Streams: r.Config.Relay.Streams,
	}
	if err := g.check(); err != nil {
		return nil, nil, false, err
	}
	if err := os.Mkdir(l.GenerationDir(g.ID), 0o700); err != nil {
		return nil, nil, false, err
	}
	held, err = lockGeneration(l, g.ID, lockTimeout)
	if err == nil {
		if err = makeSupervisorLock(l, g.ID); err == nil {
			err = g.claimUID(l, r.Config.Relay)
		}
		if err == nil {
			err = g.write(l)
		}
		if err == nil {
			err = os.WriteFile(initMark(l, g.ID, init), nil, 0o600)
		}
		if err == nil {
			return g, held, false, nil
		}
		held.Close()
	}
	return nil, nil, false, errors.Join(err, os.RemoveAll(l.GenerationDir(g.ID)), sweep(l))
}

// merge adds the lanes of GPUs that are not there yet, and that the container sees the
// server GPUs of one that is. It reports whether that was anything.
func merge(have, more []launch.Lane) (merged []launch.Lane, changed bool) {
	merged = slices.Clone(have)
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

// aLane bounds the JSON of one lane and of what is there once.
const aLane = 2 << 10

// check refuses a configuration that a relay cannot work with, or be told.
func (g *Generation) check() error {
	if err := g.Config.Check(); err != nil {
		return err
	}
	if len(g.Config.Lanes) < launch.MaxDatagram/aLane-1 {
		return nil // and the time to write it all is saved, in front of every container
	}
	text, err := json.Marshal(g.Config)
	if err == nil && len(text) > launch.MaxDatagram {
		err = fmt.Errorf("the relay's configuration has %d bytes, and %d are possible: %d lanes are too many for one container",
			len(text), launch.MaxDatagram, len(g.Config.Lanes))
	}
	return err
}

// extend adds lanes to a generation that lives, and has its supervisor tell
// the relay.
func extend(l paths.Layout, g *Generation, lanes []launch.Lane) error {
	before := g.Config
	var changed bool
	if g.Config.Lanes, changed = merge(before.Lanes, lanes); !changed {
		return nil
	}
	if err := g.check(); err != nil {
		return err
	}
	if err := g.write(l); err != nil {
		return err
	}
	if err := tellLanesChanged(l, g.ID); err != nil {
		g.Config = before
		return errors.Join(fmt.Errorf("adding a lane to generation %s: %w", g.ID, err), g.write(l))
	}
	return nil
}

// start makes the sockets of a new generation and runs its supervisor, and
// meanwhile a function. It returns when the supervisor is executed.
func (g *Generation) start(l paths.Layout, supervisor, launcher string, pidfd *os.File, meanwhile func(*Generation) error) (*starting, error) {
	group := sync.OnceValues(func() (*os.File, error) { return makeCgroup(l, g.ID) })
	if !bySystemd(l, launcher) {
		go group()
		defer group() // who removes what is there after an error must find it
	}
	if err := os.Mkdir(l.SocketDir(g.ID), 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(l.SocketDir(g.ID), 0o755); err != nil { // Mkdir's mode goes through umask
		return nil, err
	}
	// Whoever is in the container may connect, whatever the uid there.
	clients, err := listen(filepath.Join(l.SocketDir(g.ID), paths.SocketName), 0o666)
	if err != nil {
		return nil, err
	}
	defer clients.Close()
	peers, err := listen(l.PeerSocket(g.ID), 0o600)
	if err != nil {
		return nil, err
	}
	defer peers.Close()
	if g.Sandbox.Group != 0 { // other relays are not root, and have the group
		path := l.PeerSocket(g.ID)
		if err := errors.Join(os.Chown(path, -1, g.Sandbox.Group), os.Chmod(path, 0o660)); err != nil {
			return nil, fmt.Errorf("letting other relays connect: %w", err)
		}
	}
	admin, err := listen(adminSocket(l, g.ID), 0o600)
	if err != nil {
		return nil, err
	}
	defer admin.Close()
	alive, err := os.OpenFile(supervisorLock(l, g.ID), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer alive.Close()
	if err := lock(alive, unix.LOCK_EX, lockTimeout); err != nil {
		return nil, err
	}
	files := map[int]*os.File{
		fdClients: clients, fdPeers: peers, fdInit: pidfd, fdAdmin: admin, fdAlive: alive,
	}
	var s *starting
	run := make(chan error)
	go func() {
		var err error
		s, err = g.runBySystemd(l, launcher, files)
		if err == nil && s == nil {
			s, err = g.run(l, supervisor, files, group)
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

// logTo is a logger for what a hook writes into a generation's log.
func (g *Generation) logTo(log *os.File) *logrus.Entry {
	l := logrus.New()
	l.SetOutput(log)
	l.SetFormatter(config.LogFormatter(g.LogFormat))
	return l.WithFields(logrus.Fields{"generation": g.ID, "container": g.Container.ID})
}

// starting is a supervisor that is executed, and may not have executed the
// relay yet.
type starting struct {
	program string
	answer  *os.File // the other end of its fdStarted; nil where the relay is known to be executed
	log     *os.File // of the generation
	// stop kills it, unless it has ended, and returns how it ended: it may be
	// stuck, and shall not write while all is removed.
	stop func() (exit string, err error)
	// held is closed when nobody waits for it any more.
	held []io.Closer
}

// run runs the supervisor with these descriptors: it returns when the
// supervisor is executed, and has them all. It is born in a control group, if this
// host has one for it.
func (g *Generation) run(l paths.Layout, supervisor string, files map[int]*os.File, group func() (*os.File, error)) (*starting, error) {
	log, err := os.OpenFile(filepath.Join(l.GenerationDir(g.ID), logName), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	started, tell, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	defer tell.Close()
	s := &starting{program: supervisor, answer: started, log: log, held: []io.Closer{started, log}}
	files[fdStarted] = tell

	// A runtime that leaks descriptors into its hooks waits until all copies
	// are closed: nothing but what is named here passes to the supervisor.
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
	// Package os would try out first, with a process of its own, what this kernel
	// can do, and the hook has no time for that.
	pidfd := -1
	attributes := &syscall.ProcAttr{
		Dir: "/",
		// One processor is enough for it, and less to set up.
		Env:   []string{searchPath, "GOMAXPROCS=1"},
		Files: []uintptr{null.Fd(), null.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd},
	}
	for fd := 3; files[fd] != nil; fd++ {
		attributes.Files = append(attributes.Files, files[fd].Fd())
	}
	// A host where it cannot have a group of its own is no worse off than without.
	dir, err := group()
	if err != nil {
		g.logTo(log).Warn(withoutCgroup(g.Container.ID, err))
	} else if dir != nil {
		defer dir.Close()
		// Born there: moving a process later takes a lock of the whole host.
		attributes.Sys.UseCgroupFD, attributes.Sys.CgroupFD = true, int(dir.Fd())
	}
	start := func() (pid int, err error) {
		err = onDisposableThread(func() error { // whose attributes the supervisor gets
			if kept := resetInherited(); kept != nil {
				g.logTo(log).WithError(kept).Warn("the relay keeps attributes of the container runtime")
			}
			pid, err = syscall.ForkExec(supervisor, []string{supervisor, "supervise", "--root", l.Root, "--generation", g.ID}, attributes)
			return err
		})
		return pid, err
	}
	pid, err := start()
	if err != nil && attributes.Sys.UseCgroupFD {
		g.logTo(log).Warn(withoutCgroup(g.Container.ID, err))
		attributes.Sys.UseCgroupFD = false
		pid, err = start()
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("starting the supervisor: %w", &os.PathError{Op: "exec", Path: supervisor, Err: err})
	}
	s.held = append(s.held, os.NewFile(uintptr(pidfd), "supervisor"))
	ended := make(chan string, 1)
	go func() { ended <- reap(pid) }() // where the caller lives on
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

// wait returns when the supervisor has executed the relay. Otherwise nothing is
// left of the generation.
func (s *starting) wait(l paths.Layout, g *Generation) error {
	if s == nil {
		return nil // it was there before
	}
	defer s.close()
	if s.answer == nil {
		return nil
	}
	err := s.answer.SetReadDeadline(time.Now().Add(startTimeout))
	var answer []byte
	if err == nil {
		answer, err = io.ReadAll(io.LimitReader(s.answer, 64<<10))
	}
	if err == nil && string(answer) == startedAnswer {
		return nil
	}
	exit, stop := s.stop()
	switch {
	case err != nil:
		err = fmt.Errorf("the supervisor %s has not started a relay within %v: %w; its log: %s", s.program, startTimeout, err, tail(s.log))
	case len(answer) > 0:
		err = errors.New(string(answer))
	default:
		err = fmt.Errorf("the supervisor %s ended early (%s); its log: %s", s.program, exit, tail(s.log))
	}
	err = errors.Join(err, stop)
	held, locked := lockGeneration(l, g.ID, lockTimeout)
	if locked != nil {
		return errors.Join(err, locked)
	}
	defer held.Close()
	return errors.Join(err, remove(l, g.ID), g.returnUID(l))
}

// failed is wait for what is known by now: most relays that cannot be executed
// show before their container's socket is mounted. What shows later the clients
// hear from the supervisor.
func (s *starting) failed(l paths.Layout, g *Generation) error {
	if s == nil || s.answer == nil {
		return nil
	}
	fds := []unix.PollFd{{Fd: int32(s.answer.Fd()), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 0); n == 0 || err != nil {
		return nil
	}
	return s.wait(l, g)
}

// reap waits for a child, and says how it ended.
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

// tail is the end of a log.
func tail(log *os.File) string {
	text := make([]byte, 1<<10)
	size, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	n, err := log.ReadAt(text, max(0, size-int64(len(text))))
	if err != nil && err != io.EOF {
		return err.Error()
	}
	if n == 0 {
		return "its log is empty"
	}
	return strings.TrimSpace(string(text[:n]))
}

// binaries finds the programs that Launch needs.
func binaries(r Request) (supervisor, relay string, err error) {
	supervisor = r.HookBinary
	if supervisor == "" {
		if supervisor, err = os.Executable(); err != nil {
			return "", "", err
		}
		if filepath.Base(supervisor) != "peerlane-hook" {
			supervisor = filepath.Join(filepath.Dir(supervisor), "peerlane-hook")
		}
	}
	if err := executable(supervisor); err != nil {
		return "", "", &fault.Error{Code: fault.NoRelayProgram, Operation: "find the hook binary", Cause: err, Remedy: "install peerlane and peerlane-hook in one directory"}
	}
	relay = r.Config.Relay.Binary
	if relay == "" {
		relay = filepath.Join(filepath.Dir(supervisor), "peerlane-relay")
	}
	if err = executable(relay); err == nil {
		err = runnable(relay)
	}
	if err != nil {
		return "", "", &fault.Error{Code: fault.NoRelayProgram, Operation: "find the relay binary", Cause: err, Remedy: "install it there, or name it by relay.binary in config.toml"}
	}
	return supervisor, relay, nil
}

func executable(path string) error {
	info, err := os.Stat(path)
	if err == nil && info.IsDir() {
		err = &os.PathError{Op: "exec", Path: path, Err: syscall.EISDIR}
	}
	if err == nil && info.Mode()&0o111 == 0 {
		err = &os.PathError{Op: "exec", Path: path, Err: syscall.EACCES}
	}
	return err
}

// runnable finds what would stop a program from being executed, beyond its mode:
// the supervisor that executes it does so when the hook has gone.
func runnable(path string) error {
	if err := unix.Faccessat2(unix.AT_FDCWD, path, unix.X_OK, unix.AT_EACCESS); err != nil {
		return &os.PathError{Op: "exec", Path: path, Err: err} // on a file system that is mounted noexec, say
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		return nil // without root it can be executed, and not be read: packages have it so
	}
	if err != nil {
		return err
	}
	defer f.Close()
	linker, err := interpreter(f)
	if err == nil && linker != "" {
		_, err = os.Stat(linker)
	}
	if err != nil {
		return &os.PathError{Op: "exec", Path: path, Err: err}
	}
	return nil
}

// interpreter is the dynamic linker that an ELF file names (elf(5), 64 bits,
// little-endian: amd64 and arm64), or the program of a script; empty where there
// is none. What the kernel executes by other means is not known here.
func interpreter(f io.ReaderAt) (string, error) {
	header := make([]byte, 64)
	n, err := f.ReadAt(header, 0)
	switch {
	case err != nil && err != io.EOF:
		return "", err
	case bytes.HasPrefix(header[:n], []byte("#!")):
		return "", nil // the kernel finds out
	case n < len(header) || string(header[:6]) != "\x7fELF\x02\x01":
		return "", syscall.ENOEXEC
	}
	le := binary.LittleEndian
	at, size, count := int64(le.Uint64(header[32:])), int64(le.Uint16(header[54:])), int64(le.Uint16(header[56:]))
	for i := range count {
		segment := make([]byte, 40)
		if _, err := f.ReadAt(segment, at+i*size); err != nil {
			return "", syscall.ENOEXEC
		}
		const interp = 3 // PT_INTERP
		if le.Uint32(segment) != interp {
			continue
		}
		name := make([]byte, min(le.Uint64(segment[32:]), unix.PathMax))
		if _, err := f.ReadAt(name, int64(le.Uint64(segment[8:]))); err != nil {
			return "", syscall.ENOEXEC
		}
		return string(bytes.TrimRight(name, "\x00")), nil
	}
	return "", nil
}
