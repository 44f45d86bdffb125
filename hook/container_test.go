package hook_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
)

// probe holds the findings of a container at the mount point.
type probe struct {
	Place    string   // resolved path of the mount point in the container
	Entries  []string // of the mount point
	Options  []string // of the mount
	Shared   bool     // or a slave
	Relay    int      // pid of the relay that answers
	Create   string   // result of creating a file there
	Chmod    string   // result of changing the mode of the socket
	Covering string   // result of a mount over the mount point
	NCCLConf string   // content of /etc/nccl.conf
	Failure  string
}

// probeMain is the program of the containers: it writes the findings to /out/probe and waits for
// SIGKILL.
func probeMain() {
	var p probe
	if err := p.look(); err != nil {
		p.Failure = err.Error()
	}
	text, err := json.Marshal(p)
	if err == nil {
		if err = os.WriteFile("/out/new", text, 0o644); err == nil {
			err = os.Rename("/out/new", "/out/probe")
		}
	}
	if err != nil {
		fatal(err)
	}
	if len(os.Args) > 1 && os.Args[1] == "stay" {
		time.Sleep(time.Hour)
	}
	syscall.Exit(0) // os.Exit sleeps a second under the race detector
}

func (p *probe) look() (err error) {
	if p.Place, err = filepath.EvalSymlinks(paths.ContainerDir); err != nil {
		return err
	}
	entries, err := os.ReadDir(paths.ContainerDir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		p.Entries = append(p.Entries, e.Name())
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); f[4] == p.Place { // the last is the uppermost
			p.Options, p.Shared = strings.Split(f[5], ","), f[6] != "-"
		}
	}
	text := func(err error) string {
		if err == nil {
			return "done"
		}
		return err.Error()
	}
	p.Create = text(os.WriteFile(paths.ContainerDir+"/file", nil, 0o600))
	p.Chmod = text(os.Chmod(paths.ContainerDir+"/relay.sock", 0))
	if p.Relay, err = ask(paths.ContainerDir + "/relay.sock"); err != nil {
		return err
	}
	if conf, err := os.ReadFile("/etc/nccl.conf"); err != nil {
		p.NCCLConf = err.Error()
	} else {
		p.NCCLConf = string(conf)
	}
	if os.Getenv("PROBE_UNCOVERED") != "" {
		return nil
	}
	p.Covering = text(unix.Mount("tmpfs", paths.ContainerDir, "tmpfs", 0, ""))
	return nil
}

func TestContainerReachesRelay(t *testing.T) {
	for name, edit := range map[string]func(*bundle){
		"plain": func(*bundle) {},
		"prestart": func(b *bundle) {
			//lint:ignore SA1019 older engines know no other
			b.Spec.Hooks.Prestart, b.Spec.Hooks.CreateRuntime = b.Spec.Hooks.CreateRuntime, nil
		},
		"read-only": func(b *bundle) {
			b.Spec.Root.Readonly = true
			b.mount(filepath.Join(b.dir, "rootfs/out"), "/out", "bind")
		},
		"absolute rootfs": func(b *bundle) { b.Spec.Root.Path = filepath.Join(b.dir, "rootfs") },
		"relative rootfs": func(b *bundle) { b.Spec.Root.Path = "rootfs" },
		"shared anchor": func(b *bundle) {
			b.anchor().Options = []string{"bind", "ro"}
			b.Spec.Linux.RootfsPropagation = "shared"
		},
		"two hooks":         func(b *bundle) { b.lanes(3, 4) },
		"link at /run":      func(b *bundle) { b.link("/data", "run") },
		"link at peerlane":  func(b *bundle) { b.link("../data/there", "run/peerlane") },
		"link that climbs":  func(b *bundle) { b.link("../../../../../../.."+b.outside(), "run/peerlane") },
		"link to the host":  func(b *bundle) { b.link(b.outside(), "run/peerlane") },
		"link of two steps": func(b *bundle) { b.link("/one", "run"); b.link("../../../../.."+b.outside(), "one") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, true)
				edit(b)
				before := b.mounts(t)
				b.start()
				p := b.found()
				if after := b.mounts(t); after != before {
					t.Errorf("mounts of the host were\n%sand are\n%s", before, after)
				}
				for _, option := range []string{"ro", "nosuid", "nodev", "noexec"} {
					if !slices.Contains(p.Options, option) {
						t.Errorf("the mount has %v and not %s", p.Options, option)
					}
				}
				if p.Shared || !slices.Equal(p.Entries, []string{"relay.sock"}) ||
					!strings.Contains(p.Create, "read-only file system") || !strings.Contains(p.Chmod, "read-only file system") {
					t.Errorf("the container found %+v", p)
				}
				if p.Covering != "done" {
					t.Errorf("the container cannot mount, so the test proves nothing about propagation: %s", p.Covering)
				}
				testutil.Succeeds(t, "the relay that answered", func() error { // the supervisor records the relay a moment later
					all, err := generation.List(b.layout)
					if err != nil || len(all) != 1 || all[0].Status.Relay == nil || all[0].Status.Relay.PID != p.Relay {
						return fmt.Errorf("relay %d answered, generations %+v, %v", p.Relay, all, err)
					}
					return nil
				})
				b.untouched()
				if out, err := b.run("kill", b.id, "KILL"); err != nil {
					t.Errorf("%v: %s", err, out)
				}
				b.gone(t)
				waitDead(t, p.Relay)
			})
		})
	}
}

