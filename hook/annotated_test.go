package hook

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestAnnotationNamesLanes(t *testing.T) {
	plan := testplan.New("/sys")
	plan.Groups = []planner.Group{{Name: "pair", GPUs: []string{"0000:17:00.0", "0000:2a:00.0"}}}
	first, second := testplan.UUID0+"@0000:17:00.0", testplan.UUID1+"@0000:2a:00.0"
	for value, want := range map[string][]string{
		"1":                 {second},
		"1,0":               {second, first},
		" 0 , 0000:17:00.0": {first},
		testplan.UUID1:      {second},
		"0000:2A:00.0":      {second},
		"pair,1":            {first, second},
		"all":               {first, second}, // GPU 2 cannot have a lane
	} {
		got, err := parseAnnotation(plan, value)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%q: %v (-want +got)\n%s", value, err, diff)
		}
	}
	for value, name := range map[string]string{"": "", "7": "7", "0,": "", "../..": "../.."} {
		_, err := parseAnnotation(plan, value)
		if unknown, ok := errors.AsType[*topo.UnknownGPUError](err); !ok || unknown.Name != name {
			t.Errorf("%q: %v; want the unknown GPU %q", value, err, name)
		}
	}
	plan.Lanes = plan.Lanes[2:]
	if _, err := parseAnnotation(plan, "all"); !errors.Is(err, errNoLaneAtAll) {
		t.Errorf("value all without GPUs: %v", err)
	}
}

func TestAnnotationsOfInvalidLanesAreRefused(t *testing.T) {
	const permitted = "[hook]\nannotations = true\n"
	for _, test := range []struct {
		name, config, annotation, mount string
		// code is empty for an error without a code.
		code fault.Code
		// cause is nil for an unknown GPU.
		cause error
		// remedy contains ROOT for the host's root.
		remedy string
	}{
		{"no configuration", "", "0", "ANCHOR", fault.Annotation, errAnnotationsOff,
			"an administrator can set annotations = true in [hook] of ROOT/etc/peerlane/config.toml"},
		{"not permitted", "[hook]\nannotations = false\n", "0", "ANCHOR", fault.Annotation, errAnnotationsOff,
			"an administrator can set annotations = true in [hook] of ROOT/etc/peerlane/config.toml"},
		{"no anchor", permitted, "0", "/somewhere", fault.Annotation, errNoAnchor,
			"have the engine mount the anchor: --mount type=bind,src=ROOT/var/lib/peerlane/anchor,dst=/run/peerlane,ro=true"},
		{"unknown GPU", permitted, "7", "ANCHOR", "", nil, ""},
		{"no annotation", permitted, "", "ANCHOR", "", nil, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := paths.New(t.TempDir())
			bundle := t.TempDir()
			mount := strings.Replace(test.mount, "ANCHOR", l.Anchor(), 1)
			if err := errors.Join(l.Create(), testplan.New("/sys").Write(l.PlanFile()),
				os.WriteFile(l.ConfigFile(), []byte(test.config), 0o644),
				os.WriteFile(filepath.Join(bundle, "config.json"),
					fmt.Appendf(nil, `{"root":{"path":"rootfs"},"mounts":[{"destination":"/run/peerlane","source":%q}]}`, mount),
					0o644),
			); err != nil {
				t.Fatal(err)
			}
			s := State{
				ID:          "c",
				Status:      "created",
				PID:         os.Getpid(),
				Bundle:      bundle,
				Annotations: map[string]string{LanesAnnotation: test.annotation},
			}
			_, err := CreateAnnotated(ReadAhead(l), s, "")
			if err == nil {
				t.Fatal("the annotation was not refused")
			}
			f, ok := errors.AsType[*fault.Error](err)
			if !ok || f.Code != test.code || f.Operation != "take the annotation peerlane.dev/lanes of container" ||
				f.Object != `"c"` || f.Remedy != strings.Replace(test.remedy, "ROOT", l.Root, 1) {
				t.Errorf("error %v, want code %q and remedy %q", err, test.code, test.remedy)
			}
			unknown, _ := errors.AsType[*topo.UnknownGPUError](err)
			if test.cause != nil && !errors.Is(err, test.cause) ||
				test.cause == nil && (unknown == nil || unknown.Name != test.annotation) {
				t.Errorf("error %v, want cause %v", err, test.cause)
			}
			if list, err := generation.List(l); err != nil || len(list) > 0 {
				t.Errorf("a relay was started: %v (%v)", list, err)
			}
		})
	}
}
