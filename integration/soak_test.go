package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/internal/testutil"
)

// Variables of `make soak-containers`: number of containers over both runtimes, and seed.
const (
	soakVariable     = "PEERLANE_SOAK_CONTAINERS"
	soakSeedVariable = "PEERLANE_SOAK_SEED"
	soakContainers   = 50
	soakAtOnce       = 3
)

// Victims, in turn.
const (
	killNothing    = "nothing"
	killContainer  = "container"
	killRelay      = "relay"
	killHook       = "hook"
	killSupervisor = "supervisor"
	killRuntime    = "runtime"
)

var victims = []string{killNothing, killContainer, killRelay, killHook, killSupervisor, killRuntime}

func fromEnvironment(t *testing.T, name string, value uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return value
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// TestSoakLeavesNothing starts containers and kills participating processes at random moments: no object remains
// on the host, and a start fails only if its container, hook, supervisor or runtime was killed.
func TestSoakLeavesNothing(t *testing.T) {
	n := int(fromEnvironment(t, soakVariable, soakContainers))
	seed := fromEnvironment(t, soakSeedVariable, uint64(time.Now().UnixNano()))
	t.Logf("%d containers; %s=%d makes the same choices again", n, soakSeedVariable, seed)
	for i, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			s := &soak{bed: b, built: b.bundle(g, testbed.Devices(g), "hold"), results: map[string]int{}}
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			work := make(chan soaked)
			var workers sync.WaitGroup
			for range soakAtOnce {
				workers.Go(func() {
					for c := range work {
						s.one(c)
					}
				})
			}
			begun := time.Now()
			share := (n + len(runtimes) - 1 - i) / len(runtimes)
			for k := range share {
				work <- soaked{k, victims[k%len(victims)], time.Duration(r.Int64N(int64(150 * time.Millisecond)))}
			}
			close(work)
			workers.Wait()
			t.Logf("%d containers in %v: %v", share, time.Since(begun).Round(time.Second), s.results)
			// The collector removes the remains of a killed supervisor or hook.
			if _, err := collector.Collect(b.Layout); err != nil {
				t.Error(err)
			}
		})
	}
}

type soak struct {
	*bed
	built   *bundle.Bundle
	mu      sync.Mutex
	results map[string]int
}

// soaked is the plan for one container.
type soaked struct {
	number int
	victim string
	after  time.Duration
}

func (s *soak) one(c soaked) {
	id := s.ContainerID(fmt.Sprintf("soak-%d", c.number))
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	var out, stderr bytes.Buffer
	run := s.runtime.Run(ctx, s.built, id)
	run.Stdout, run.Stderr = &out, &stderr
	in, err := run.StdinPipe()
	if err != nil {
		s.Error(err)
		return
	}
	// The container holds the pipes too, and outlives a killed runtime.
	run.WaitDelay = 5 * time.Second
	if err := run.Start(); err != nil {
		s.Error(err)
		return
	}
	begun := time.Now()
	time.Sleep(c.after)
	killed := s.kill(c.victim, id, run.Process.Pid)
	switch c.victim {
	case killNothing, killRelay:
		// The client prints hello in any case, and then waits for the end of input.
	default:
		time.Sleep(50 * time.Millisecond)
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
		_ = s.runtime.Delete(ctx, id) // remove the rest
		cancel()
	}
	in.Close()
	err = run.Wait()
	result := c.victim + ", started"
	if !bytes.Contains(out.Bytes(), []byte(`"hello"`)) {
		result = c.victim + ", not started"
		if c.victim == killNothing || c.victim == killRelay {
			s.Errorf("container %d: %s killed %v after its start (%t): %v: %s%s", c.number, c.victim, time.Since(begun), killed,
				err, out.Bytes(), stderr.Bytes())
		}
	}
	s.clean(id)
	s.mu.Lock()
	s.results[result]++
	s.mu.Unlock()
}

// kill kills the victim, and reports whether the process existed.
func (s *soak) kill(victim, id string, runtime int) bool {
	switch victim {
	case killNothing:
		return false
	case killRuntime:
		return syscall.Kill(runtime, syscall.SIGKILL) == nil
	}
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		pid := 0
		switch victim {
		case killHook:
			pid = s.process(runtime, "peerlane-hook\x00create\x00")
		default:
			infos, _ := control.Find(s.Layout, id) // may not exist yet
			if len(infos) == 0 {
				continue
			}
			switch victim {
			case killContainer:
				pid = infos[0].Init.PID
			case killRelay:
				if infos[0].Status.Relay != nil {
					pid = infos[0].Status.Relay.PID
				}
			case killSupervisor:
				pid = s.process(0, "\x00supervise\x00--root\x00"+s.Root+"\x00--generation\x00"+infos[0].ID)
			}
		}
		if pid > 1 && syscall.Kill(pid, syscall.SIGKILL) == nil {
			return true
		}
	}
	return false
}

// process finds a process by a part of the command line; for a parent other than 0, among the
// children of the parent.
func (s *soak) process(parent int, program string) int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		command, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")) // the process may have ended
		if !strings.Contains(string(command), program) {
			continue
		}
		status, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "status"))
		if parent == 0 || strings.Contains(string(status), fmt.Sprintf("\nPPid:\t%d\n", parent)) {
			return pid
		}
	}
	return 0
}

// clean cleans up as an engine does after the death of its runtime: clean deletes the container,
// and the runtime's files if the runtime has lost the container.
func (s *soak) clean(id string) {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	err := s.runtime.Delete(ctx, id)
	if err == nil {
		_, err = os.Stat(filepath.Join(s.RuntimeState(), id))
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		_ = os.RemoveAll(filepath.Join(s.RuntimeState(), id))
	}
	var groups []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == id {
			groups = append(groups, path)
		}
		return nil // the group was removed meanwhile
	})
	for _, group := range groups {
		procs, _ := os.ReadFile(group + "/cgroup.procs")
		for _, pid := range strings.Fields(string(procs)) {
			if n, err := strconv.Atoi(pid); err == nil && n > 1 {
				_ = syscall.Kill(n, syscall.SIGKILL) // a process of the container, whose runtime is dead
			}
		}
		for range 100 {
			if err := os.Remove(group); err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// hold stays attached despite deaths of relays, prints hello and waits for the end of input.
func hold() error {
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		err := hello()
		if err == nil {
			break
		}
		if end.Over() {
			return err
		}
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}
