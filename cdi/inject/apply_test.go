package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/internal/testutil"
)

// everything is a specification with every edit of CDI that requires no file of the host.
const everything = `{
	"cdiVersion": "1.1.0", "kind": "probe.dev/thing",
	"containerEdits": {
		"env": ["COMMON=1"],
		"mounts": [{"hostPath": "/anchor", "containerPath": "/run/probe", "options": ["ro", "bind"]}],
		"hooks": [{"hookName": "poststop", "path": "/hook", "args": ["hook", "remove"], "env": ["PATH=/bin"]}]
	},
	"devices": [
		{"name": "0", "containerEdits": {
			"env": ["PATH=/probe"],
			"deviceNodes": [{"path": "/dev/probe", "hostPath": "/dev/null", "permissions": "rw", "fileMode": 384}],
			"netDevices": [{"hostInterfaceName": "eth7", "name": "probe0"}],
			"intelRdt": {"closID": "probe"},
			"additionalGids": [7],
			"hooks": [
				{"hookName": "prestart", "path": "/hook"},
				{"hookName": "createRuntime", "path": "/hook", "args": ["hook", "create", "--lane", "0"]},
				{"hookName": "createContainer", "path": "/hook"},
				{"hookName": "startContainer", "path": "/hook"},
				{"hookName": "poststart", "path": "/hook"}
			]
		}},
		{"name": "1", "containerEdits": {"hooks": [{"hookName": "createRuntime", "path": "/hook", "args": ["hook", "create",
			"--lane", "1"]}]}}
	]
}`

