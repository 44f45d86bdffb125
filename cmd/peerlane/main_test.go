package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/topo/recorded"
)

var update = flag.Bool("update", false, "write what the commands print to testdata")

// recordedHost returns the recorded host's directory and the flags that read it.
func recordedHost(t *testing.T) (dir string, flags []string) {
	t.Helper()
	dir = t.TempDir()
	sysfs, proc, err := recorded.Unpack(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir, []string{"--sysfs", sysfs, "--proc", proc}
}

// peerlane runs a command line and requires success.
func peerlane(t *testing.T, args ...string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	if code := run(args, &out, &errOut); code != 0 {
		t.Fatalf("peerlane %s: exit status %d, %s", strings.Join(args, " "), code, errOut.String())
	}
	return out.String()
}

// decode runs a command line and decodes its JSON output.
func decode[T any](t *testing.T, args ...string) (v T) {
	t.Helper()
	text := peerlane(t, args...)
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("peerlane %s: %v in\n%s", strings.Join(args, " "), err, text)
	}
	return v
}

// golden compares output with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; accept with go test -update):\n%s", path, diff)
	}
}

// Scripts distinguish an invalid command line, status 2, from a finding on the host.
func TestExitStatusSeparatesUsageFromFindings(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	_, host := recordedHost(t)
	notExecutable := write("hook", "")
	matrix := write("topo.txt", smiText)
	write("misspelt/etc/peerlane/config.toml", "[relay]\nslotsize = \"1MiB\"\n")
	write("nonsense/etc/peerlane/config.toml", "[[plan.lane]]\ngpu = \"17\"\nservers = [\"0\"]\n")
	write("empty/sys/devices/system/node/node0/cpulist", "0-3\n")

	for _, test := range []struct {
		name string
		args []string
		code int
		want []string
	}{
		{"an unknown command", []string{"plam"}, 2, []string{`unknown command "plam" for peerlane; did you mean plan?`,
			"see peerlane --help"}},
		{"an unknown command of a group", []string{"cdi", "generat"}, 2,
			[]string{`unknown command "generat" for peerlane cdi; did you mean generate?`, "see peerlane cdi --help"}},
		{"an unknown flag", []string{"topo", "--colour"}, 2, []string{"unknown flag: --colour", "see peerlane topo --help"}},
		{"a value that a flag does not have", []string{"plan", "-o", "xml"}, 2,
			[]string{`the form of output is table, json, wide, svg or html`}},
		{"a form that there is not", []string{"topo", "-o", "yaml"}, 2,
			[]string{`the form of output is table, json, xml, svg or html`}},
		{"the virtual switch as a table", append([]string{"topo", "--virtual"}, host...), 2,
			[]string{"--virtual goes with -o xml"}},
		{"rules where nothing is named", append([]string{"topo", "-o", "xml", "--rules", "smi"}, host...), 2,
			[]string{"--rules changes path names"}},
		{"rules in a picture", append([]string{"topo", "-o", "svg", "--rules", "smi"}, host...), 2,
			[]string{"--rules changes path names, and -o svg has none"}},
		{"sentences in a picture", append([]string{"plan", "-o", "html", "--explain", "0"}, host...), 2,
			[]string{"-o html draws the plan"}},
		{"rules that there are not", []string{"topo", "--rules", "hwloc"}, 2,
			[]string{`unknown rules "hwloc"; use nccl or smi`}},
		{"an argument too many", []string{"plan", "gpu3"}, 2, []string{`peerlane plan takes no arguments, got "gpu3"`}},
		{"two hosts at once", []string{"topo", "--input", "x.xml", "--sysfs", "/sys"}, 2, []string{"--input reads a file"}},
		{"a class where all are installed", []string{"cdi", "generate", "--class", "lane", "--spec-dir", dir}, 2,
			[]string{"--spec-dir always installs all"}},
		{"a dry run of what only prints", []string{"cdi", "generate", "--dry-run"}, 2,
			[]string{"--dry-run needs --spec-dir"}},
		{"a format that there is not", []string{"cdi", "refresh", "--format", "toml"}, 2,
			[]string{"--format toml: unknown format; use json, yaml"}},
		{"two lists at once", []string{"cdi", "list", "--generated", "--spec-dir", dir}, 2,
			[]string{"--generated reads this host"}},
		{"what is no device", []string{"cdi", "list", "--spec-dir", dir, "lane"}, 1,
			[]string{`"lane" is not a device name such as lane=3`}},
		{"a device where there is none", []string{"cdi", "list", "--spec-dir", dir, "lane=3"}, 1,
			[]string{"no device is installed", "peerlane cdi generate"}},
		{"an unknown log level", []string{"topo", "--log-level", "loud"}, 2, []string{"--log-level loud: unknown level"}},
		{"an unknown log format", []string{"topo", "--log-format", "xml"}, 2, []string{"--log-format xml is neither"}},

		{"a file that does not exist", []string{"topo", "--input", "/nowhere/topo.xml"}, 1,
			[]string{"/nowhere/topo.xml", "no such file"}},
		{"XML of a matrix", []string{"topo", "-o", "xml", "--input", matrix}, 1,
			[]string{"has path types without a tree", "peerlane topo capture"}},
		{"a misspelt key", append([]string{"plan", "--root", filepath.Join(dir, "misspelt")}, host...), 1,
			[]string{"slotsize", "config.toml"}},
		{"a lane for a GPU that is not there", append([]string{"plan", "--root", filepath.Join(dir, "nonsense")}, host...),
			1, []string{"config.toml", `"17"`}},
		{"no hook", append([]string{"cdi", "generate", "--hook", "/nowhere/peerlane-hook"}, host...), 1,
			[]string{"find the hook /nowhere/peerlane-hook: it does not exist", "--hook"}},
		{"a hook that cannot run", append([]string{"cdi", "generate", "--hook", notExecutable}, host...), 1,
			[]string{"is not an executable file"}},
		{"a picture of a plan without a GPU", []string{"plan", "-o", "svg", "--sysfs", filepath.Join(dir, "empty/sys"),
			"--proc", "/proc"}, 1, []string{"no GPU found, so no lane to draw", "peerlane topo -o svg"}},
		{"a picture of nothing", []string{"topo", "-o", "html", "--sysfs", filepath.Join(dir, "empty/sys"), "--proc",
			"/proc"}, 1, []string{"no GPU and no NIC found"}},
		{"no GPU", []string{"cdi", "generate", "--hook", os.Args[0], "--sysfs", filepath.Join(dir, "empty/sys"), "--proc",
			"/proc"}, 1, []string{"this host has no NVIDIA GPU"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			if code := run(test.args, &out, &errOut); code != test.code {
				t.Errorf("exit status %d, want %d", code, test.code)
			}
			if out.Len() > 0 {
				t.Errorf("standard output %q", out.String())
			}
			lines := strings.Split(strings.TrimSuffix(errOut.String(), "\n"), "\n")
			if want := test.code; len(lines) != want { // one sentence; a usage error also names the help
				t.Errorf("%d lines on standard error, want %d: %q", len(lines), want, lines)
			}
			for _, want := range test.want {
				if !strings.Contains(errOut.String(), want) {
					t.Errorf("standard error %q lacks %q", errOut.String(), want)
				}
			}
		})
	}
}

