package integration_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/topo/planner"
)

// withoutCDI creates a host whose engine applies no CDI specification: peerlane-runtime receives
// bundles with the user's settings. own has arguments of peerlane-runtime.
func withoutCDI(t *testing.T, runtimeName string, allowed []string, own ...string) *bed {
	t.Helper()
	b := newBed(t, runtimeName, func(c *config.Config) {
		if r, err := bundle.FindRuntime(runtimeName, ""); err == nil { // without the runtime newBed skips
			c.Runtime.Path = r.Path()
		}
		c.Runtime.Devices = allowed
	})
	b.runtime.Before = append([]string{
		filepath.Join(b.Binaries, programs.Runtime), "--peerlane-root=" + b.Root, "--peerlane-spec-dir=" + b.CDIDir(),
	}, own...)
	return b
}

// asking returns a bundle without devices whose environment, or annotation, requests devices.
func (b *bed) asking(lane planner.Lane, by string, devices []string, role ...string) *bundle.Bundle {
	b.Helper()
	built := b.bundle(b.gpu(lane), nil, role...)
	switch names := strings.Join(devices, ","); by {
	case "variable":
		built.Spec.Process.Env = append(built.Spec.Process.Env, "PEERLANE_DEVICES="+names)
	case "annotation":
		built.Spec.Annotations = map[string]string{"peerlane.dev/devices": names}
	default:
		b.Fatalf("nobody asks by %s", by)
	}
	if err := built.Write(); err != nil {
		b.Fatal(err)
	}
	return built
}

func TestEngineWithoutCDIGetsLanes(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := withoutCDI(t, runtimeName, []string{"peerlane.dev/lane=*", "nvidia.com/gpu=*"})
			b.nics()
			start := func(lane planner.Lane, by string) *container {
				return b.run(b.asking(lane, by, testbed.Devices(b.gpu(lane)), "stream"))
			}
			a, z := start(b.lanes[0], "variable"), start(b.lanes[1], "annotation")
			handleA, handleZ := a.next("listening").Handle, z.next("listening").Handle
			a.send(event{Handle: handleZ})
			z.send(event{Handle: handleA})
			a.next("moving")
			z.next("moving")
		})
	}
}

// An engine may use a bundle a second time; the bundle then has all edits already.
func TestBundleUsedTwiceStartsTwice(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := withoutCDI(t, runtimeName, nil, "--peerlane-device=peerlane.dev/lane=all")
			b.leavesNothing()
			built := b.bundle(b.gpu(b.lanes[0]), nil, "hello")
			var configs []string
			for range 2 {
				c := b.run(built)
				c.next("hello")
				if lanes, all := len(c.generation().Config.Lanes), len(b.Plan.Lanes); lanes != all {
					t.Errorf("the container has %d lanes of %d", lanes, all)
				}
				c.end()
				text, err := os.ReadFile(filepath.Join(built.Dir, "config.json"))
				if err != nil {
					t.Fatal(err)
				}
				configs = append(configs, string(text))
			}
			if diff := cmp.Diff(configs[0], configs[1]); diff != "" {
				t.Errorf("the second use changes config.json (-first +second):\n%s", diff)
			}
		})
	}
}

func TestImageGetsAllowedDevicesOnly(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := withoutCDI(t, runtimeName, []string{"peerlane.dev/lane=*"})
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			gpu := fmt.Sprintf("peerlane.dev/gpu=%d", g.Index)
			for _, by := range []string{"variable", "annotation"} {
				built := b.asking(b.lanes[0], by, []string{testbed.Devices(g)[1], gpu}, "hello")
				c := b.runtime.Run(context.Background(), built, b.ContainerID("refused-"+by))
				out, err := c.CombinedOutput()
				if err == nil ||
					!strings.Contains(string(out), gpu+": runtime.devices in "+b.Layout.ConfigFile()+" does not permit it") {
					t.Errorf("%s: %v: %s", by, err, out)
				}
			}
		})
	}
}
