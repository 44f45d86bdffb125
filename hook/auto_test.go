package hook_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/programs"
)

// auto makes the hook request lanes for the GPUs of the container, whose device nodes have the
// given minor numbers.
func (b *bundle) auto(minors ...int64) {
	b.Spec.Hooks.CreateRuntime = []specs.Hook{b.hook("create", "--auto")}
	for _, minor := range minors {
		b.node(fmt.Sprintf("/dev/nvidia%d", minor), 195, minor)
	}
}

func (b *bundle) node(path string, major, minor int64) {
	b.Spec.Linux.Devices = append(
		b.Spec.Linux.Devices,
		specs.LinuxDevice{Path: path, Type: "c", Major: major, Minor: minor},
	)
}

// The GPUs that the engine adds get lanes. The hook finds the GPUs by device number: neither path
// nor image decides.
func TestLaneAutoEngineDevicesGetLanes(t *testing.T) {
	for name, test := range map[string]struct {
		edit func(*bundle)
		want []int
	}{
		"one GPU":  {func(b *bundle) { b.auto(3) }, []int{3}},
		"two GPUs": {func(b *bundle) { b.auto(4, 3) }, []int{3, 4}},
		"control nodes, and a name that lies": {func(b *bundle) {
			b.auto()
			b.node("/dev/nvidia4", 195, 3)
			b.node("/dev/nvidiactl", 195, 255)
			b.node("/dev/nvidia-modeset", 195, 254)
			b.node("/dev/nvidia5", 1, 3)
		}, []int{3}},
		"variables and annotations of an image": {func(b *bundle) {
			b.auto(3)
			b.Spec.Process.Env = append(b.Spec.Process.Env, "NVIDIA_VISIBLE_DEVICES=all", "CUDA_VISIBLE_DEVICES=0,4",
				"PEERLANE_DEVICES=peerlane.dev/lane=all")
			b.Spec.Annotations = map[string]string{hook.LanesAnnotation: "4", "cdi.k8s.io/x": "nvidia.com/gpu=4"}
		}, []int{3}},
		"a lane by name beside it": {func(b *bundle) {
			b.auto(3)
			b.Spec.Hooks.CreateRuntime = append(b.Spec.Hooks.CreateRuntime,
				b.hook("create", "--lane", lane(4).GPU.UUID+"@"+lane(4).GPU.BusID))
		}, []int{3, 4}},
		"prestart": {func(b *bundle) {
			b.auto(3)
			//lint:ignore SA1019 older engines know no other
			b.Spec.Hooks.Prestart, b.Spec.Hooks.CreateRuntime = b.Spec.Hooks.CreateRuntime, nil
		}, []int{3}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, true)
				test.edit(b)
				b.start()
				b.found()
				all, err := generation.List(b.layout)
				if err != nil || len(all) != 1 {
					t.Fatalf("generations %+v, %v", all, err)
				}
				var got []int
				for _, l := range all[0].Config.Lanes {
					got = append(got, l.GPU.Index)
				}
				slices.Sort(got)
				if !slices.Equal(got, test.want) {
					t.Errorf("lanes of %v, want %v", got, test.want)
				}
			})
		})
	}
}

// Without a GPU from the engine the container does not start, and the error names the remedy.
func TestLaneAutoWithoutGPURefusesContainer(t *testing.T) {
	for name, test := range map[string]struct {
		edit func(*bundle)
		want []string
	}{
		"no GPU": {func(b *bundle) {
			b.auto()
			b.node("/dev/nvidiactl", 195, 255)
			b.node("/dev/nvidia3", 1, 3)
			b.Spec.Process.Env = append(b.Spec.Process.Env, "NVIDIA_VISIBLE_DEVICES=3")
		}, []string{"gives the container no GPU", "--device nvidia.com/gpu=N"}},
		"a block device of that number": {func(b *bundle) {
			b.auto()
			b.Spec.Linux.Devices = append(b.Spec.Linux.Devices,
				specs.LinuxDevice{Path: "/dev/nvidia3", Type: "b", Major: 195, Minor: 3})
		}, []string{"gives the container no GPU"}},
		"the toolkit's legacy mode": {func(b *bundle) {
			b.auto()
			path := filepath.Join(b.dir, "nvidia-container-runtime-hook")
			if err := programs.Write(path, []byte("#!/bin/sh\ncat >/dev/null\n")); err != nil {
				b.t.Fatal(err)
			}
			//lint:ignore SA1019 the toolkit uses it
			b.Spec.Hooks.Prestart = []specs.Hook{{Path: path, Args: []string{"nvidia-container-runtime-hook", "prestart"},
				Env: []string{"PATH=/bin"}}}
		}, []string{"legacy mode", "nvidia-ctk config --in-place --set nvidia-container-runtime.mode=cdi"}},
		"a GPU that the plan does not know": {func(b *bundle) { b.auto(3, 77) }, []string{"/dev/nvidia77", "peerlane cdi"}},
		"beside gpu=": {func(b *bundle) {
			b.auto(3)
			b.Spec.Hooks.CreateRuntime = append(b.Spec.Hooks.CreateRuntime,
				b.hook("create", "--gpu", lane(3).GPU.UUID+"@"+lane(3).GPU.BusID))
		}, []string{"leave out peerlane.dev/lane=auto"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, false)
				test.edit(b)
				log := filepath.Join(b.dir, "hook.log")
				b.tee(log) // some runtimes hide the output of hooks
				out, err := b.run("run", b.id)
				if err == nil {
					t.Errorf("the container started: %s", out)
				}
				text, _ := os.ReadFile(log)
				for _, want := range test.want {
					if !strings.Contains(out+string(text), want) {
						t.Errorf("output of the runtime %q, of the hook %q; want %q", out, text, want)
					}
				}
				b.gone(t)
				b.run("delete", "--force", b.id) // some runtimes have deleted the container already
			})
		})
	}
}
