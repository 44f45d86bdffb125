package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// ordinary returns a user with subordinate ids, who may run rootless containers.
func ordinary(t *testing.T) (uid, gid int) {
	t.Helper()
	for _, command := range []string{"podman", "newuidmap"} {
		if _, err := exec.LookPath(command); err != nil {
			t.Skipf("needs %s: %v", command, err)
		}
	}
	text, err := os.ReadFile("/etc/subuid")
	if err != nil {
		t.Skipf("needs an ordinary user with subordinate uids: %v", err)
	}
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, ":")
		who, err := user.Lookup(name)
		if err != nil || who.Uid == "0" {
			continue
		}
		uid, err := strconv.Atoi(who.Uid)
		gid, errGid := strconv.Atoi(who.Gid)
		if err := errors.Join(err, errGid); err != nil {
			t.Fatal(err)
		}
		return uid, gid
	}
	t.Skip("needs an ordinary user with subordinate uids: /etc/subuid names none (useradd --create-home NAME makes one)")
	return 0, 0
}

// give changes the owner of the host's files to the user.
func (b *bed) give(uid, gid int) {
	b.Helper()
	err := filepath.WalkDir(b.Root, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, uid, gid))
	})
	// Make the programs accessible: they may be in a directory of root.
	if err := errors.Join(err, os.Chmod(b.Binaries, 0o755)); err != nil {
		b.Fatal(err)
	}
}

// mountNodes makes the specifications of a kind mount device nodes: a rootless runtime mounts only
// nodes with the path on the host, and the simulator's nodes have other paths.
func (b *bed) mountNodes(kind string) {
	b.Helper()
	path := filepath.Join(b.CDIDir(), cdi.FileName(kind))
	var spec specs.Spec
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &spec)
	}
	if err != nil {
		b.Fatal(err)
	}
	all := []*specs.ContainerEdits{&spec.ContainerEdits}
	for i := range spec.Devices {
		all = append(all, &spec.Devices[i].ContainerEdits)
	}
	for _, edits := range all {
		for _, node := range edits.DeviceNodes {
			edits.Mounts = append(edits.Mounts, &specs.Mount{HostPath: node.HostPath, ContainerPath: node.Path,
				Options: []string{"bind", "rw"}})
		}
		edits.DeviceNodes = nil
	}
	if text, err = json.Marshal(spec); err == nil {
		err = os.WriteFile(path, text, 0o644)
	}
	if err != nil {
		b.Fatal(err)
	}
}

// as makes the user run a command.
func (b *bed) as(uid, gid int, c *exec.Cmd) *exec.Cmd {
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	c.Dir = b.Root
	c.Env = []string{
		"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + filepath.Join(b.Root,
			"home"), "XDG_RUNTIME_DIR=" + filepath.Join(b.Root, "xdg"),
	}
	return c
}

// launches replaces the user's systemd with peerlane-relay.socket: each connection becomes a
// service of the user.
func (b *bed) launches(as func(*exec.Cmd) *exec.Cmd) {
	b.Helper()
	if err := os.MkdirAll(filepath.Join(b.Root, "run/systemd/system"), 0o755); err != nil {
		b.Fatal(err)
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: b.Layout.Launcher()})
	if err != nil {
		b.Fatal(err)
	}
	var services sync.WaitGroup
	services.Go(func() {
		for {
			conn, err := listener.AcceptUnix()
			if err != nil {
				return // the listener is closed
			}
			file, err := conn.File()
			conn.Close()
			if err != nil {
				b.Error(err)
				return
			}
			services.Go(func() {
				defer file.Close()
				c := as(exec.Command(b.HookBinary(), "accept"))
				c.Stdin = file
				if out, err := c.CombinedOutput(); err != nil {
					b.Errorf("peerlane-hook accept: %v: %s", err, out)
				}
			})
		}
	})
	b.Cleanup(func() {
		listener.Close()
		services.Wait()
	})
}

func TestRootlessPodmanProvidesLanes(t *testing.T) {
	for _, launcher := range []string{config.LauncherFork, config.LauncherSystemd} {
		t.Run(launcher, func(t *testing.T) { testRootlessPodman(t, launcher) })
	}
}