func specDir(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// newer is a config.json of a future version of the runtime specification.
const newer = `{
	"ociVersion": "9.9.9",
	"future": {"big": 18446744073709551615, "exact": 1.00000000000000000001, "nested": [{"a": null}]},
	"process": {
		"args": ["sh", "-c", "a < b && echo \"ä\u2028\""],
		"env": ["PATH=/usr/bin", "KEPT=<&>"],
		"user": {"uid": 0, "gid": 0, "futureUser": 1},
		"rlimits": [{"type": "RLIMIT_MEMLOCK", "hard": 18446744073709551615, "soft": 18446744073709551615}],
		"futureProcess": 12345678901234567890
	},
	"mounts": [
		{"destination": "/run/probe/below", "type": "tmpfs", "source": "x", "futureMount": {"n": 9007199254740993}},
		{"destination": "/proc", "type": "proc", "source": "proc"}
	],
	"hooks": {"createRuntime": [{"path": "/other", "futureHook": true}], "futureHooks": [{"path": "/x"}]},
	"linux": {
		"resources": {"memory": {"limit": -1}, "devices": [{"allow": false, "access": "rwm", "futureRule": "x"}],
			"futureResource": 1e400},
		"devices": [{"path": "/dev/kept", "type": "c", "major": 1, "minor": 3, "futureNode": 1}],
		"netDevices": {"eth1": {"name": "kept", "futureNet": true}},
		"futureLinux": "x"
	},
	"annotations": {"a": "b"}
}`

func decode(t *testing.T, text []byte) map[string]any {
	t.Helper()
	var v map[string]any
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber() // keeps the digits
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestApplyKeepsForeignFields(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	changed, err := apply([]byte(newer), []string{dir}, []string{"probe.dev/thing=0", "probe.dev/thing=1"})
	if err != nil {
		t.Fatal(err)
	}
	want := decode(t, []byte(newer))
	at := func(path ...string) map[string]any {
		o := want
		for _, key := range path {
			o = o[key].(map[string]any)
		}
		return o
	}
	hook := func(args ...any) map[string]any {
		h := map[string]any{"path": "/hook"}
		if args != nil {
			h["args"] = args
		}
		return h
	}
	number := func(n int) json.Number { return json.Number(fmt.Sprint(n)) }
	process := at("process")
	process["env"] = []any{"PATH=/probe", "KEPT=<&>", "COMMON=1"}
	at("process", "user")["additionalGids"] = []any{number(7)}
	// The library orders a mount before mounts below it.
	mounts := want["mounts"].([]any)
	want["mounts"] = []any{
		mounts[1],
		map[string]any{"destination": "/run/probe", "source": "/anchor", "options": []any{"ro", "bind"}},
		mounts[0],
	}
	hooks := at("hooks")
	for _, name := range []string{"prestart", "createContainer", "startContainer", "poststart"} {
		hooks[name] = []any{hook()}
	}
	hooks["createRuntime"] = append(
		hooks["createRuntime"].([]any),
		hook("hook", "create", "--lane", "0"),
		hook("hook", "create", "--lane", "1"),
	)
	removal := hook("hook", "remove")
	removal["env"] = []any{"PATH=/bin"}
	hooks["poststop"] = []any{removal}
	linux, resources := at("linux"), at("linux", "resources")
	linux["devices"] = append(
		linux["devices"].([]any),
		map[string]any{
			"path":     "/dev/probe",
			"type":     "c",
			"major":    number(1),
			"minor":    number(3),
			"fileMode": number(384),
		},
	)
	resources["devices"] = append(
		resources["devices"].([]any),
		map[string]any{"allow": true, "type": "c", "major": number(1), "minor": number(3), "access": "rw"},
	)
	at("linux", "netDevices")["eth7"] = map[string]any{"name": "probe0"}
	linux["intelRdt"] = map[string]any{"closID": "probe"}
	if diff := cmp.Diff(want, decode(t, changed)); diff != "" {
		t.Errorf("config.json afterwards (-want +got):\n%s", diff)
	}
}

func TestApplyTwiceChangesNothing(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	for _, text := range []string{newer, `{"ociVersion":"1.0.2"}`,
		`{"process":null,"hooks":null,"linux":{"resources":null},"mounts":null}`} {
		devices := []string{"probe.dev/thing=0", "probe.dev/thing=1"}
		first, err := apply([]byte(text), []string{dir}, devices)
		if err != nil {
			t.Fatal(err)
		}
		second, err := apply(first, []string{dir}, devices)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(first), string(second)); diff != "" {
			t.Errorf("%s: the second time (-first +second):\n%s", text, diff)
		}
	}
}

// A rule before a denial has no effect, so the rule must be repeated.
func TestApplyRepeatsRuleBeforeDenial(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	const text = `{"linux":{"resources":{"devices":[{"allow":true,"type":"c","major":1,"minor":3,"access":"rw"},{"allow":false,"access":"rwm"}]}}}`
	changed, err := apply([]byte(text), []string{dir}, []string{"probe.dev/thing=0"})
	if err != nil {
		t.Fatal(err)
	}
	rules := decode(t, changed)["linux"].(map[string]any)["resources"].(map[string]any)["devices"].([]any)
	if len(rules) != 3 || !reflect.DeepEqual(rules[0], rules[2]) {
		t.Errorf("the rules are %v; the first, which is denied afterwards, has to be the last as well", rules)
	}
}

func TestApplyUnusableDeviceFails(t *testing.T) {
	other := strings.Replace(everything, "COMMON=1", "COMMON=2", 1)
	for _, test := range []struct {
		name   string
		files  map[string]string
		config string
		// want is nil for an unknownDeviceError.
		want error
		// problems are substrings of the problems of the error.
		problems []string
	}{
		{"no specification", nil, `{}`, nil, nil},
		{"unknown", map[string]string{"a.json": strings.Replace(everything, `"name": "0"`, `"name": "2"`, 1)}, `{}`, nil,
			nil},
		{"two of one name", map[string]string{"a.json": everything, "b.json": other}, `{}`, nil,
			[]string{`conflicting device "probe.dev/thing=0"`, "a.json", "b.json"}},
		{"broken", map[string]string{"a.json": `{"cdiVersion": `}, `{}`, nil,
			[]string{"a.json", "failed to unmarshal"}},
		{"no JSON", map[string]string{"a.json": everything}, `{`, &json.SyntaxError{Offset: 1}, nil},
		{"a list for an object", map[string]string{"a.json": everything}, `{"process":[]}`,
			&json.UnmarshalTypeError{Value: "array"}, nil},
		{"a key twice", map[string]string{"a.json": everything},
			`{"mounts":[{"destination":"/a"},{"destination":"/b"}],"Mounts":[{"destination":"/c"}]}`, errKeyTwice, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			dirs, devices := []string{specDir(t, test.files)}, []string{"probe.dev/thing=0"}
			_, err := apply([]byte(test.config), dirs, devices)
			if err == nil {
				t.Fatal("apply succeeded")
			}
			unknown, ok := errors.AsType[*unknownDeviceError](err)
			switch {
			case test.want != nil:
				if !testutil.HasError(err, test.want) {
					t.Errorf("error %v, want %v", err, test.want)
				}
			case !ok || !slices.Equal(unknown.specDirs, dirs) || !slices.Equal(unknown.devices, devices) ||
				(len(unknown.problems) > 0) != (len(test.problems) > 0):
				t.Errorf("error %v, want an unknown device", err)
			}
			for _, words := range test.problems {
				if ok && len(unknown.problems) > 0 && !strings.Contains(unknown.problems[0], words) {
					t.Errorf("the problem %q does not have %q", unknown.problems[0], words)
				}
			}
			// An engine shows the text of the error to its user as one line.
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %v", err)
			}
		})
	}
}

