package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
)

// script writes an executable script for use as a hook.
func (b *bed) script(name, text string) string {
	b.Helper()
	path := filepath.Join(b.Root, name)
	if err := programs.Write(path, []byte("#!/bin/sh\n"+text+"\n")); err != nil {
		b.Fatal(err)
	}
	return path
}

// wrap replaces the program of hooks. The program receives the path and the arguments of the hook.
func wrap(hooks []specs.Hook, program string) {
	for i := range hooks {
		hooks[i].Args = append([]string{program, hooks[i].Path}, hooks[i].Args[1:]...)
		hooks[i].Path = program
	}
}

// A container id is unique within a runtime root only; two runtimes can use the same id.
func TestSameIDInTwoRuntimeRootsIsDistinct(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			built := b.bundle(g, testbed.Devices(g), "hold")
			first := b.run(built)
			first.next("hello")
			other, err := bundle.FindRuntime(runtimeName, filepath.Join(b.Root, "other-runtime"))
			if err != nil {
				t.Fatal(err)
			}
			// crun kills a container by its control group; by default both containers would share
			// one.
			built.Spec.Linux.CgroupsPath = "/" + b.ContainerID("other")
			if err := built.Write(); err != nil {
				t.Fatal(err)
			}
			own := b.runtime
			b.runtime = other
			second := b.run(built)
			second.bed = &bed{T: b.T, Host: b.Host, runtime: other, lanes: b.lanes}
			b.runtime = own
			second.next("hello")
			infos, err := control.Find(b.Layout, first.id)
			if err != nil || len(infos) != 2 || second.id != first.id {
				t.Fatalf("%d generations of %s and %s, %v", len(infos), first.id, second.id, err)
			}
			if infos[0].Container.RuntimeRoot != own.State || infos[1].Container.RuntimeRoot != other.State {
				t.Errorf("the runtimes' roots are %s and %s", infos[0].Container.RuntimeRoot, infos[1].Container.RuntimeRoot)
			}
			first.end()
			if lives, err := control.Find(b.Layout, second.id); err != nil || lives[len(lives)-1].ID != infos[1].ID ||
				!lives[len(lives)-1].Alive {
				t.Errorf("generation of the other container: %+v, %v", lives, err)
			}
			second.end()
		})
	}
}

// restarts is the number of containers with one id in TestOverlappingRestartsKeepGenerationsApart;
// `make soak-containers` starts more.
const restarts = 40

// An engine starts the next container with an id before poststop of the previous container:
// poststop is 2 seconds late, so that a dozen hooks are pending at any time.
func TestOverlappingRestartsKeepGenerationsApart(t *testing.T) {
	restarts := int(fromEnvironment(t, "PEERLANE_SOAK_CONTAINERS", restarts))
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g := b.gpu(b.lanes[0])
	built := b.bundle(g, testbed.Devices(g), "hello")
	wrap(built.Spec.Hooks.Poststop, b.script("late", `sleep 2; exec "$@"`))
	if err := built.Write(); err != nil {
		t.Fatal(err)
	}
	id := b.ContainerID("restarted")
	type result struct {
		out []byte
		err error
	}
	results := make(chan result, restarts)
	for range restarts {
		c := b.runtime.Run(context.Background(), built, id)
		go func() {
			out, err := c.CombinedOutput()
			results <- result{out, err}
		}()
		// runc forgets the container before poststop hooks run.
		state := filepath.Join(b.RuntimeState(), id)
		for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(state); err == nil {
				break
			}
			if end.Over() {
				t.Fatal("a container does not begin")
			}
		}
		for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(state); errors.Is(err, os.ErrNotExist) {
				break
			}
			if end.Over() {
				t.Fatal("a container does not end")
			}
		}
	}
	failed := 0
	for range restarts {
		if r := <-results; r.err != nil || !strings.Contains(string(r.out), `"hello"`) {
			if failed++; failed <= 3 {
				t.Errorf("%v: %s", r.err, r.out)
			}
		}
	}
	t.Logf("%d of %d restarts succeeded", restarts-failed, restarts)
}

