package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// With the variable in its environment, the test binary runs as peerlane-hook.
func TestMain(m *testing.M) {
	if os.Getenv("PEERLANE_HOOK_TEST") == "main" {
		main()
		return
	}
	os.Exit(m.Run())
}

// command runs peerlane-hook.
func command(t *testing.T, stdin string, args ...string) (out string, status int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = []string{"PEERLANE_HOOK_TEST=main", "GORACE=atexit_sleep_ms=0"}
	cmd.Stdin = strings.NewReader(stdin)
	text, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(text), cmd.ProcessState.ExitCode()
}

func TestHookCommandLineIsParsed(t *testing.T) {
	const state = `{"id":"c","status":"creating","pid":1,"bundle":"/nowhere"}`
	root := t.TempDir()
	for _, test := range []struct {
		name   string
		args   []string
		stdin  string
		status int
		want   string
	}{
		{"nothing", nil, "", 2, "missing command"},
		{"unknown command", []string{"start"}, "", 2, `unknown command "start"; peerlane-hook help`},
		{"help", []string{"help"}, "", 0, "createRuntime"},
		{"version", []string{"version"}, "", 0, "peerlane-hook "},
		{"no lane", []string{"create", "--root", root}, state, 2, "create: --lane, --auto, --gpu or --nic is required"},
		{"unknown flag", []string{"create", "--cpu", "0"}, state, 2, "create: flag provided but not defined: -cpu"},
		{"argument", []string{"remove", "now"}, state, 2, `unexpected argument "now"`},
		{"relative root", []string{"remove", "--root", "here"}, state, 2, `--root "here" is not an absolute path`},
		{"no state", []string{"create", "--root", root, "--lane", "@0000:17:00.0"}, "", 1,
			"read the container's state from standard input"},
		{"wrong hook", []string{"create", "--root", root, "--lane", "@0000:17:00.0"},
			`{"id":"c","status":"creating","pid":1,"bundle":"/b"}`, 1, "createRuntime or prestart"},
		{"no plan", []string{"create", "--root", root, "--lane", "@0000:17:00.0"},
			`{"id":"c","status":"creating","pid":2,"bundle":"/b"}`, 1, "run peerlane cdi refresh"},
		{"no plan for a GPU", []string{"create", "--root", root, "--gpu", "@0000:17:00.0"},
			`{"id":"c","status":"creating","pid":2,"bundle":"/b"}`, 1, "run peerlane cdi refresh"},
		{"no plan for a NIC", []string{"create", "--root", root, "--nic", "mlx5_0"},
			`{"id":"c","status":"creating","pid":2,"bundle":"/b"}`, 1, "run peerlane cdi refresh"},
		{"nothing to remove", []string{"remove", "--root", root}, `{"id":"c","status":"stopped"}`, 0, ""},
		{"accept by hand", []string{"accept"}, "", 1, "only systemd runs this command, for peerlane-relay.socket"},
		{"accept with an argument", []string{"accept", "all"}, "", 2, `accept: unexpected argument "all"`},
		{"supervise by hand", []string{"supervise", "--root", root, "--generation", strings.Repeat("0", 32)}, "", 1,
			"only peerlane-hook create starts a supervisor"},
	} {
		t.Run(test.name, func(t *testing.T) {
			out, status := command(t, test.stdin, test.args...)
			if status != test.status || !strings.Contains(out, test.want) {
				t.Errorf("status %d, want %d; it says %q, want %q", status, test.status, out, test.want)
			}
			if status != 0 && strings.Count(out, "\n") != 1 {
				t.Errorf("runtimes show one line best: %q", out)
			}
		})
	}
	if entries, err := filepath.Glob(root + "/*"); err != nil || len(entries) > 0 {
		t.Errorf("commands that failed left %v, %v", entries, err)
	}
}

func TestHookRootArgumentIsFound(t *testing.T) {
	for cmdline, want := range map[string]string{
		"runc\x00--root\x00/run/docker/runtime-runc/moby\x00--log\x00x\x00create\x00id\x00": "/run/docker/runtime-runc/moby",
		"crun\x00--root=/run/crun\x00run\x00id\x00":                                         "/run/crun",
		"runc\x00-root\x00/r\x00run\x00":                                                    "/r",
		"runc\x00-root=/r\x00run\x00":                                                       "/r",
		"runc\x00run\x00id\x00":                                                             "",
		"runc\x00run\x00--root\x00":                                                         "",
		"":                                                                                  "",
	} {
		if got := rootArgument([]byte(cmdline)); got != want {
			t.Errorf("%q: %q, want %q", cmdline, got, want)
		}
	}
}

func TestHelpDescribesEachCommandOnce(t *testing.T) {
	out, _ := command(t, "", "help")
	for _, name := range []string{"create", "create-annotated", "remove", "supervise", "accept", "confine", "version"} {
		n := 0
		for line := range strings.Lines(out) {
			if words := strings.Fields(line); len(words) > 1 && words[0] == "peerlane-hook" && words[1] == name {
				n++
			}
		}
		if n != 1 {
			t.Errorf("the help describes %s %d times", name, n)
		}
	}
	if n := strings.Count(out, "Exit status:"); n != 1 {
		t.Errorf("the help describes the exit status %d times", n)
	}
}