// FuzzApply checks for any text that a change is complete and that a second change is empty.
func FuzzApply(f *testing.F) {
	dir := specDir(f, map[string]string{"probe.json": everything})
	for _, text := range []string{newer, `{}`, `{"mounts":[null,{}],"hooks":{"poststop":[{"path":"/hook"}]}}`,
		`{"Process":{"env":["A"]},"process":{"env":["B"]}}`, `{"linux":{"netDevices":{"eth7":{"name":"x"}}}}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		devices := []string{"probe.dev/thing=0"}
		first, err := apply(text, []string{dir}, devices)
		if err != nil {
			return
		}
		second, err := apply(first, []string{dir}, devices)
		if err != nil {
			t.Fatalf("its own result is refused: %v\n%s", err, first)
		}
		if string(first) != string(second) {
			t.Fatalf("a second time changes it:\n%s\n%s", first, second)
		}
		before, after := decode(t, text), decode(t, first)
		for _, changed := range []string{"process", "mounts", "hooks", "linux"} {
			delete(before, changed)
			delete(after, changed)
		}
		if diff := cmp.Diff(before, after); diff != "" {
			t.Fatalf("other keys changed:\n%s", diff)
		}
	})
}

func TestApplyReplacesNetworkDevice(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	changed, err := apply([]byte(`{"linux":{"netDevices":{"eth7":{"name":"x"}}}}`), []string{dir},
		[]string{"probe.dev/thing=0"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"eth7": map[string]any{"name": "probe0"}}
	if diff := cmp.Diff(want, decode(t, changed)["linux"].(map[string]any)["netDevices"]); diff != "" {
		t.Errorf("network devices (-want +got):\n%s", diff)
	}
}

func TestMergeListKeepsTextOfEachRepeatedElement(t *testing.T) {
	same := specs.Mount{Destination: "/a"}
	o := object{"mounts": json.RawMessage(`[{"destination":"/a","future":1},{"destination":"/a","future":2}]`)}
	m := merger{}
	mergeList(&m, o, "mounts", []specs.Mount{same, same}, []specs.Mount{{Destination: "/b"}, same, same, same})
	const want = `[{"destination":"/b"},{"destination":"/a","future":1},{"destination":"/a","future":2},` +
		`{"destination":"/a"}]`
	if got := string(o["mounts"]); m.err != nil || got != want {
		t.Errorf("%s, %v; want %s", got, m.err, want)
	}
}

func TestMergeListOfEmptyListsWritesNone(t *testing.T) {
	for name, lists := range map[string][2][]string{"none": {nil, nil}, "an empty one": {{}, nil}, "empty ones": {nil,
		{}}} {
		o, m := object{}, merger{}
		if mergeList(&m, o, "env", lists[0], lists[1]); len(o) > 0 || m.err != nil {
			t.Errorf("%s: %v, %v", name, o, m.err)
		}
	}
	o, m := object{"env": json.RawMessage(`["A"]`)}, merger{}
	if mergeList(&m, o, "env", []string{"A"}, nil); string(o["env"]) != "null" || m.err != nil {
		t.Errorf("a removed element: %s, %v", o["env"], m.err)
	}
}

func TestCheckFindsMissedChange(t *testing.T) {
	want := &specs.Spec{Version: "1.0.0"}
	for text, matches := range map[string]func(error) bool{
		`{"ociVersion":"1.0.0"}`: func(err error) bool { return err == nil },
		`{"ociVersion":"2.0.0"}`: func(err error) bool { return errors.Is(err, errUnwritable) },
		`{`:                      func(err error) bool { return testutil.HasError(err, &json.SyntaxError{Offset: 1}) },
	} {
		if err := check([]byte(text), want); !matches(err) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestUnresolvedDeviceListsProblemsInOrder(t *testing.T) {
	files := map[string]string{}
	for i := range 8 {
		files[fmt.Sprintf("%d.json", i)] = `{"cdiVersion": `
	}
	_, err := apply([]byte(`{}`), []string{specDir(t, files)}, []string{"probe.dev/thing=0"})
	if e, ok := errors.AsType[*unknownDeviceError](err); !ok || len(e.problems) != 8 || !slices.IsSorted(e.problems) {
		t.Errorf("%v", err)
	}
}
