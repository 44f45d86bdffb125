//go:build engines

package engines

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ground is a mount namespace that an engine has to itself, its daemon, its
// commands and its containers: with this host's root or another, a /run and a
// /dev/shm of its own, and the CDI specifications where every engine looks for
// them. It ends with its last process.
type ground struct {
	pid         int
	environment []string
}

// cgroups of a ground.
type cgroups int

const (
	asTheHost  cgroups = iota
	v1                 // without the v2 hierarchy beside it
	v2                 // alone
	anyCgroups = asTheHost
)

// lay makes a ground. root is the root file system's lower layer, "" for the
// host's; shared are directories of the host that another root gets too.
func lay(t *testing.T, dir, root string, which cgroups, specifications string, shared ...string) *ground {
	t.Helper()
	var script strings.Builder
	say := func(format string, arguments ...any) { fmt.Fprintf(&script, format+"\n", arguments...) }
	say("set -eu")
	switch which {
	case v1:
		// Debian 12's crun refuses hosts whose cgroup v2 hierarchy has controllers
		// beside v1 ones.
		say("if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi")
	case v2:
		say("if mountpoint -q /sys/fs/cgroup/unified; then mount --bind /sys/fs/cgroup/unified /sys/fs/cgroup; fi")
	}
	if root != "" {
		merged := filepath.Join(dir, "merged")
		for _, d := range []string{"upper", "work", "merged"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		say("mount -t overlay overlay -o lowerdir=%s,upperdir=%s/upper,workdir=%s/work %s", root, dir, dir, merged)
		for _, d := range append([]string{"/proc", "/sys", "/dev", "/tmp"}, shared...) {
			say("mkdir -p %s%s", merged, d)
			say("mount --rbind %s %s%s", d, merged, d)
		}
		say("mkdir %s/.old", merged)
		say("cd %s", merged)
		say("pivot_root . .old")
		say("umount -l /.old")
	}
	say("mount -t tmpfs tmpfs /run")
	say("mount -t tmpfs tmpfs /dev/shm")
	say("mkdir /run/cdi /run/lock")
	say("mount --bind %s /run/cdi", specifications)
	say("echo ready")
	// Until the test closes its input.
	say("exec cat >/dev/null")
	c := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", script.String())
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	c.Stderr = &stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := c.Wait(); err != nil {
			t.Errorf("the engine's mount namespace: %v: %s", err, stderr.String())
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("the engine's mount namespace: %q, %v: %s", line, err, stderr.String())
	}
	go io.Copy(io.Discard, out) //nolint:errcheck // cat writes nothing there
	return &ground{pid: c.Process.Pid}
}

// command is a program on this ground.
func (g *ground) command(ctx context.Context, program string, arguments ...string) *exec.Cmd {
	arguments = append([]string{"--mount", "--target", fmt.Sprint(g.pid), "--", program}, arguments...)
	c := exec.CommandContext(ctx, "nsenter", arguments...)
	c.Env = append(os.Environ(), g.environment...)
	c.WaitDelay = 5 * time.Second
	return c
}

// daemon starts a program that is ended with the test, and waits until it is
// ready.
func (g *ground) daemon(t *testing.T, ready func() error, program string, arguments ...string) {
	t.Helper()
	c := g.command(context.Background(), program, arguments...)
	// A group of its own: what it has started is ended with it.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	log, err := os.CreateTemp(t.TempDir(), filepath.Base(program))
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout, c.Stderr = log, log
	started, ended := make(chan error), make(chan error, 1)
	go func() {
		// The kernel takes the death of the thread for that of the parent.
		runtime.LockOSThread()
		err := c.Start()
		started <- err
		if err == nil {
			ended <- c.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Errorf("%s does not end", program)
		}
		syscall.Kill(-c.Process.Pid, syscall.SIGKILL) //nolint:errcheck // there may be nobody
		if t.Failed() {
			t.Logf("%s said last: %s", program, tail(log.Name()))
		}
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := ready()
		if err == nil {
			return
		}
		select {
		case status := <-ended:
			ended <- status
			t.Fatalf("%s ended: %v: %s", program, status, tail(log.Name()))
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("%s is not ready: %v: %s", program, err, tail(log.Name()))
		}
	}
}

func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

// mounts are those of the ground.
func (g *ground) mounts() (map[string]bool, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", g.pid))
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		found[strings.TrimSpace(line)] = true
	}
	return found, nil
}
