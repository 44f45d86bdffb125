package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
)

// Variables of `make soak-containers`: number of lives over all runtimes, seed, and a single life
// to repeat.
const (
	livesVariable     = "PEERLANE_LIVES"
	livesSeedVariable = "PEERLANE_SOAK_SEED"
	livesOneVariable  = "PEERLANE_LIVES_ONE"
	// livesSeed and lives are fixed in `make test`.
	livesSeed   = 22
	lives       = 24
	livesAtOnce = 6
	// maxDeaths limits the kills of a life's relay: after five deaths within a minute a relay stays
	// down.
	maxDeaths = 3
)

// linger waits for the end of input without an attach.
func linger() error {
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// TestLivesOfContainersMatchModel runs random lives of containers: create, start, attach, exec, pause,
// resume, kills of each participating process, commands of the administrator, and the removal of
// any object of the container's generation or of the runtime, in any order. A model predicts the
// result of each action. No object remains at the end of a life.
func TestLivesOfContainersMatchModel(t *testing.T) {
	n := int(fromEnvironment(t, livesVariable, lives))
	seed := uint64(livesSeed)
	if os.Getenv(livesVariable) != "" {
		seed = uint64(time.Now().UnixNano())
	}
	seed = fromEnvironment(t, livesSeedVariable, seed)
	one := int(fromEnvironment(t, livesOneVariable, 0)) // counts from 1
	t.Logf("%d lives; %s=%d makes the same choices again, and %s=N those of one life", n, livesSeedVariable, seed,
		livesOneVariable)
	for i, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			// the self-test costs seconds if no result exists
			b := newBed(t, runtimeName, func(c *config.Config) { c.Relay.SelfTest = "off" })
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			s := &soak{bed: b, built: b.bundle(g, testbed.Devices(g), "linger"), results: map[string]int{}}
			work := make(chan int)
			var workers sync.WaitGroup
			for range livesAtOnce {
				workers.Go(func() {
					for number := range work {
						l := &life{soak: s, number: number, random: rand.New(rand.NewPCG(seed, uint64(number)))}
						l.live()
					}
				})
			}
			begun, done := time.Now(), 0
			for number := 1; number <= n && !t.Failed(); number++ {
				if number%len(runtimes) == i && (one == 0 || one == number) {
					work <- number
					done++
				}
			}
			close(work)
			workers.Wait()
			t.Logf("%d lives in %v; actions: %v", done, time.Since(begun).Round(time.Second), s.results)
			if _, err := collector.Collect(b.Layout); err != nil {
				t.Error(err)
			}
		})
	}
}

// life is the life of a container, and its model.
type life struct {
	*soak
	number  int
	random  *rand.Rand
	id      string
	in      *os.File // write end of init's standard input
	out     string   // file with the output of init
	actions []string // actions, for the failure message

	// The participating processes.
	init, relay, watcher *os.File // pidfds; nil if absent
	generation           *generation.Generation

	// The model.
	born       bool // created by the runtime
	started    bool
	paused     bool
	dead       bool // init has ended, or was killed
	supervised bool
	held       bool // stopped or drained by the administrator
	broken     bool // the test removed an object that clients need, or the start failed in the middle
	deaths     int  // of the relay
}

func (l *life) errorf(format string, arguments ...any) {
	l.Helper()
	l.Errorf("life %d, %s: %s\nits actions: %s", l.number, l.id, fmt.Sprintf(format, arguments...),
		strings.Join(l.actions, "; "))
}

func (l *life) did1(format string, arguments ...any) {
	l.actions = append(l.actions, fmt.Sprintf(format, arguments...))
	l.mu.Lock()
	defer l.mu.Unlock()
	action, _, _ := strings.Cut(l.actions[len(l.actions)-1], ":")
	l.results[action]++
}

// runtimeDo runs a command of the runtime, and returns the output with an error.
func (l *life) runtimeDo(arguments ...string) error {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	// Not a pipe: processes of the container could keep a pipe open.
	output, err := os.CreateTemp("", "peerlane-life-")
	if err != nil {
		return err
	}
	defer os.Remove(output.Name())
	defer output.Close()
	c := l.runtime.Command(ctx, arguments...)
	c.Stdout, c.Stderr = output, output
	if err := c.Run(); err != nil {
		text, _ := os.ReadFile(output.Name())
		return fmt.Errorf("%s: %w: %s", strings.Join(arguments, " "), err, bytes.TrimSpace(text))
	}
	return nil
}