// full is a standard output on a full disk.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestOutputThatCannotBeWrittenIsAFailure(t *testing.T) {
	_, host := recordedHost(t)
	for _, args := range [][]string{append([]string{"topo"}, host...), append([]string{"plan", "-o", "json"}, host...),
		{"version"}} {
		var errOut bytes.Buffer
		if code := run(args, full{}, &errOut); code != exitFailure {
			t.Errorf("peerlane %s: exit status %d", args[0], code)
		}
		if !strings.Contains(errOut.String(), "no space left on device") {
			t.Errorf("peerlane %s: %q", args[0], errOut.String())
		}
	}
}

func TestGroupsPrintTheirHelp(t *testing.T) {
	for _, args := range [][]string{{}, {"cdi"}, {"relay"}, {"key"}, {"runtime"}} {
		if out := peerlane(t, args...); !strings.Contains(out, "Commands:\n") {
			t.Errorf("peerlane %v printed %q", args, out)
		}
	}
}

func TestVersionPrintsReleaseAndCommit(t *testing.T) {
	if diff := cmp.Diff(version.Get(), decode[version.Build](t, "version", "-o", "json")); diff != "" {
		t.Errorf("-o json (-want +got):\n%s", diff)
	}
	if out := peerlane(t, "version"); !strings.HasPrefix(out, "peerlane ") ||
		!strings.Contains(out, version.Get().Commit) {
		t.Errorf("output %q", out)
	}
}

func TestCompletionOfEachShellIsPrinted(t *testing.T) {
	_, host := recordedHost(t)
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if peerlane(t, "completion", shell) == "" {
			t.Errorf("no completion for %s", shell)
		}
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"topo", "-o", ""}, "table\njson\nxml\nsvg\nhtml\n"},
		{[]string{"plan", "-o", ""}, "table\njson\nwide\nsvg\nhtml\n:"},
		{[]string{"cdi", "generate", "--class", ""}, "lane\ngpu\nnic\n"},
		{[]string{"--log-format", ""}, "text\njson\n"},
		{[]string{"key", "show", "-o", ""}, "table\njson\n:"},
		{[]string{"key", "rot"}, "rotate\t"},
		{[]string{"ver"}, "version\t"},
		{[]string{"runtime", "configure", "--runtime", ""}, "docker\ncontainerd\npodman\ncrio\n:"},
		{append(append([]string{"plan"}, host...), "--explain", ""), "0\t0000:"},
	} {
		if out := peerlane(t, append([]string{"__complete"}, test.args...)...); !strings.HasPrefix(out, test.want) {
			t.Errorf("completing %q gives %q, want %q", test.args, out, test.want)
		}
	}
}
