package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestBundleRequestBeyondListIsRefused(t *testing.T) {
	const (
		byVariable   = `{"process":{"env":["PEERLANE_DEVICES=%s"]}}`
		byAnnotation = `{"annotations":{"peerlane.dev/devices":"%s"}}`
	)
	dir := specDir(t, map[string]string{"probe.json": everything})
	isFault := func(operation, object string) func(error) bool {
		return func(err error) bool {
			f, ok := errors.AsType[*fault.Error](err)
			return ok && f.Code == "" && f.Operation == operation && f.Object == object &&
				f.Remedy == `a device name has the form "peerlane.dev/lane=3"`
		}
	}
	refused := func(asker, device string, allowed ...string) func(error) bool {
		return func(err error) bool {
			f, ok := errors.AsType[*fault.Error](err)
			cause, not := errors.AsType[*notPermittedError](err)
			return ok && f.Code == fault.DeviceNotPermitted && f.Operation == asker+" asks for the device" &&
				f.Object == device && not && cause.configFile == "/etc/config.toml" && slices.Equal(cause.allowed, allowed) &&
				f.Remedy == "an administrator can add it, or make a runtime with --peerlane-device="+device
		}
	}
	unknown := func(device string) func(error) bool {
		return func(err error) bool {
			return testutil.HasError(err, &unknownDeviceError{specDirs: []string{dir}, devices: []string{device}})
		}
	}
	for _, test := range []struct {
		name string
		text string
		// given are the devices of the administrator.
		given   []string
		allowed []string
		// hooks is the number of hooks at createRuntime.
		hooks   int
		refused func(error) bool
	}{
		{"nobody asks", `{"process":{"env":["A=PEERLANE_DEVICES=probe.dev/thing=0"]}}`, nil, nil, 0, nil},
		{"an empty variable", fmt.Sprintf(byVariable, " , "), nil, nil, 0, nil},
		{"no process", `{"process":null}`, nil, nil, 0, nil},
		{"the administrator", `{}`, []string{"probe.dev/thing=0"}, nil, 1, nil},
		{"variable, no list", fmt.Sprintf(byVariable, "probe.dev/thing=0"), nil, nil, 0,
			refused("the variable PEERLANE_DEVICES", "probe.dev/thing=0")},
		{"annotation, no list", fmt.Sprintf(byAnnotation, "probe.dev/thing=0"), nil, nil, 0,
			refused("the annotation peerlane.dev/devices", "probe.dev/thing=0")},
		{"variable, by name", fmt.Sprintf(byVariable, "probe.dev/thing=0"), nil, []string{"probe.dev/thing=0"}, 1, nil},
		{"annotation, by pattern", fmt.Sprintf(byAnnotation, "probe.dev/thing=0, probe.dev/thing=1"), nil,
			[]string{"probe.dev/thing=[01]"}, 2, nil},
		{"one of two", fmt.Sprintf(byVariable, "probe.dev/thing=0,probe.dev/thing=1"), nil, []string{"probe.dev/thing=0"}, 0,
			refused("the variable PEERLANE_DEVICES", "probe.dev/thing=1", "probe.dev/thing=0")},
		{"the administrator's, asked for too", fmt.Sprintf(byVariable, "probe.dev/thing=0"), []string{"probe.dev/thing=0"},
			[]string{"*"}, 0, refused("the variable PEERLANE_DEVICES", "probe.dev/thing=0", "*")},
		{"one device twice", fmt.Sprintf(byVariable, "probe.dev/thing=1,probe.dev/thing=1"), []string{"probe.dev/thing=1"},
			[]string{"probe.dev/thing=*"}, 1, nil},
		{"the last of two variables", `{"process":{"env":["PEERLANE_DEVICES=probe.dev/thing=0","PEERLANE_DEVICES="]}}`, nil,
			nil, 0, nil},
		{"not a name", fmt.Sprintf(byVariable, "../../etc"), nil, []string{"probe.dev/thing=*"}, 0,
			isFault("the variable PEERLANE_DEVICES asks for the device", `"../../etc"`)},
		{"not a name, by the administrator", `{}`, []string{"thing"}, nil, 0,
			isFault("--peerlane-device: the device", `"thing"`)},
		{"an unknown device", `{}`, []string{"probe.dev/thing=9"}, nil, 0,
			unknown("probe.dev/thing=9")},
		{"a lane of a host without any", `{}`, []string{"peerlane.dev/lane=9"}, nil, 0,
			unknown("peerlane.dev/lane=9")},
		{"no config.json worth the name", `[]`, nil, nil, 0, func(err error) bool {
			f, ok := errors.AsType[*fault.Error](err)
			return ok && filepath.Base(f.Object) == "config.json" &&
				testutil.HasError(f.Cause, &json.UnmarshalTypeError{Value: "array"})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.json")
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			err := Bundle(
				path,
				Options{Devices: test.given, Allowed: test.allowed, ConfigFile: "/etc/config.toml", SpecDirs: []string{dir}},
			)
			if (err != nil) != (test.refused != nil) || err != nil && !test.refused(err) {
				t.Fatalf("the error is %v", err)
			}
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if test.hooks == 0 && string(text) != test.text {
				t.Errorf("the file has changed:\n%s", text)
			}
			if hooks := strings.Count(string(text), `"create"`); hooks != test.hooks {
				t.Errorf("%d hooks, want %d:\n%s", hooks, test.hooks, text)
			}
			alone(t, path)
		})
	}
}

