package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An invalid command line exits with a status other than 0, and one sentence names the mistake.
func TestBadInputIsRefusedWithItsCause(t *testing.T) {
	root := t.TempDir()
	for _, c := range []struct {
		line string
		code int
		want string
	}{
		{"topo --sysfs /nosuch", 1, "--sysfs /nosuch: not a readable directory"},
		{"plan --root ROOT --proc /nosuch", 1, "--proc /nosuch: not a readable directory"},
		{"topo --log-level trace", 2, "--log-level trace: unknown level; use debug, info, warning or error"},
		{"topo --log-level panic", 2, "use debug, info"},
		{"relay list --root relative", 2, "--root relative: not an absolute path"},
		{"help nosuch", 2, `unknown command "nosuch"`},
		{"help cdi nosuch", 2, `unknown command "cdi nosuch"`},
		{"completion tcsh", 2, `unknown command "tcsh"`},
		{"demo --bytes -5MiB", 2, `--bytes "-5MiB": invalid size`},
		{"demo --bytes 999PiB", 2, "--bytes 999PiB: must be 8 B to 1.0 TiB"},
		{"demo --bytes 0", 2, "--bytes 0:"},
		{"demo --slot-size 8GiB", 2, "--slot-size 8GiB:"},
		{"demo --slots -1", 2, "--slots -1: must be 0 to 1024"},
		{"bench --sizes 0", 2, "--sizes 0:"},
		{"bench --sizes 1EiB", 2, "--sizes 1EiB:"},
		{"relay list -o yaml", 2, "table, json or wide"},
		{"relay inspect --root ROOT nosuch", 1, `find container or generation "nosuch": no relay`},
		{"plan --root ROOT --input /nosuch", 1, "/nosuch: no such file"},
	} {
		var out, errOut bytes.Buffer
		code := run(strings.Fields(strings.ReplaceAll(c.line, "ROOT", root)), &out, &errOut)
		if code != c.code || !strings.Contains(errOut.String(), c.want) || out.Len() > 0 {
			t.Errorf("peerlane %s: exit status %d, %q and output %q; want %d, %q", c.line, code, errOut.String(), out.String(),
				c.code, c.want)
		}
	}
}

func TestHelpOfACommandIsThatOfItsFlag(t *testing.T) {
	if got, want := peerlane(t, "help", "relay", "list"), peerlane(t, "relay", "list", "--help"); got != want {
		t.Errorf("help relay list prints %q, and relay list --help %q", got, want)
	}
}

// "-" means standard input, also for a capture, which is binary.
func TestInputDashReadsStandardInput(t *testing.T) {
	file := "../../docs/hgx-4-nics.xml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = w.Write(text) // a failure shows in the comparison
		_ = w.Close()
	}()
	before := os.Stdin
	os.Stdin = r
	defer func() { os.Stdin = before }()
	got := peerlane(t, "plan", "--root", t.TempDir(), "--input", "-")
	os.Stdin = before
	want := peerlane(t, "plan", "--root", t.TempDir(), "--input", file)
	if got = strings.Replace(got, "standard input", file, 1); got != want {
		t.Errorf("plan from standard input:\n%s\nplan from the file:\n%s", got, want)
	}
}

// The plan of eight GPUs fits 100 columns; the wide form has one line per lane.
func TestPlanFits100Columns(t *testing.T) {
	root := t.TempDir()
	for line := range strings.Lines(peerlane(t, "plan", "--root", root, "--input", "../../docs/hgx-4-nics.xml")) {
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > columns && !strings.HasPrefix(line, "Note:") {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
	wide := peerlane(t, "plan", "--root", root, "--input", "../../docs/hgx-4-nics.xml", "-o", "wide")
	if !strings.Contains(wide, "is staged on GPU 1, near that NIC") {
		t.Errorf("the wide plan wraps the column of reasons:\n%s", wide)
	}
}

// The error for a user without access to the state names the access, not a missing relay.
func TestStateThatCannotBeReadIsNamedFirst(t *testing.T) {
	if os.Geteuid() == 0 {
		// Root can read every directory, so replace the directory by a file.
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "var/lib"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "var/lib/peerlane"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		var out, errOut bytes.Buffer
		if code := run([]string{"relay", "inspect", "--root", root, "abc"}, &out, &errOut); code != 1 ||
			strings.Contains(errOut.String(), "no container") {
			t.Errorf("exit status %d: %s", code, errOut.String())
		}
		return
	}
	root := t.TempDir()
	state := filepath.Join(root, "var/lib/peerlane")
	if err := os.MkdirAll(state, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(state, 0); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"relay", "inspect", "--root", root, "abc"}, &out, &errOut); code != 1 ||
		!strings.Contains(errOut.String(), "permission denied") || strings.Contains(errOut.String(), "no container") {
		t.Errorf("exit status %d: %s", code, errOut.String())
	}
}

func TestListsInJSONAreNeverNull(t *testing.T) {
	root := t.TempDir()
	for _, line := range []string{"cdi list", "relay list"} {
		if got := peerlane(t, append(strings.Fields(line), "--root", root, "-o", "json")...); strings.TrimSpace(got) != "[]" {
			t.Errorf("peerlane %s -o json prints %q, want []", line, got)
		}
	}
}
