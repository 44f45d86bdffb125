package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
)

// crowd takes a uid and creates as many threads as possible, more than a relay's limit, and waits
// for the end of input.
func crowd(arguments []string) error {
	uid, err := strconv.Atoi(arguments[0])
	if err != nil {
		return err
	}
	count, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Setresgid(uid, uid, uid), unix.Setresuid(uid, uid, uid)); err != nil {
		return err
	}
	// Processes with shared memory instead of threads: a Go program cannot use a foreign thread.
	made := 0
	for range count {
		c := exec.Command("/bin/sleep", "1000000")
		c.Dir = "/"
		if err := c.Start(); err != nil {
			break
		}
		defer func() { _ = c.Process.Kill() }()
		made++
	}
	say(said{Kind: "crowd", Error: strconv.Itoa(made)})
	_, err = os.Stdin.Read(make([]byte, 1))
	if err != nil && err.Error() == "EOF" {
		err = nil
	}
	return err
}

// A container with CAP_SETUID takes a relay's uid and starts as many processes with the uid as the
// relay may have tasks. The limit of the relay is the limit of the relay's control group: after its
// death the relay starts again, has threads and serves.
func TestRelayUIDCrowdedByOthersRelayServes(t *testing.T) {
	controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil || !strings.Contains(string(controllers), "pids") {
		t.Skip("cgroup2 has no pids controller here, so RLIMIT_NPROC limits a relay's tasks, as peerlane doctor says")
	}
	const tasks = 128 // the least that the configuration permits
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
			attack := b.follow(c.id+"-crowd", exec.Command(self, "role", "crowd", fmt.Sprint(i.Sandbox.Relay.UID), fmt.Sprint(2*tasks)), func(ctx context.Context) error { return nil })
			if made := attack.next("crowd").Error; made != fmt.Sprint(2*tasks) {
				t.Fatalf("%s processes of the relay's uid are made", made)
			}
			if limits := read(t, fmt.Sprintf("/proc/%d/limits", i.Status.Relay.PID)); !strings.Contains(strings.Join(strings.Fields(limits), " "), "Max processes unlimited unlimited") {
				t.Errorf("other processes of the relay's uid count in the relay's limit: %s", limits)
			}
			if limit := strings.TrimSpace(read(t, i.Cgroup+"/pids.max")); limit != fmt.Sprint(tasks) {
				t.Errorf("the relay's control group permits %s tasks", limit)
			}
			kill(t, i.Status.Relay.PID)
			other := b.start(b.lanes[0], "hold") // of another relay, which is not concerned
			other.next("hello")
			c.exec("hello") // by the relay that was started again
		})
	}
}
