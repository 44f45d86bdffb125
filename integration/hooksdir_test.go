package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/topo/planner"
)

// hooksDir returns packaging/hooks.d with the paths of this host's hook and root.
func (b *bed) hooksDir() (dir string, hooks map[string][]specs.Hook) {
	b.Helper()
	dir, hooks = filepath.Join(b.Root, "hooks.d"), map[string][]specs.Hook{}
	files, err := filepath.Glob("../packaging/hooks.d/*.json")
	if err != nil || len(files) != 2 {
		b.Fatalf("packaging/hooks.d has %v (%v)", files, err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		b.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			b.Fatal(err)
		}
		var entry struct {
			Hook   specs.Hook `json:"hook"`
			Stages []string   `json:"stages"`
		}
		var whole map[string]any
		if err := errors.Join(json.Unmarshal(text, &entry), json.Unmarshal(text, &whole)); err != nil {
			b.Fatalf("%s: %v", file, err)
		}
		entry.Hook.Path = b.HookBinary()
		entry.Hook.Args = append(entry.Hook.Args, "--root", b.Root)
		for _, stage := range entry.Stages {
			hooks[stage] = append(hooks[stage], entry.Hook)
		}
		whole["hook"] = entry.Hook
		if text, err = json.Marshal(whole); err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(file)), text, 0o644)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	return dir, hooks
}

func permitAnnotations(c *config.Config) { c.Hook.Annotations = true }

// An engine without CDI devices for lanes: lanes come from the directory of hooks, the annotation
// and the mount, the GPU from its CDI specification.
func TestAnnotationWithHooksDirectoryGivesLanes(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, permitAnnotations)
			b.nics()
			_, hooks := b.hooksDir()
			annotated := func(lane planner.Lane) *container {
				g := b.gpu(lane)
				built := b.bundle(g, testbed.Devices(g)[:1], "stream")
				built.Spec.Annotations = map[string]string{hook.LanesAnnotation: fmt.Sprint(g.Index)}
				built.Spec.Hooks = &specs.Hooks{CreateRuntime: hooks["createRuntime"], Poststop: hooks["poststop"]}
				built.Spec.Mounts = append(built.Spec.Mounts, specs.Mount{
					Destination: paths.ContainerDir, Type: "bind", Source: b.Layout.Anchor(), Options: []string{"bind", "ro",
						"rprivate"},
				})
				if err := built.Write(); err != nil {
					t.Fatal(err)
				}
				return b.run(built)
			}
			a, z := annotated(b.lanes[0]), annotated(b.lanes[1])
			handleA, handleZ := a.next("listening").Handle, z.next("listening").Handle
			a.send(event{Handle: handleZ})
			z.send(event{Handle: handleA})
			a.next("moving")
			z.next("moving")
		})
	}
}

// podman is Podman of a test, with separate files.
type podman struct {
	bed     *bed
	options []string
	// as changes the user of a command; nil for root.
	as func(*exec.Cmd) *exec.Cmd
}

func newPodman(b *bed, options ...string) *podman {
	b.Helper()
	return podmanAs(b, nil, options...)
}

func podmanAs(b *bed, as func(*exec.Cmd) *exec.Cmd, options ...string) *podman {
	b.Helper()
	if _, err := exec.LookPath("podman"); err != nil {
		b.Skipf("needs podman: %v", err)
	}
	dir := filepath.Join(b.Root, "podman")
	p := &podman{b, append([]string{
		"--root", dir + "/graph", "--runroot", dir + "/run", "--tmpdir", dir + "/tmp", "--cgroup-manager=cgroupfs",
		"--events-backend=file",
	}, options...), as}
	if b.runtime.Before == nil {
		p.options = append(p.options, "--runtime", b.runtime.Path())
	} else {
		p.options = append(p.options, "--runtime", b.runtime.Before[0])
		for _, own := range b.runtime.Before[1:] {
			p.options = append(p.options, "--runtime-flag", strings.TrimPrefix(own, "--"))
		}
	}
	archive := b.imageArchive()
	if out, err := p.command(context.Background(), "import", "--change", "ENV GORACE=atexit_sleep_ms=0", archive,
		testImage).CombinedOutput(); err != nil {
		b.Fatalf("podman import: %v: %s", err, out)
	}
	b.Cleanup(func() {
		// Podman's storage is mounted below the test's root.
		if out, err := p.command(context.Background(), "system", "reset", "--force").CombinedOutput(); err != nil {
			b.Errorf("podman system reset: %v: %s", err, out)
		}
	})
	return p
}

