package integration_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/attack"
)

// crowd creates count threads, sets the uid of each, and waits for the end of input. The first
// thread keeps its uid, so that a signal to all processes of the uid does not reach this process.
func crowd(arguments []string) error {
	uid, err := strconv.Atoi(arguments[0])
	if err != nil {
		return err
	}
	count, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	made := make(chan syscall.Errno)
	for range count {
		go attack.OnThread(func() {
			made <- attack.TakeUID(uint32(uid))
			select {}
		})
	}
	for range count {
		if errno := <-made; errno != 0 {
			return fmt.Errorf("setresuid to %d: %w", uid, errno)
		}
	}
	emit(event{Kind: "crowd", Error: strconv.Itoa(count)})
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// A container with CAP_SETUID takes a relay's uid and starts more threads with the uid than the
// relay may have tasks. The limit of tasks is that of the relay's control group: after the relay's
// death its successor starts, has threads and serves.
func TestRelayUIDCrowdedByOthersRelayServes(t *testing.T) {
	controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil || !strings.Contains(string(controllers), "pids") {
		t.Skip("cgroup2 has no pids controller here, so RLIMIT_NPROC limits a relay's tasks, as peerlane doctor says")
	}
	const tasks = 128 // the minimum of the configuration
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, func(c *config.Config) { c.Relay.Tasks = tasks })
			b.nics()
			c := b.start(b.lanes[0], "hold")
			c.next("hello")
			i := b.inspection(c)
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			threads := b.follow(c.id+"-crowd", exec.Command(self, "role", "crowd", fmt.Sprint(i.Sandbox.Relay.UID),
				fmt.Sprint(2*tasks)), func(ctx context.Context) error { return nil })
			if made := threads.next("crowd").Error; made != fmt.Sprint(2*tasks) {
				t.Fatalf("%s threads of the relay's uid are made", made)
			}
			if limits := read(t, fmt.Sprintf("/proc/%d/limits", i.Status.Relay.PID)); !strings.Contains(
				strings.Join(strings.Fields(limits), " "), "Max processes unlimited unlimited") {
				t.Errorf("other processes of its uid count in the relay's limit: %s", limits)
			}
			if limit := strings.TrimSpace(read(t, i.Cgroup+"/pids.max")); limit != fmt.Sprint(tasks) {
				t.Errorf("the relay's control group permits %s tasks", limit)
			}
			kill(t, i.Status.Relay.PID)
			other := b.start(b.lanes[0], "hold") // of another relay, which goes on
			other.next("hello")
			c.exec("hello") // the successor serves
		})
	}
}