// alone checks that the directory of path has no other file.
func alone(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("unexpected files beside %s: %v", path, entries)
	}
}

func TestOwnerAndModeStay(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, []byte(`{}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o646); err != nil { // a mode that no umask produces
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(path, 1234, 2345); err != nil {
			t.Fatal(err)
		}
	}
	var before, after unix.Stat_t
	if err := unix.Stat(path, &before); err != nil {
		t.Fatal(err)
	}
	if err := Bundle(path, Options{Devices: []string{"probe.dev/thing=0"}, SpecDirs: []string{dir}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(path, &after); err != nil {
		t.Fatal(err)
	}
	if before.Ino == after.Ino {
		t.Error("the file was written in place, so a runtime can read half of it")
	}
	if before.Mode != after.Mode || before.Uid != after.Uid || before.Gid != after.Gid {
		t.Errorf(
			"mode %o, owner %d:%d; before %o, %d:%d",
			after.Mode,
			after.Uid,
			after.Gid,
			before.Mode,
			before.Uid,
			before.Gid,
		)
	}
	alone(t, path)
}

func TestApplyToInvalidConfigFileFails(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	o := Options{Devices: []string{"probe.dev/thing=0"}, SpecDirs: []string{dir}}
	errorIs := func(err error) func(string) error { return func(string) error { return err } }
	for _, test := range []struct {
		name string
		make func(path string) error
		want func(path string) error
	}{
		{"missing", func(string) error { return nil }, errorIs(nil)},
		{"a pipe", func(path string) error { return unix.Mkfifo(path, 0o600) }, errorIs(paths.ErrNotRegular)},
		{"a directory", func(path string) error { return os.Mkdir(path, 0o700) }, errorIs(paths.ErrNotRegular)},
		{"a link", func(path string) error {
			return errors.Join(os.WriteFile(path+".real", []byte(`{}`), 0o600), os.Symlink(path+".real", path))
		}, errorIs(errLink)},
		{"too long", func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, maxConfig+1))
		}, func(path string) error { return &paths.SizeError{Path: path, Bytes: maxConfig + 1, Limit: maxConfig} }},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.json")
			if err := test.make(path); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- Bundle(path, o) }()
			select {
			case err := <-done:
				if want := test.want(path); !testutil.HasError(err, want) {
					t.Errorf("the error is %v, want %v", err, want)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("Bundle blocks")
			}
		})
	}
	// Without a request, Bundle leaves a link to the runtime.
	path := filepath.Join(t.TempDir(), "config.json")
	if err := errors.Join(os.WriteFile(path+".real", []byte(`{}`), 0o600), os.Symlink(path+".real", path)); err != nil {
		t.Fatal(err)
	}
	if err := Bundle(path, Options{SpecDirs: []string{dir}}); err != nil {
		t.Error(err)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != fs.ModeSymlink {
		t.Errorf("Bundle changed the link: %v, %v", info, err)
	}
}

// BenchmarkBundle measures a container without a request, which costs the reading of config.json,
// and a container with a request, which costs the CDI library as well.
func BenchmarkBundle(b *testing.B) {
	dir := specDir(b, map[string]string{"probe.json": everything})
	path := filepath.Join(b.TempDir(), "config.json")
	for _, c := range []struct {
		name    string
		devices []string
	}{{"nothing", nil}, {"device", []string{"probe.dev/thing=0"}}} {
		b.Run(c.name, func(b *testing.B) {
			if err := os.WriteFile(path, []byte(newer), 0o600); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := Bundle(path, Options{Devices: c.devices, SpecDirs: []string{dir}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestReadLimitsConfiguration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, []byte("12345678"), 0o644); err != nil {
		t.Fatal(err)
	}
	for limit, want := range map[int64]error{9: nil, 8: nil, 7: &paths.SizeError{Path: path, Bytes: 8, Limit: 7}} {
		text, _, err := read(path, limit)
		if !testutil.HasError(err, want) || want == nil && string(text) != "12345678" {
			t.Errorf("limit %d: %q, %v", limit, text, err)
		}
	}
}

func TestReplaceThatFailsLeavesNoFile(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes files too
	dir := t.TempDir()
	path := filepath.Join(dir, "config.json")
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := replace(path, []byte("text"), info); err == nil {
		t.Error("a directory is replaced")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left are %v, %v", left, err)
	}
	if _, _, err := read(path, 8); !errors.Is(err, paths.ErrNotRegular) {
		t.Errorf("a directory is read: %v", err)
	}
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, dir) { // otherwise closed meanwhile
			t.Errorf("%s is open", to)
		}
	}
}