func (p *podman) command(ctx context.Context, arguments ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, "podman", append(p.options[:len(p.options):len(p.options)], arguments...)...)
	if p.as != nil {
		c = p.as(c)
	}
	return c
}

// runCommand returns the `podman run` of a role, with options.
func (p *podman) runCommand(options []string, role ...string) *exec.Cmd {
	arguments := append([]string{
		"run", "--rm", "--network=none",
		// Podman would raise the limits, which the machine may forbid
		"--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
	}, options...)
	return p.command(context.Background(), append(append(arguments, testImage, "/usr/bin/test", "role"), role...)...)
}

// run runs a role to its end.
func (p *podman) run(options []string, role ...string) (out string, err error) {
	c := p.runCommand(options, role...)
	var text bytes.Buffer
	c.Stdout, c.Stderr = &text, &text
	err = c.Run()
	return text.String(), err
}

func TestPodmanWithHooksDirectoryGivesLanes(t *testing.T) {
	permitted := true
	b := newBed(t, "runc", permitAnnotations)
	dir, _ := b.hooksDir()
	b.leavesNothing()
	p := newPodman(b, "--hooks-dir", dir)
	mount := fmt.Sprintf("--mount=type=bind,src=%s,dst=%s,ro=true", b.Layout.Anchor(), paths.ContainerDir)
	lane := "--annotation=peerlane.dev/lanes=" + fmt.Sprint(b.gpu(b.lanes[0]).Index)

	for _, test := range []struct {
		name      string
		permitted bool
		options   []string
		works     bool
		want      string
	}{
		{"annotation and mount", true, []string{lane, mount}, true, `"hello"`},
		{"read-only root", true, []string{lane, mount, "--read-only"}, true, `"hello"`},
		{"no mount", true, []string{lane}, false,
			"it has no mount point for the relay's socket; have the engine mount the anchor: --mount type=bind,src="},
		{"no annotation", true, []string{mount}, false, "no relay at /run/peerlane/relay.sock"},
		{"not permitted", false, []string{lane, mount}, false, "set annotations = true in [hook] of "},
	} {
		if test.permitted != permitted {
			permitted = test.permitted
			if err := b.Configure(func(c *config.Config) { c.Hook.Annotations = permitted }); err != nil {
				t.Fatal(err)
			}
		}
		out, err := p.run(test.options, "hello")
		if (err == nil) != test.works || !strings.Contains(out, test.want) {
			t.Errorf("%s: %v: %s; want %q", test.name, err, out, test.want)
		}
	}
}

func TestPodmanWithPeerlaneRuntimeGivesLanes(t *testing.T) {
	b := withoutCDI(t, "runc", []string{"peerlane.dev/lane=0"})
	b.leavesNothing()
	p := newPodman(b)
	for _, test := range []struct {
		option string
		works  bool
		want   string
	}{
		{"--annotation=peerlane.dev/devices=peerlane.dev/lane=0", true, `"hello"`},
		{"--env=PEERLANE_DEVICES=peerlane.dev/lane=0", true, `"hello"`},
		{"--env=PEERLANE_DEVICES=peerlane.dev/lane=1", false,
			"PEERLANE_DEVICES asks for the device peerlane.dev/lane=1: runtime.devices in "},
	} {
		out, err := p.run([]string{test.option}, "hello")
		if (err == nil) != test.works || !strings.Contains(out, test.want) {
			t.Errorf("%s: %v: %s; want %q", test.option, err, out, test.want)
		}
	}
}

// imageArchive creates a root file system with the test binary and its shared libraries.
func (b *bed) imageArchive() string {
	b.Helper()
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	rootfs, archive := filepath.Join(b.Root, "image"), filepath.Join(b.Root, "image.tar")
	if err := bundle.RootFS(rootfs, []bundle.File{{Host: self, Container: "/usr/bin/test"}}, b.Libraries...); err != nil {
		b.Fatal(err)
	}
	if out, err := exec.Command("tar", "-C", rootfs, "-cf", archive, ".").CombinedOutput(); err != nil {
		b.Fatalf("tar: %v: %s", err, out)
	}
	return archive
}