func (l *life) live() {
	l.id = l.ContainerID(fmt.Sprintf("life-%d", l.number))
	l.create()
	actions := []struct {
		weight int
		action func()
	}{
		{4, l.start}, {6, l.attach}, {2, l.execute}, {2, l.pause}, {2, l.resume}, {3, l.killRelay}, {2,
			l.killSupervisor}, {1, l.killInit},
		{1, l.stopRelay}, {1, l.drainRelay}, {2, l.resumeRelay}, {2, l.removeObject}, {1, l.collect}, {2, l.wait}, {1,
			l.deleteContainer},
	}
	total := 0
	for _, a := range actions {
		total += a.weight
	}
	if l.random.IntN(4) > 0 { // otherwise later actions apply to a container that is only created
		l.start()
	}
	for range 1 + l.random.IntN(12) {
		pick := l.random.IntN(total)
		for _, a := range actions {
			if pick -= a.weight; pick < 0 {
				a.action()
				break
			}
		}
	}
	l.end()
}

// create makes the runtime create the container. In one of six lives create kills the runtime or
// the hook meanwhile.
func (l *life) create() {
	stdin, in, err := os.Pipe()
	if err != nil {
		l.errorf("%v", err)
		return
	}
	l.in = in
	defer stdin.Close()
	out, err := os.CreateTemp("", "peerlane-life-")
	if err != nil {
		l.errorf("%v", err)
		return
	}
	l.out = out.Name()
	defer out.Close()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	pidFile := l.out + ".pid"
	defer os.Remove(pidFile)
	c := l.runtime.Command(ctx, "create", "--bundle", l.built.Dir, "--pid-file", pidFile, l.id)
	c.Stdin, c.Stdout, c.Stderr = stdin, out, out
	if err := c.Start(); err != nil {
		l.errorf("%v", err)
		return
	}
	victim := []string{killHook, killRuntime, "", "", "", "", "", "", "", "", "", ""}[l.random.IntN(12)]
	after := time.Duration(l.random.Int64N(int64(120 * time.Millisecond)))
	if victim != "" {
		time.Sleep(after)
		l.did1("create, %s killed: after %v", victim, after)
		l.kill(victim, l.id, c.Process.Pid)
	} else {
		l.did1("create")
	}
	err = c.Wait()
	switch {
	case err == nil:
		l.born = true
	case victim == "":
		text, _ := os.ReadFile(l.out)
		l.errorf("create: %v: %s", err, text)
	}
	if text, err := os.ReadFile(pidFile); err == nil {
		if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && pid > 1 {
			l.init = pidfd(pid)
		}
	}
	l.broken = !l.born
	l.learn()
	l.supervised = l.watcher != nil
	if l.born && victim == "" && (l.generation == nil || !l.supervised) {
		l.errorf("a container that is created has generation %+v, supervised: %t", l.generation, l.supervised)
	}
}

// learn reads the generation and the processes of the container.
func (l *life) learn() {
	infos, _ := control.Find(l.Layout, l.id) // empty if removed
	for _, i := range infos {
		l.generation = &i.Generation
		if l.watcher == nil && i.Supervised {
			if pid := l.process(0, "\x00supervise\x00--root\x00"+l.Root+"\x00--generation\x00"+i.ID); pid > 1 {
				l.watcher = pidfd(pid)
			}
		}
		if i.Status.Relay != nil {
			l.relay.Close() // closing nil is a harmless error
			l.relay = pidfd(i.Status.Relay.PID)
		}
	}
}

