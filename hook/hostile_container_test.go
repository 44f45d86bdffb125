package hook_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
)

// pid returns the pid of the init of the container.
func (b *bundle) pid() int {
	b.t.Helper()
	out, err := b.run("state", b.id)
	var state struct {
		PID int `json:"pid"`
	}
	if err == nil {
		err = json.Unmarshal([]byte(out), &state)
	}
	if err != nil || state.PID < 2 {
		b.t.Fatalf("the runtime's state %s: %v", out, err)
	}
	return state.PID
}

// A state names the init of another container, with or without a lane. The hook adds no lane to
// that container, and removes no lane.
func TestStateNamingOtherInitChangesNoLane(t *testing.T) {
	for _, of := range []struct {
		name  string
		lanes int
		want  string
	}{
		{"with a lane", 1, "is the init of container"},
		{"without a lane", 0, "/rootfs: no such file"},
	} {
		t.Run(of.name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, true)
				if of.lanes == 0 {
					b.Spec.Hooks = nil
					b.Spec.Process.Args = []string{"/usr/bin/sleep", "1000000"}
				}
				b.start()
				pid := b.pid()
				if of.lanes > 0 {
					b.found()
				}
				inside := func() string {
					text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
					if err != nil {
						t.Fatal(err)
					}
					return string(text)
				}
				mounts, before := inside(), b.mounts(t)
				other := filepath.Join(b.layout.Root, "other")
				if err := os.MkdirAll(filepath.Join(other, "rootfs"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(other, "config.json"), []byte(`{"root":{"path":"rootfs"}}`),
					0o644); err != nil {
					t.Fatal(err)
				}
				name := lane(4).GPU.UUID + "@" + lane(4).GPU.BusID
				c := exec.Command(filepath.Join(bin, "peerlane-hook"), "create", "--root", b.layout.Root, "--lane", name)
				c.Stdin = strings.NewReader(fmt.Sprintf(`{"id":"another","status":"created","pid":%d,"bundle":%q}`, pid, other))
				c.Env = []string{"GORACE=atexit_sleep_ms=0"}
				if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), of.want) {
					t.Errorf("%v: %s; want %q", err, out, of.want)
				}
				if now := inside(); now != mounts {
					t.Errorf("mounts of the named container were\n%sand are\n%s", mounts, now)
				}
				if after := b.mounts(t); after != before {
					t.Errorf("mounts of the host were\n%sand are\n%s", before, after)
				}
				all, err := generation.List(b.layout)
				if err != nil || len(all) != of.lanes {
					t.Fatalf("generations %+v, %v", all, err)
				}
				for _, g := range all {
					if len(g.Config.Lanes) != 1 || g.Container.ID != b.id {
						t.Errorf("lanes of the named container: %+v", g)
					}
				}
				if out, err := b.run("kill", b.id, "KILL"); err != nil {
					t.Errorf("%v: %s", err, out)
				}
				b.gone(t)
			})
		})
	}
}

// A container gets the lanes in the arguments of the hook. The image cannot request lanes through
// environment or annotations.
func TestImageRequestsGiveNoLanes(t *testing.T) {
	eachRuntime(t, func(t *testing.T, runtime []string) {
		b := newBundle(t, runtime, true)
		b.Spec.Annotations = map[string]string{
			hook.LanesAnnotation: "all", "peerlane.dev/lane": "4", "peerlane.dev/gpu": "all",
			"cdi.k8s.io/peerlane": "peerlane.dev/lane=all",
		}
		b.Spec.Process.Env = append(
			b.Spec.Process.Env,
			"PEERLANE_LANES=all",
			"PEERLANE_LANE=4",
			"PEERLANE_VISIBLE_DEVICES=all",
			"NVIDIA_VISIBLE_DEVICES=all",
			"CUDA_VISIBLE_DEVICES=0,1,2,3,4",
			"PEERLANE_ROOT=/",
			"PEERLANE_TENANCY=single",
		)
		b.start()
		b.found()
		all, err := generation.List(b.layout)
		if err != nil || len(all) != 1 || len(all[0].Config.Lanes) != 1 || all[0].Config.Lanes[0].GPU != lane(3).GPU {
			t.Errorf("generations %+v, %v", all, err)
		}
	})
}

// The id of a container is data: the id is in no path, and complete in records.
func TestIDsAreNoPaths(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	known := regexp.MustCompile(
		`^(lock|[0-9a-f]{32}|[0-9a-f]{32}\.sock|relay\.sock|admin\.sock|generation\.json|status\.json(\.new)?|supervisor|init-\d+-\d+|relay\.log)$`,
	)
	for _, id := range []string{
		"..", "../../../../../../tmp/peerlane-hostile", "/etc/peerlane-hostile", ".", "", "a/b", "a\nPRIORITY=0", "a\x00b",
		"\x1b[2J", "%s%n", "--root=/", "$(touch /tmp/peerlane-hostile)", strings.Repeat("i", 1024),
	} {
		init := startProcess(t)
		g := h.launch(t, id, init.Process.Pid, "")
		if info := h.state(t, g.ID, generation.StateReady); info.Container.ID != id || info.Config.Container != id {
			t.Errorf("id %q is %q in the record, and %q in the configuration of the relay", id, info.Container.ID,
				info.Config.Container)
		}
		for _, dir := range []string{h.layout.Generations(), h.layout.Sockets(), h.layout.Peers()} {
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err == nil && path != dir && !known.MatchString(d.Name()) {
					t.Errorf("%q has made %s", id, path)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		}
		if entries, err := os.ReadDir(filepath.Join(h.layout.Root)); err != nil ||
			slices.ContainsFunc(
				entries,
				func(e fs.DirEntry) bool { return e.Name() != "var" && e.Name() != "run" && e.Name() != "etc" },
			) {
			t.Errorf("%q: the root has %v, %v", id, entries, err)
		}
		end(init)
		h.gone(t)
	}
	for _, path := range []string{"/tmp/peerlane-hostile", "/etc/peerlane-hostile",
		paths.ContainerDir + "/peerlane-hostile"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is there", path)
		}
	}
}