func testRootlessPodman(t *testing.T, launcher string) {
	uid, gid := ordinary(t)
	b := withoutCDI(t, "runc", []string{"peerlane.dev/lane=*", "peerlane.dev/gpu=*", "nvidia.com/gpu=*"})
	for _, dir := range []string{"home", "xdg"} {
		if err := os.Mkdir(filepath.Join(b.Root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	as := func(c *exec.Cmd) *exec.Cmd { return b.as(uid, gid, c) }
	b.mountNodes("nvidia.com/gpu")
	b.mountNodes(cdi.KindGPU)
	b.nics()
	if launcher == config.LauncherSystemd {
		b.launches(as)
	}
	b.give(uid, gid)
	p := podmanAs(b, as, "--storage-driver=vfs")
	t.Cleanup(func() {
		// system migrate ends the process that keeps the user's namespaces.
		if out, err := p.command(context.Background(), "system", "migrate").CombinedOutput(); err != nil {
			t.Errorf("podman system migrate: %v: %s", err, out)
		}
	})
	start := func(name string, lane planner.Lane) *container {
		option := "--env=PEERLANE_DEVICES=" + strings.Join(testbed.Devices(b.gpu(lane)), ",")
		return b.follow(name, p.runCommand([]string{"--interactive", "--name", name, option}, "stream"),
			func(ctx context.Context) error {
				out, err := p.command(ctx, "rm", "--force", "--ignore", "--time=0", name).CombinedOutput()
				if err != nil {
					return fmt.Errorf("podman rm %s: %w: %s", name, err, out)
				}
				return nil
			})
	}
	a, z := start("a", b.lanes[0]), start("z", b.lanes[1])
	handleA, handleZ := a.next("listening").Handle, z.next("listening").Handle
	a.send(event{Handle: handleZ})
	z.send(event{Handle: handleA})
	a.next("moving")
	z.next("moving")

	// The relay has only the user's privileges.
	relay := b.generationOf(b.gpu(b.lanes[0])).Status.Relay
	info, err := os.Stat(fmt.Sprintf("/proc/%d", relay.PID))
	if err != nil {
		t.Fatal(err)
	}
	if owner := info.Sys().(*syscall.Stat_t).Uid; int(owner) != uid {
		t.Errorf("the relay is user %d's, and the container %d's", owner, uid)
	}
	// A service is in no namespace of Podman.
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", relay.PID))
	host, errHost := os.Readlink("/proc/self/ns/user")
	if err := errors.Join(err, errHost); err != nil {
		t.Fatal(err)
	}
	if service := launcher == config.LauncherSystemd; (namespace == host) != service {
		t.Errorf("the relay is in user namespace %s; the host's is %s", namespace, host)
	}
	ask := fmt.Sprintf("--env=PEERLANE_DEVICES=peerlane.dev/lane=%d", b.gpu(b.lanes[0]).Index)
	for _, option := range []string{"--read-only", "--userns=keep-id", "--user=1234:1234"} {
		if out, err := p.run([]string{ask, option}, "hello"); err != nil || !strings.Contains(out, `"hello"`) {
			t.Errorf("%s: %v: %s", option, err, out)
		}
	}
	out, err := p.run([]string{fmt.Sprintf("--env=PEERLANE_DEVICES=peerlane.dev/gpu=%d", b.gpu(b.lanes[0]).Index)},
		"hello")
	if err == nil || !strings.Contains(out, "an engine that runs without root") ||
		!strings.Contains(out, "request peerlane.dev/lane=") {
		t.Errorf("a device peerlane.dev/gpu=: %v: %s", err, out)
	}
}

// generationOf returns the generation with a GPU's lane.
func (b *bed) generationOf(g topo.GPU) generation.Info {
	b.Helper()
	list, err := generation.List(b.Layout)
	if err != nil {
		b.Fatal(err)
	}
	for _, info := range list {
		if info.Config.Lanes[0].GPU.BusID == g.BusID {
			return info
		}
	}
	b.Fatalf("no generation of GPU %d among %d", g.Index, len(list))
	return generation.Info{}
}
