package inject

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestBundleRequestBeyondListIsRefused(t *testing.T) {
	const (
		byVariable   = `{"process":{"env":["PEERLANE_DEVICES=%s"]}}`
		byAnnotation = `{"annotations":{"peerlane.dev/devices":"%s"}}`
	)
	dir := specDir(t, map[string]string{"probe.json": everything})
	for _, test := range []struct {
		name    string
		text    string
		given   []string // by the administrator
		allowed []string
		hooks   int      // at createRuntime
		says    []string // of the refusal
	}{
		{"nobody asks", `{"process":{"env":["A=PEERLANE_DEVICES=probe.dev/thing=0"]}}`, nil, nil, 0, nil},
		{"an empty variable", fmt.Sprintf(byVariable, " , "), nil, nil, 0, nil},
		{"no process", `{"process":null}`, nil, nil, 0, nil},
		{"the administrator", `{}`, []string{"probe.dev/thing=0"}, nil, 1, nil},
		{"variable, no list", fmt.Sprintf(byVariable, "probe.dev/thing=0"), nil, nil, 0, []string{
			"the variable PEERLANE_DEVICES asks for the device probe.dev/thing=0", "runtime.devices in /etc/config.toml",
			"it is empty", "--peerlane-device=probe.dev/thing=0"}},
		{"annotation, no list", fmt.Sprintf(byAnnotation, "probe.dev/thing=0"), nil, nil, 0, []string{
			"the annotation peerlane.dev/devices asks for the device probe.dev/thing=0", "runtime.devices in /etc/config.toml"}},
		{"variable, by name", fmt.Sprintf(byVariable, "probe.dev/thing=0"), nil, []string{"probe.dev/thing=0"}, 1, nil},
		{"annotation, by pattern", fmt.Sprintf(byAnnotation, "probe.dev/thing=0, probe.dev/thing=1"), nil,
			[]string{"probe.dev/thing=[01]"}, 2, nil},
		{"one of two", fmt.Sprintf(byVariable, "probe.dev/thing=0,probe.dev/thing=1"), nil, []string{"probe.dev/thing=0"}, 0,
			[]string{"probe.dev/thing=1", "it has probe.dev/thing=0"}},
		{"the administrator's, asked for too", fmt.Sprintf(byVariable, "probe.dev/thing=0"), []string{"probe.dev/thing=0"},
			[]string{"*"}, 0, []string{"does not permit", "[PL1105]"}},
		{"one device twice", fmt.Sprintf(byVariable, "probe.dev/thing=1,probe.dev/thing=1"), []string{"probe.dev/thing=1"},
			[]string{"probe.dev/thing=*"}, 1, nil},
		{"the last of two variables", `{"process":{"env":["PEERLANE_DEVICES=probe.dev/thing=0","PEERLANE_DEVICES="]}}`, nil,
			nil, 0, nil},
		{"not a name", fmt.Sprintf(byVariable, "../../etc"), nil, []string{"probe.dev/thing=*"}, 0,
			[]string{"PEERLANE_DEVICES asks for", `"../../etc"`, "peerlane.dev/lane=3"}},
		{"not a name, by the administrator", `{}`, []string{"thing"}, nil, 0, []string{"--peerlane-device", `"thing"`}},
		{"an unknown device", `{}`, []string{"probe.dev/thing=9"}, nil, 0,
			[]string{"no CDI specification in", "probe.dev/thing=9"}},
		{"a lane of a host without any", `{}`, []string{"peerlane.dev/lane=9"}, nil, 0,
			[]string{"no CDI specification in", "peerlane.dev/lane=9", "peerlane cdi generate"}},
		{"no config.json worth the name", `[]`, nil, nil, 0, []string{"reading ", "config.json: json:"}},
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
			if (err != nil) != (test.says != nil) {
				t.Fatalf("the error is %v", err)
			}
			for _, words := range test.says {
				if !strings.Contains(err.Error(), words) {
					t.Errorf("the error does not say %q: %v", words, err)
				}
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

// alone demands that nothing is beside a file.
func alone(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("beside %s there is more: %v", path, entries)
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

func TestFilesThatAreNoConfig(t *testing.T) {
	dir := specDir(t, map[string]string{"probe.json": everything})
	o := Options{Devices: []string{"probe.dev/thing=0"}, SpecDirs: []string{dir}}
	for _, test := range []struct {
		name string
		make func(path string) error
		says string // empty: no error
	}{
		{"missing", func(string) error { return nil }, ""},
		{"a pipe", func(path string) error { return unix.Mkfifo(path, 0o600) }, "not a regular file"},
		{"a directory", func(path string) error { return os.Mkdir(path, 0o700) }, "not a regular file"},
		{"a link", func(path string) error {
			return errors.Join(os.WriteFile(path+".real", []byte(`{}`), 0o600), os.Symlink(path+".real", path))
		}, "symbolic link"},
		{"too long", func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, maxConfig+1))
		}, "more than"},
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
				if (err != nil) != (test.says != "") || err != nil && !strings.Contains(err.Error(), test.says) {
					t.Errorf("the error is %v, want %q", err, test.says)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("it waits")
			}
		})
	}
	// Where nothing is asked for, a link is the runtime's to judge.
	path := filepath.Join(t.TempDir(), "config.json")
	if err := errors.Join(os.WriteFile(path+".real", []byte(`{}`), 0o600), os.Symlink(path+".real", path)); err != nil {
		t.Fatal(err)
	}
	if err := Bundle(path, Options{SpecDirs: []string{dir}}); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		t.Error("it has gone")
	}
}

// A container without a request costs the reading of config.json; a container with a request
// costs the CDI library as well.
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