// pidfd returns a pidfd of a process; nil after the end of the process.
func pidfd(pid int) *os.File {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

// shoot kills a process, and waits for the end.
func shoot(process *os.File, wait time.Duration) bool {
	if process == nil {
		return true
	}
	_ = unix.PidfdSendSignal(int(process.Fd()), unix.SIGKILL, nil, 0) // the process may have ended
	return hasEnded(process, wait)
}

func hasEnded(process *os.File, wait time.Duration) bool {
	if process == nil {
		return true
	}
	step := min(wait, 100*time.Millisecond)
	for w := testutil.BeginFor(wait); ; {
		fds := []unix.PollFd{{Fd: int32(process.Fd()), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(step.Milliseconds()))
		switch {
		case err != nil && err != unix.EINTR:
			return false
		case n > 0:
			return true
		case w.Over():
			return false
		}
	}
}

func (l *life) lives() bool { return l.born && !l.dead }

func (l *life) start() {
	if !l.lives() || l.started || l.paused {
		return
	}
	l.did1("start")
	if err := l.runtimeDo("start", l.id); err != nil && !l.broken {
		l.errorf("%v", err)
	}
	l.started = true
}

// attach has a process of the container attach to the relay.
func (l *life) attach() {
	if !l.lives() || !l.started || l.paused || l.broken && l.random.IntN(4) > 0 {
		return
	}
	l.did1("attach")
	err := l.runtimeDo("exec", l.id, "/usr/bin/test", "role", "hello")
	if works := !l.broken && l.supervised && !l.held; works && err != nil {
		l.errorf("a process cannot attach: %v", err)
	}
}

func (l *life) execute() {
	if !l.lives() || !l.started || l.paused {
		return
	}
	l.did1("exec")
	if err := l.runtimeDo("exec", l.id, "/usr/bin/test", "role", "look"); err != nil && !l.broken {
		l.errorf("%v", err)
	}
}

func (l *life) pause() {
	if !l.lives() || !l.started || l.paused || l.broken {
		return
	}
	l.did1("pause")
	err := l.runtimeDo("pause", l.id)
	// For control groups of version 1, runc tries 1,000 times to freeze a container, thaws the
	// container and fails: on a busy host the kernel does not stop all processes that fast.
	for w := testutil.Begin(); err != nil && strings.Contains(err.Error(), "unable to freeze") && !w.Over(); {
		l.did1("pause again")
		err = l.runtimeDo("pause", l.id)
	}
	if err != nil {
		l.errorf("%v", err)
		return
	}
	l.paused = true
}

func (l *life) resume() {
	if !l.paused {
		return
	}
	l.did1("resume")
	if err := l.runtimeDo("resume", l.id); err != nil && !l.broken {
		l.errorf("%v", err)
	}
	l.paused = false
}

func (l *life) killRelay() {
	if !l.lives() || l.deaths >= maxDeaths {
		return
	}
	l.learn()
	l.did1("kill the relay")
	l.deaths++
	if !shoot(l.relay, patience) {
		l.errorf("its relay does not end by SIGKILL")
	}
	if !l.supervised { // no supervisor starts a successor
		l.broken = true
	}
}

func (l *life) killSupervisor() {
	if l.watcher == nil || !l.supervised {
		return
	}
	l.learn() // of the relay, which no supervisor records
	l.did1("kill the supervisor")
	l.supervised = false
	if !shoot(l.watcher, patience) {
		l.errorf("its supervisor does not end by SIGKILL")
	}
}

func (l *life) killInit() {
	if !l.lives() || l.init == nil {
		return
	}
	l.resume() // a frozen process does not end
	l.did1("kill init")
	l.dead = true
	if !shoot(l.init, patience) {
		l.errorf("init does not end by SIGKILL")
	}
	l.mustGo()
}

// mustGo waits until the supervisor has removed the generation of an ended container.
func (l *life) mustGo() {
	if !l.supervised || l.generation == nil {
		return
	}
	if !hasEnded(l.watcher, patience) {
		l.errorf("its supervisor has not ended within %v of init", patience)
		return
	}
	for w := testutil.BeginFor(patience); ; time.Sleep(10 * time.Millisecond) {
		left := l.left()
		if len(left) == 0 {
			return
		}
		if w.Over() {
			l.errorf("its supervisor has ended, and left %v", left)
			return
		}
		if l.broken { // the collector removes the rest
			if _, err := collector.Collect(l.Layout); err != nil {
				l.errorf("%v", err)
				return
			}
		}
	}
}

// administer runs a relay command, which may fail in a broken life.
func (l *life) administer(command string) {
	out, err := l.peerlane("relay", command, l.id)
	if err != nil && !l.broken && l.supervised && l.lives() {
		l.errorf("peerlane relay %s: %v: %s", command, err, out)
	}
}

func (l *life) stopRelay() {
	if !l.lives() || l.held || l.broken {
		return
	}
	l.did1("relay stop")
	l.administer("stop")
	l.held = true
}

func (l *life) drainRelay() {
	if !l.lives() || l.held || l.paused || l.broken {
		return
	}
	l.did1("relay drain")
	l.administer("drain")
	l.held = true
}

func (l *life) resumeRelay() {
	if !l.held || l.broken {
		return
	}
	l.did1("relay resume")
	l.administer("resume")
	l.held = l.held && !l.supervised
}

// removeObject deletes an object of Peerlane or of the runtime.
func (l *life) removeObject() {
	if l.generation == nil {
		return
	}
	y, id := l.Layout, l.generation.ID
	state := y.GenerationDir(id)
	objects := []string{
		state, filepath.Join(state, "generation.json"), filepath.Join(state, "status.json"), filepath.Join(state,
			"supervisor"),
		filepath.Join(state, "admin.sock"), filepath.Join(state, "relay.log"), fmt.Sprintf("%s/init-%d-%d", state,
			l.generation.Init.PID, l.generation.Init.Start),
		y.SocketDir(id), filepath.Join(y.SocketDir(id), "relay.sock"), y.PeerSocket(id),
		filepath.Join(y.UIDs(), strconv.Itoa(l.generation.Sandbox.UID)), filepath.Join(l.RuntimeState(), l.id),
	}
	object := objects[l.random.IntN(len(objects))]
	short, _ := filepath.Rel(l.Root, object)
	l.did1("remove an object: %s", short)
	l.learn()
	l.resume() // the runtime may have lost the container
	// A live supervisor writes files into the directory meanwhile.
	err := os.RemoveAll(object)
	for end := testutil.Begin(); errors.Is(err, unix.ENOTEMPTY) && !end.Over(); err = os.RemoveAll(object) {
	}
	if err != nil {
		l.errorf("%v", err)
	}
	l.broken = true
}

func (l *life) collect() {
	l.did1("relay gc")
	if out, err := l.peerlane("relay", "gc"); err != nil {
		l.errorf("peerlane relay gc: %v: %s", err, out)
	}
}

func (l *life) wait() {
	l.did1("wait")
	time.Sleep(time.Duration(l.random.Int64N(int64(150 * time.Millisecond))))
}

func (l *life) deleteContainer() {
	if !l.born {
		return
	}
	l.resume()
	l.did1("delete")
	l.clean(l.id)
	l.dead = true
	if !l.broken {
		if !hasEnded(l.init, patience) {
			l.errorf("init has not ended within %v of the container's deletion", patience)
		}
		l.mustGo()
	}
}

// left returns the names of the remaining objects of the life.
func (l *life) left() (names []string) {
	add := func(path string) {
		if _, err := os.Lstat(path); err == nil {
			names = append(names, path)
		}
	}
	if g := l.generation; g != nil {
		add(l.Layout.GenerationDir(g.ID))
		add(l.Layout.SocketDir(g.ID))
		add(l.Layout.PeerSocket(g.ID))
		groups, _ := filepath.Glob("/sys/fs/cgroup/*/*/" + g.ID)
		more, _ := filepath.Glob("/sys/fs/cgroup/*/" + g.ID)
		names = slices.Concat(names, groups, more)
	}
	for what, process := range map[string]*os.File{"the relay": l.relay, "the supervisor": l.watcher, "init": l.init} {
		if !hasEnded(process, 0) {
			names = append(names, what)
		}
	}
	infos, _ := generation.List(l.Layout)
	for _, i := range infos {
		if i.Container.ID == l.id {
			names = append(names, "generation "+i.ID)
		}
	}
	return names
}

// end ends the life as an engine does, and requires that no object remains.
func (l *life) end() {
	l.resume()
	l.learn()
	if l.in != nil {
		l.in.Close()
	}
	shoot(l.init, 0) // the runtime may have lost the container
	l.clean(l.id)
	defer os.Remove(l.out)
	var left []string
	for w := testutil.BeginFor(2 * patience); ; time.Sleep(20 * time.Millisecond) {
		if left = l.left(); len(left) == 0 {
			break
		}
		if w.Over() {
			l.errorf("left at its end: %s", strings.Join(left, ", "))
			break
		}
		if _, err := collector.Collect(l.Layout); err != nil {
			l.errorf("collecting: %v", err)
			break
		}
	}
	for _, f := range []*os.File{l.init, l.relay, l.watcher} {
		f.Close() // closing nil is a harmless error
	}
}