// recycle starts a process with the given pid.
func recycle(t *testing.T, pid int) *exec.Cmd {
	t.Helper()
	for range 1000 {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, pid-1), 0); err != nil {
			t.Skipf("this kernel gives out no chosen number: %v", err)
		}
		c := exec.Command("sleep", "1000000")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		if c.Process.Pid == pid {
			return c
		}
		_ = c.Process.Kill() // another process got the pid first
		_ = c.Wait()
	}
	t.Fatalf("no process gets the number %d", pid)
	return nil
}

// The runtime is killed after the hook's work and before the hook returns; then another process
// gets the pid of the container's init. The test is not parallel: processes of other tests would
// reuse pids.
func TestRuntimeKilledDuringHookLeavesNothing(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			built := b.bundle(g, testbed.Devices(g), "hello")
			began := filepath.Join(b.Root, "began")
			wrap(built.Spec.Hooks.CreateRuntime, b.script("slow", `"$@" && touch `+began+` && exec sleep 1000000`))
			if err := built.Write(); err != nil {
				t.Fatal(err)
			}
			id := b.ContainerID("killed")
			run := b.runtime.Run(context.Background(), built, id)
			run.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			if err := run.Start(); err != nil {
				t.Fatal(err)
			}
			for end := testutil.BeginFor(2 * patience); ; time.Sleep(time.Millisecond) {
				if _, err := os.Stat(began); err == nil {
					break
				}
				if end.Over() {
					t.Fatal("the hook does not come to its end")
				}
			}
			infos, err := control.Find(b.Layout, id)
			if err != nil || len(infos) != 1 {
				t.Fatalf("%+v, %v", infos, err)
			}
			// Kill the supervisor too, so that only the next hook can detect the end.
			s := &soak{bed: b}
			watcher := s.process(0, "\x00--generation\x00"+infos[0].ID)
			kill(t, watcher)
			_ = syscall.Kill(-run.Process.Pid, syscall.SIGKILL) // the runtime and its hook
			_ = run.Wait()
			init := infos[0].Init.PID
			_ = syscall.Kill(init, syscall.SIGKILL) // init may have ended with the runtime
			for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
				if _, err := os.Stat(fmt.Sprintf("/proc/%d", init)); err != nil {
					break
				}
				if end.Over() {
					t.Fatal("the container's init does not end")
				}
			}
			stranger := recycle(t, init)
			defer func() { _ = stranger.Process.Kill(); _ = stranger.Wait() }()
			if now, err := control.Find(b.Layout, id); err == nil && now[0].Alive {
				t.Errorf("another process counts as the container's init: %+v", now)
			}
			s.clean(id)
			// Start the next container with the id.
			wrapless := b.bundle(g, testbed.Devices(g), "hello")
			out, err := b.runtime.Run(context.Background(), wrapless, id).CombinedOutput()
			if err != nil || !strings.Contains(string(out), `"hello"`) {
				t.Errorf("the next container: %v: %s", err, out)
			}
			if _, err := collector.Collect(b.Layout); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(b.Layout.GenerationDir(infos[0].ID)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("generation still exists: %v", err)
			}
			if err := syscall.Kill(init, 0); err != nil {
				t.Errorf("the stranger was killed: %v", err)
			}
		})
	}
}

// gVisor, and runtimes of virtual machines, report a process of the host in place of the
// container's init: the hook must not mount anything for such a process.
func TestRuntimeReportingHostPIDIsRefused(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			journal := b.hostLog()
			g := b.gpu(b.lanes[0])
			built := b.bundle(g, testbed.Devices(g), "hello")
			// The pid of a process in the runtime's mount namespace.
			wrap(built.Spec.Hooks.CreateRuntime, b.script("elsewhere", `sed "s/\"pid\": *[0-9]*/\"pid\": $$/" | "$@"`))
			if err := built.Write(); err != nil {
				t.Fatal(err)
			}
			before, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			c := b.run(built)
			for s := range c.lines {
				t.Errorf("the container ran and said %+v", s)
			}
			c.end()
			b.mustLog(journal, "is in the mount namespace of the host", c.id)
			if after, err := os.ReadFile("/proc/self/mountinfo"); err != nil ||
				strings.Contains(string(after), b.Layout.Run()) && !strings.Contains(string(before), b.Layout.Run()) {
				t.Errorf("something is mounted on the host, %v:\n%s", err, after)
			}
			if list, err := generation.List(b.Layout); err != nil || len(list) > 0 {
				t.Errorf("remaining generations: %+v, %v", list, err)
			}
		})
	}
}
