package hook

import (
	"errors"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestNothingIsHidden(t *testing.T) {
	const gpu0, gpu1, gpu2 = testplan.UUID0 + "@0000:17:00.0", testplan.UUID1 + "@0000:2a:00.0", "@0000:3b:00.0"
	ask := func(args ...string) ocispec.Hook {
		return ocispec.Hook{Args: append([]string{"peerlane-hook", "create"}, args...)}
	}
	both := ask("--gpu", gpu0, "--gpu", gpu1)
	for _, test := range []struct {
		name  string
		env   []string
		hooks []ocispec.Hook
		says  []string // in the error; nil for success
	}{
		{"one GPU", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0}, []ocispec.Hook{ask("--gpu", gpu0)}, nil},
		{"one GPU, and a value of the user's", []string{"CUDA_VISIBLE_DEVICES=1"}, []ocispec.Hook{ask("--gpu", gpu0)}, nil},
		{"one GPU, hidden by the user", []string{"CUDA_VISIBLE_DEVICES="}, []ocispec.Hook{ask("--gpu", gpu0)}, nil},
		{"two GPUs, one by one", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID1},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--root", "/x", "--gpu", gpu1)},
			[]string{"peerlane.dev/gpu=1", "hide GPU 0", "(peerlane.dev/gpu=all, or peerlane.dev/gpu=half0)",
				"--device nvidia.com/gpu=N --device peerlane.dev/lane=N"}},
		{"the first of two wins", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, []string{"hide GPU 1"}},
		{"the last of two values wins", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0, "CUDA_VISIBLE_DEVICES=0,1"},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, nil},
		{"two GPUs, and a value of the user's", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID1 + "," + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, nil},
		{"two GPUs, and no value", nil, []ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu1)}, nil},
		{"two GPUs by one device", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0 + "," + testplan.UUID1},
			[]ocispec.Hook{both}, nil},
		{"one GPU by two names", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", gpu0)}, nil},
		{"all, and then one", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0}, []ocispec.Hook{both, ask("--gpu", gpu0)},
			[]string{"hide GPU 1"}},
		{"one, and then all", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0 + "," + testplan.UUID1},
			[]ocispec.Hook{ask("--gpu", gpu0), both}, nil},
		{"a GPU, and its lane", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu0), ask("--gpu", gpu0)}, nil},
		{"a GPU, and the lane of another", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu1), ask("--gpu", gpu0)}, []string{"hide GPU 1"}},
		{"a GPU, and the lane of one without a UUID", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu2), ask("--gpu", gpu0)},
			[]string{"hide GPU 2", "a group of [groups] in config.toml"}},
		{"two lanes, and a value of the user's", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu0), ask("--lane", gpu1)}, nil},
		{"two GPUs of a container that an earlier release made", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--lane", gpu0), ask("--lane", gpu1)}, nil},
		{"a GPU that the plan does not know", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), ask("--gpu", testplan.UUID9+"@0000:99:00.0")}, []string{testplan.UUID9}},
		{"others' hooks", []string{"CUDA_VISIBLE_DEVICES=" + testplan.UUID0},
			[]ocispec.Hook{ask("--gpu", gpu0), {}, {Args: []string{"x"}}, {Args: []string{"x", "delete", "--gpu", gpu1}},
				ask("--gpu")}, nil},
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
				if test.says == nil && err != nil || test.says != nil && err == nil {
					t.Fatalf("refused by %v", err)
				}
				if err != nil && test.name != "a GPU that the plan does not know" && !errors.Is(err, fault.HiddenGPU) {
					t.Errorf("%v has not the code %s", err, fault.HiddenGPU)
				}
				for _, says := range test.says {
					if !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
						t.Errorf("%v; want %q, without a newline", err, says)
					}
				}
			})
		}
	}
}
