package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// With the variable in its environment, the test binary runs as peerlane-runtime.
func TestMain(m *testing.M) {
	if os.Getenv("PEERLANE_RUNTIME_TEST") == "main" {
		main()
		return
	}
	os.Exit(m.Run())
}

// host returns a root with a configuration and a runtime that prints its arguments and its process
// id.
func host(t *testing.T, config string) (root string) {
	t.Helper()
	root = t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "etc/peerlane"), 0o755); err != nil {
		t.Fatal(err)
	}
	runtime := filepath.Join(root, "oci")
	if err := os.WriteFile(runtime, []byte("#!/bin/sh\necho $$ \"$@\"\nexit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	config = strings.ReplaceAll(config, "ROOT", root)
	if err := os.WriteFile(filepath.Join(root, "etc/peerlane/config.toml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	return root
}

// command runs peerlane-runtime.
func command(t *testing.T, args ...string) (out string, pid, status int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = []string{"PEERLANE_RUNTIME_TEST=main", "GORACE=atexit_sleep_ms=0"}
	text, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(text), cmd.Process.Pid, cmd.ProcessState.ExitCode()
}

const ownRuntime = "[runtime]\npath = \"ROOT/oci\"\n"

func TestRuntimeReplacesItsProcess(t *testing.T) {
	root := host(t, ownRuntime)
	out, pid, status := command(t, "--peerlane-root="+root, "--log", "/x", "state", "c 1")
	shell, rest, _ := strings.Cut(strings.TrimSpace(out), " ")
	if rest != "--log /x state c 1" || status != 7 {
		t.Errorf("the runtime's status is %d, and it says %q", status, out)
	}
	// The runtime replaces the process of peerlane-runtime.
	var itself int
	if err := json.Unmarshal([]byte(shell), &itself); err != nil || itself != pid {
		t.Errorf("the runtime is process %s, and was started as %d", shell, pid)
	}
}

func TestRuntimeCreateAppliesRequestedDevices(t *testing.T) {
	root := host(t, ownRuntime+"devices = [\"probe.dev/thing=*\"]\n")
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	write("cdi/probe.json",
		`{"cdiVersion":"0.5.0","kind":"probe.dev/thing","devices":[{"name":"0","containerEdits":{"env":["GIVEN=1"]}}]}`)
	write("b/config.json", `{"process":{"env":["PEERLANE_DEVICES=probe.dev/thing=0"]}}`)
	out, _, _ := command(t, "--peerlane-root="+root, "--peerlane-spec-dir="+root+"/cdi", "create", "--bundle", root+"/b",
		"c1")
	text, err := os.ReadFile(filepath.Join(root, "b/config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), `"GIVEN=1"`) || !strings.Contains(out, "create --bundle "+root+"/b c1") {
		t.Errorf("the runtime says %q, and config.json is %s", out, text)
	}
}

func TestErrorsAreTheRuntimes(t *testing.T) {
	for _, test := range []struct {
		name   string
		config string
		// file is the content of config.json.
		file string
		args []string
		want []string
	}{
		{"not permitted", ownRuntime, `{"process":{"env":["PEERLANE_DEVICES=probe.dev/thing=0"]}}`, nil,
			[]string{"PEERLANE_DEVICES asks for the device probe.dev/thing=0", "runtime.devices in "}},
		{"unknown device", ownRuntime, `{}`, []string{"--peerlane-device=probe.dev/thing=9"},
			[]string{"no CDI specification in ", "probe.dev/thing=9"}},
		{"no runtime", "[runtime]\npath = \"/nowhere/runc\"\n", `{}`, nil, []string{"runtime.path: stat /nowhere/runc"}},
		{"no program", "[runtime]\npath = \"ROOT/etc\"\n", `{}`, nil, []string{"not a program"}},
		{"an option that is none", ownRuntime, `{}`, []string{"--peerlane-lane=3"},
			[]string{"--peerlane-lane=3: unknown option", "--peerlane-help"}},
		{"a pattern that is none", ownRuntime + "devices = [\"*\"]\n", `{}`, nil,
			[]string{`runtime.devices has "*"`, `"peerlane.dev/lane=*"`}},
		{"a relative runtime", "[runtime]\npath = \"runc\"\n", `{}`, nil, []string{`runtime.path is "runc"`, "absolute"}},
	} {
		for _, format := range []string{"json", "text"} {
			t.Run(test.name+"/"+format, func(t *testing.T) {
				root := host(t, test.config)
				if err := os.WriteFile(filepath.Join(root, "config.json"), []byte(test.file), 0o644); err != nil {
					t.Fatal(err)
				}
				log := filepath.Join(root, "log")
				// peerlane-runtime appends to the runtime's log, which engines read.
				if err := os.WriteFile(log, []byte("before\n"), 0o600); err != nil {
					t.Fatal(err)
				}
				args := append([]string{"--log", log, "--log-format", format, "--peerlane-root=" + root,
					"--peerlane-spec-dir=" + root}, test.args...)
				out, _, status := command(t, append(args, "create", "--bundle", root, "c1")...)
				logged, err := os.ReadFile(log)
				if err != nil {
					t.Fatal(err)
				}
				before, line, _ := strings.Cut(string(logged), "\n")
				if status != 1 || before != "before" {
					t.Errorf("status %d, log %s", status, logged)
				}
				message := line
				if format == "json" {
					var entry struct{ Level, Msg, Time string }
					if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Level != "error" || entry.Time == "" {
						t.Fatalf("the log's line is %q: %v", line, err)
					}
					message = entry.Msg
				}
				for _, words := range append(test.want, "peerlane-runtime: ") {
					if format == "text" {
						words = strings.ReplaceAll(words, `"`, `\"`)
					}
					if !strings.Contains(message, words) {
						t.Errorf("the log does not say %q: %s", words, message)
					}
				}
				if format == "json" && strings.TrimSpace(out) != message {
					t.Errorf("standard error and the log differ:\n%s%s", out, message)
				}
			})
		}
	}
}

func TestRuntimeChoiceFollowsCommandLine(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	dirs := []string{first, second}
	put := func(path string, mode os.FileMode) string {
		t.Helper()
		if err := errors.Join(os.WriteFile(path, []byte("#!/bin/sh\n"), mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	expect := func(configured, want string, cause error) {
		t.Helper()
		got, err := findRuntime(configured, dirs)
		if !testutil.HasError(err, cause) || err == nil && got != want {
			t.Errorf("found %q (%v), want %q, %v", got, err, want, cause)
		}
	}
	untrusted := func(configured, path, remedy string) {
		t.Helper()
		_, err := findRuntime(configured, dirs)
		var f *fault.Error
		if !errors.As(err, &f) || f.Code != fault.UntrustedFile || f.Object != path || f.Remedy != remedy {
			t.Errorf("found with %v, want %s of %s with the remedy %q", err, fault.UntrustedFile, path, remedy)
		}
	}
	expect("", "", exec.ErrNotFound)
	crun := put(filepath.Join(first, "crun"), 0o755)
	expect("", crun, nil)
	runc := put(filepath.Join(second, "runc"), 0o755)
	expect("", runc, nil) // runc precedes crun, in any directory
	expect(crun, crun, nil)
	put(filepath.Join(first, "runc"), 0o644)
	expect("", "", errNoProgram)
	wide := put(filepath.Join(first, "runc"), 0o777)
	untrusted("", wide, "chmod go-w "+wide)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	expect(self, "", errSelf)
	if os.Geteuid() == 0 {
		if err := os.Chown(crun, 1234, -1); err != nil {
			t.Fatal(err)
		}
		untrusted(crun, crun, "chown root "+crun)
	}
}

// A rootless engine runs its runtime in a user namespace, where the owner of the host's runtime is
// not mapped, and the user's files are below XDG_RUNTIME_DIR only.
func TestRootlessRuntimeUsesUserTree(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it maps users")
	}
	// t.TempDir is not accessible to other users.
	dir, err := os.MkdirTemp("", "peerlane-runtime-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	self := filepath.Join(dir, "peerlane-runtime")
	tested, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(tested)
	if err == nil {
		err = os.WriteFile(self, program, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "peerlane")
	for name, text := range map[string]string{
		"etc/peerlane/config.toml": ownRuntime + "devices = [\"probe.dev/thing=*\"]\n",
		"etc/cdi/probe.json":       `{"cdiVersion":"0.5.0","kind":"probe.dev/thing","devices":[{"name":"0","containerEdits":{"env":["GIVEN=1"]}}]}`,
		"b/config.json":            `{"process":{"env":["PEERLANE_DEVICES=probe.dev/thing=0"]}}`,
		"oci":                      "#!/bin/sh\necho \"$@\"\n",
	} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(strings.ReplaceAll(text, "ROOT", root)), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	// User 4711, who is root in the namespace, owns the files; the host's root owns the runtime.
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if filepath.Base(path) == "oci" {
			return err
		}
		return errors.Join(err, os.Lchown(path, 4711, 4711))
	}); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "create", "--bundle", root+"/b", "c1")
	cmd.Env = []string{"PEERLANE_RUNTIME_TEST=main", "GORACE=atexit_sleep_ms=0", "XDG_RUNTIME_DIR=" + dir}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 4711, Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Credential: &syscall.Credential{Uid: 0,
			Gid: 0},
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(root, "b/config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), `"GIVEN=1"`) || !strings.Contains(string(out), "create --bundle") {
		t.Errorf("the runtime says %q, and config.json is %s", out, text)
	}
}

func TestRuntimeOwnOptionsPrintHelpAndVersion(t *testing.T) {
	if out, _, status := command(t, "--peerlane-help"); status != 0 || !strings.Contains(out, "daemon.json") {
		t.Errorf("help: status %d: %s", status, out)
	}
	if out, _, status := command(t, "--peerlane-version"); status != 0 || !strings.HasPrefix(out, "peerlane-runtime ") {
		t.Errorf("version: status %d: %s", status, out)
	}
}
