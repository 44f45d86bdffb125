package hook

import (
	"errors"
	"testing"

	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestGPUDevicesHideNoLaneGPU(t *testing.T) {
	const gpu0, gpu1, gpu2 = testplan.UUID0 + "@0000:17:00.0", testplan.UUID1 + "@0000:2a:00.0", "@0000:3b:00.0"
	ask := func(args ...string) ocispec.Hook {
		return ocispec.Hook{Args: append([]string{"peerlane-hook", "create"}, args...)}
	}
	const half0, group = "peerlane.dev/gpu=half0", "a group of [groups] in config.toml"
	both := ask("--gpu", gpu0, "--gpu", gpu1)
	for _, test := range []struct {
		name  string
		env   []string
		hooks []ocispec.Hook
		// asked is the device that hides GPUs; empty for success.
		asked string
		// hidden are the hidden GPUs.
		hidden string
		// remedies are the devices that the remedy names.
		remedies string
	}{
		{"one GPU", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0}, []ocispec.Hook{ask("--gpu", gpu0)}, "", "", ""},
		{"one GPU, and a value of the user's", []string{"CUDA_VISIBLE_DEVICES=1"}, []ocispec.Hook{ask("--gpu", gpu0)}, "",
			"", ""},
		{"one GPU, hidden by the user", []string{"CUDA_VISIBLE_DEVICES="}, []ocispec.Hook{ask("--gpu", gpu0)}, "", "", ""},
		{"two GPUs, one by one", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID1},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--root", "/x", "--gpu", gpu1)},
			"1", "0", half0},
		{"the first of two wins", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, "0", "1", half0},
		{"the last of two values wins", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0, "CUDA_VISIBLE_DEVICES=0,1"},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, "", "", ""},
		{"two GPUs, and a value of the user's", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID1 + "," + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, "", "", ""},
		{"two GPUs, and no value", nil, []ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, "", "", ""},
		{"two GPUs by one device", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0 + "," + testplan.UUID1},
			[]ocispec.Hook{both}, "", "", ""},
		{"one GPU by two names", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu0)}, "", "", ""},
		{"all, and then one", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0}, []ocispec.Hook{both, ask("--gpu", gpu0)},
			"0", "1", half0},
		{"one, and then all", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0 + "," + testplan.UUID1},
			[]ocispec.Hook{ask("--gpu", gpu0), both}, "", "", ""},
		{"a GPU, and its lane", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu0), ask("--gpu", gpu0)}, "", "", ""},
		{"a GPU, and the lane of another", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu1), ask("--gpu", gpu0)}, "0", "1", half0},
		{"a GPU, and the lane of one without a UUID", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu2), ask("--gpu", gpu0)},
			"0", "2", group},
		{"two lanes, and a value of the user's", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu0), ask("--lane", gpu1)}, "", "", ""},
		{"two GPUs of a container that an earlier release made", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu0), ask("--lane", gpu1)}, "", "", ""},
		{"a GPU that the plan does not know", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", testplan.UUID9+"@0000:99:00.0")}, "0",
			testplan.UUID9 + "@0000:99:00.0", group},
		{"others' hooks", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), {}, {Args: []string{"x"}}, {Args: []string{"x", "delete", "--gpu", gpu1}},
				ask("--gpu")}, "", "", ""},
	} {
		for _, stage := range []string{"createRuntime", "prestart"} {
			t.Run(test.name+"/"+stage, func(t *testing.T) {
				s := &ocispec.Spec{}
				s.Process.Env = append([]string{"PATH=/bin", "CUDA_VISIBLE_DEVICES_NOT=1"}, test.env...)
				if stage == "prestart" {
					s.Hooks.Prestart = test.hooks
				} else {
					s.Hooks.CreateRuntime = test.hooks
				}
				plan := testplan.New("/sys")
				plan.Groups = []planner.Group{
					{Name: "half0", GPUs: []string{"0000:17:00.0", "0000:2a:00.0"}},
					{Name: "one", GPUs: []string{"0000:17:00.0"}},
				}
				err := checkVisibleDevices(plan, s)
				if test.asked == "" {
					if err != nil {
						t.Fatal(err)
					}
					return
				}
				f, ok := errors.AsType[*fault.Error](err)
				hidden, hides := errors.AsType[*hiddenError](err)
				if !ok || f.Code != fault.HiddenGPU || f.Object != "peerlane.dev/gpu="+test.asked ||
					!hides || hidden.gpus != test.hidden || f.Remedy != "ask for all of them by one device (peerlane.dev/gpu=all, or "+
					test.remedies+"), or for each by --device nvidia.com/gpu=N --device peerlane.dev/lane=N" {
					t.Errorf("%v; want %+v", err, test)
				}
			})
		}
	}
}
