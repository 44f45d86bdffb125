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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

// ground is a private mount namespace for an engine with its daemon, commands and containers: this
// host's root or another root, separate /run and /dev/shm, and CDI specifications at the default
// path. The namespace ends with its last process.
type ground struct {
	pid         int
	environment []string
	user        int // uid of the programs, by default root
}

// cgroups of a ground.
type cgroups int

const (
	asTheHost  cgroups = iota
	v1                 // without the v2 hierarchy
	v2                 // alone
	anyCgroups = asTheHost
)

// lay creates a ground. root is the lower layer of the root file system, "" for the host's root;
// nodes is the directory of the GPUs' device nodes; shared lists directories of the host that a
// separate root also gets.
func lay(t *testing.T, dir, root string, which cgroups, specifications, nodes string, shared ...string) *ground {
	t.Helper()
	var script strings.Builder
	add := func(format string, arguments ...any) { fmt.Fprintf(&script, format+"\n", arguments...) }
	add("set -eu")
	switch which {
	case v1:
		// Debian 12's crun refuses hosts with cgroup v1 whose v2 hierarchy has controllers.
		add("if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi")
	case v2:
		add("if mountpoint -q /sys/fs/cgroup/unified; then mount --bind /sys/fs/cgroup/unified /sys/fs/cgroup; fi")
	}
	if root != "" {
		merged := filepath.Join(dir, "merged")
		for _, d := range []string{"upper", "work", "merged"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		add("mount -t overlay overlay -o lowerdir=%s,upperdir=%s/upper,workdir=%s/work %s", root, dir, dir, merged)
		for _, d := range append([]string{"/proc", "/sys", "/dev", "/tmp"}, shared...) {
			add("mkdir -p %s%s", merged, d)
			add("mount --rbind %s %s%s", d, merged, d)
		}
		add("mkdir %s/.old", merged)
		add("cd %s", merged)
		add("pivot_root . .old")
		add("umount -l /.old")
		add("touch /etc/hosts /etc/resolv.conf") // these files exist on every host
	}
	add("mount -t tmpfs tmpfs /run")
	add("mkdir /run/cdi /run/lock /run/dev")
	// A container in a user namespace gets bind mounts of nodes in the host's /dev instead of new
	// nodes, so the nodes must exist.
	add("mount -t tmpfs -o mode=755 tmpfs /run/dev")
	add("cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/fuse %s/* /run/dev", nodes)
	add("mkdir /run/dev/pts /run/dev/shm /run/dev/mqueue")
	add("mount --rbind /dev/pts /run/dev/pts")
	add("for link in fd:/proc/self/fd ptmx:pts/ptmx stdin:fd/0 stdout:fd/1 stderr:fd/2; do ln -s ${link#*:} " +
		"/run/dev/${link%%%%:*}; done")
	add("mount --rbind /run/dev /dev")
	add("mount -t tmpfs tmpfs /dev/shm")
	add("mount --bind %s /run/cdi", specifications)
	// The engine chooses these ids for the user namespace.
	add("for file in subuid subgid; do echo daemon:100000:65536 >/run/$file; [ -e /etc/$file ] || : >/etc/$file; mount " +
		"--bind /run/$file /etc/$file; done")
	add("echo ready")
	// Run until the test closes the input.
	add("exec cat >/dev/null")
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
	go io.Copy(io.Discard, out) // cat writes nothing there
	return &ground{pid: c.Process.Pid}
}

// command returns a program that runs on this ground.
func (g *ground) command(ctx context.Context, program string, arguments ...string) *exec.Cmd {
	arguments = append([]string{program}, arguments...)
	if user := fmt.Sprint(g.user); g.user != 0 {
		arguments = append([]string{"setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"}, arguments...)
	}
	arguments = append([]string{"--mount", "--target", fmt.Sprint(g.pid), "--"}, arguments...)
	c := exec.CommandContext(ctx, "nsenter", arguments...)
	c.Env = append(os.Environ(), g.environment...)
	c.WaitDelay = 5 * time.Second
	return c
}

// daemon is a long-running program on a ground.
type daemon struct {
	ground  *ground
	program string
	command []string
	ready   func() error
	log     string // a path
	process *os.Process
	ended   chan error
}

// daemon starts a program, waits until it is ready, and stops it at the end of the test.
func (g *ground) daemon(t *testing.T, ready func() error, command ...string) *daemon {
	t.Helper()
	d := &daemon{ground: g, program: filepath.Base(command[0]), command: command, ready: ready}
	d.log = filepath.Join(t.TempDir(), d.program)
	t.Cleanup(func() {
		d.stop(t)
		if t.Failed() {
			t.Logf("%s said last: %s", d.program, tail(d.log))
		}
	})
	d.start(t)
	return d
}

// again restarts the daemon.
func (d *daemon) again(t *testing.T) {
	t.Helper()
	d.stop(t)
	d.start(t)
}

func (d *daemon) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	c := d.ground.command(context.Background(), d.command[0], d.command[1:]...)
	c.Stdout, c.Stderr = log, log
	ended, err := testutil.StartChild(c)
	if err != nil {
		t.Fatal(err)
	}
	d.process, d.ended = c.Process, ended
	for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
		err := d.ready()
		if err == nil {
			return
		}
		select {
		case status := <-ended:
			ended <- status
			t.Fatalf("%s ended: %v: %s", d.program, status, tail(d.log))
		default:
		}
		if end.Over() {
			t.Fatalf("%s is not ready: %v: %s", d.program, err, tail(d.log))
		}
	}
}

// stop stops the daemon, if running.
func (d *daemon) stop(t *testing.T) {
	t.Helper()
	if d.process == nil {
		return
	}
	d.process.Signal(syscall.SIGTERM) // the process may have ended
	select {
	case <-d.ended:
	case <-testutil.After(30 * time.Second):
		t.Errorf("%s does not end", d.program)
		d.process.Kill() // as above
		<-d.ended
	}
	d.process = nil
}

func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

// mounts returns the mounts of the ground.
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