// A container that ends by itself, run in the foreground: the runtime waits
// for nothing of Peerlane's.
func TestForegroundContainerEndsByItself(t *testing.T) {
	eachRuntime(t, func(t *testing.T, runtime []string) {
		b := newBundle(t, runtime, false)
		if out, err := b.run("run", b.id); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b.found()
	})
}

func TestUserNamespaceContainerReachesRelay(t *testing.T) {
	eachRuntime(t, func(t *testing.T, runtime []string) {
		b := newBundle(t, runtime, true)
		b.Spec.Linux.Namespaces = append(b.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		b.Spec.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: 200000, Size: 65536}}
		b.Spec.Linux.GIDMappings = b.Spec.Linux.UIDMappings
		// crun loses the path of the bundle while it makes the user namespace. Engines pass the
		// root file system as an absolute path too.
		b.Spec.Root.Path = filepath.Join(b.dir, "rootfs")
		b.Spec.Linux.Devices = append(
			b.Spec.Linux.Devices,
			specs.LinuxDevice{Path: "/dev/kmsg", Type: "c", Major: 1, Minor: 11},
		)
		// The runtime makes mount points as the container's root.
		if out, err := exec.Command("chown", "-R", "200000:200000",
			filepath.Join(b.dir, "rootfs")).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b.start()
		if p := b.found(); p.Relay == 0 {
			t.Errorf("the container found %+v", p)
		}
	})
}

// Below a shared anchor a mount would propagate to the host. runc and crun make the anchor
// private, so the test runs without a runtime.
func TestSharedAnchorIsMadePrivate(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mount namespaces")
	}
	h := newSharedHost(t)
	place := filepath.Join(h.layout.Root, "bundle/rootfs/run/peerlane")
	bundle := filepath.Join(h.layout.Root, "bundle")
	ready := filepath.Join(bundle, "ready")
	if err := errors.Join(os.MkdirAll(place, 0o755), os.WriteFile(bundle+"/config.json",
		[]byte(`{"root":{"path":"rootfs"}}`), 0o644)); err != nil {
		t.Fatal(err)
	}
	init := exec.Command("unshare", "-m", "--propagation", "unchanged", "sh", "-c",
		`mount --bind "$0" "$1" && touch "$2" && exec sleep 1000000`, h.layout.Anchor(), place, ready)
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		end(init)
		h.gone(t)
		if err := unix.Unmount(place, 0); err != nil { // the bind mount of the anchor propagated to the host
			t.Error(err)
		}
	})
	testutil.Succeeds(t, "the container", func() error { _, err := os.Stat(ready); return err })
	g := h.launch(t, "c", init.Process.Pid, "")
	g.Container.Bundle = bundle
	before := h.mounts(t)
	if err := hook.Attach(h.layout, g, filepath.Join(bundle, "rootfs")); err != nil {
		t.Fatal(err)
	}
	if after := h.mounts(t); after != before {
		t.Errorf("mounts of the host were\n%sand are\n%s", before, after)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", init.Process.Pid))
	if err != nil || !strings.Contains(string(mounts), "/run/peerlane/sockets/"+g.ID) {
		t.Errorf("the container has not the mount, %v:\n%s", err, mounts)
	}
}

// The container does not start, the error names the cause, and neither host nor relay keeps
// state.
func TestRefusedContainerLeavesNothing(t *testing.T) {
	for name, test := range map[string]struct {
		edit func(*bundle)
		want string
	}{
		"no anchor":              {func(b *bundle) { b.dropAnchor() }, "the CDI specification mounts the anchor there"},
		"directory of the image": {func(b *bundle) { b.dropAnchor(); b.mkdir("run/peerlane") }, "is not the anchor"},
		"directory of the host":  {func(b *bundle) { b.anchor().Source = b.outside() }, "is not the anchor"},
		"link past the anchor": {func(b *bundle) {
			b.anchor().Destination = "/elsewhere"
			b.mkdir("data")
			b.link("/data", "run/peerlane")
		}, "is not the anchor"},
		"link to the host": {func(b *bundle) {
			b.dropAnchor()
			b.link("../../../../../../.."+b.outside(), "run/peerlane")
		}, "bundle/rootfs/"},
		"magic link": {func(b *bundle) { b.dropAnchor(); b.link("/proc/1/root"+b.outside(), "run/peerlane") },
			"leads through /proc"},
		"link in a circle": {func(b *bundle) { b.dropAnchor(); b.link("peerlane", "run/peerlane") }, "or in a circle"},
		"another empty directory": {func(b *bundle) {
			b.dropAnchor()
			b.mount(b.layout.Peers(), paths.ContainerDir, "bind")
		}, "is not the anchor"},
		"covered anchor": {func(b *bundle) {
			b.Spec.Mounts = append(b.Spec.Mounts, specs.Mount{Destination: paths.ContainerDir, Type: "tmpfs", Source: "tmpfs"})
		}, "is not the anchor"},
		"unknown lane": {func(b *bundle) {
			b.Spec.Hooks.CreateRuntime = []specs.Hook{b.hook("create", "--lane", "@0000:99:00.0")}
		}, "0000:99:00.0"},
		"no relay binary": {func(b *bundle) { b.configure("[relay]\nbinary = \"/nowhere/relay\"\n") }, "relay.binary"},
		"createContainer": {func(b *bundle) {
			b.Spec.Hooks.CreateContainer, b.Spec.Hooks.CreateRuntime = b.Spec.Hooks.CreateRuntime, nil
		}, "createRuntime"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, false)
				test.edit(b)
				// Some runtimes hide the output of hooks.
				log := filepath.Join(b.dir, "hook.log")
				b.tee(log)
				before := b.mounts(t)
				out, err := b.run("run", b.id)
				if err == nil {
					t.Errorf("the container started: %s", out)
				}
				text, _ := os.ReadFile(log)
				if !strings.Contains(out+string(text), test.want) {
					t.Errorf("output of the runtime %q, of the hook %q; want %q", out, text, test.want)
				}
				b.gone(t)
				if after := b.mounts(t); after != before {
					t.Errorf("mounts of the host were\n%sand are\n%s", before, after)
				}
				b.untouched()
				b.run("delete", "--force", b.id) // some runtimes have deleted the container already
			})
		})
	}
}

// The hook of a process that is in no container must not mount on the host.
func TestOwnNamespaceIsRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.install(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"root":{"path":"/"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	init := startProcess(t)
	name := lane(3).GPU.UUID + "@" + lane(3).GPU.BusID
	_, err := hook.Create(
		hook.ReadAhead(h.layout),
		hook.State{ID: "c", Status: "creating", PID: init.Process.Pid, Bundle: dir},
		"",
		hook.Devices{Lanes: []string{name}},
	)
	if !errors.Is(err, hook.ErrHostNamespace) {
		t.Errorf("Create: %v", err)
	}
	g := h.launch(t, "c", init.Process.Pid, "")
	g.Container.Bundle = dir
	if err := hook.Attach(h.layout, g, "/"); !errors.Is(err, hook.ErrHostNamespace) {
		t.Errorf("Attach: %v", err)
	}
}
