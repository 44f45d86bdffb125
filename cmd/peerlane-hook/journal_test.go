package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

const noPlan = `{"id":"the container","status":"creating","pid":2,"bundle":"/b"}`

// A runtime may drop the output of a hook, so the host's log gets the error.
func TestErrorsGoToTheJournal(t *testing.T) {
	root := testutil.ShortDir(t)
	journal := testutil.ListenDatagrams(t, filepath.Join(root, "run/systemd/journal/socket"))
	syslog := testutil.ListenDatagrams(t, filepath.Join(root, "dev/log"))
	out, status := command(t, noPlan, "create", "--root", root, "--lane", "@0000:17:00.0")
	if status != 1 || !strings.Contains(out, "run peerlane cdi refresh") {
		t.Errorf("status %d, %s", status, out)
	}
	entry := testutil.ReadDatagram(t, journal)
	for _, want := range []string{
		"MESSAGE=container \"the container\": read the plan: ", "; run peerlane cdi refresh [PL1101]\n",
		"PRIORITY=3\n", "SYSLOG_IDENTIFIER=peerlane-hook\n", "PEERLANE_CONTAINER=the container\n",
	} {
		if !strings.Contains(entry, want) {
			t.Errorf("the entry lacks %q:\n%s", want, entry)
		}
	}
	// The hook writes to one log only.
	if err := syslog.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := syslog.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes came to /dev/log as well", n)
	}
}

func TestErrorsGoToSyslog(t *testing.T) {
	root := testutil.ShortDir(t)
	syslog := testutil.ListenDatagrams(t, filepath.Join(root, "dev/log"))
	command(t, noPlan, "create", "--root", root, "--lane", "@0000:17:00.0")
	line := testutil.ReadDatagram(t, syslog)
	if !strings.HasPrefix(line, "<27>peerlane-hook[") || !strings.Contains(line,
		`container "the container": read the plan: `) {
		t.Errorf("the line is %q", line)
	}
}

// Only a readable file can set on_failure = "warn".
func TestHookTornConfigurationFailsStart(t *testing.T) {
	for text, want := range map[string]int{
		"[hook]\non_failure = \"warn\"\n":                0,
		"[hook]\non_failure = \"fail\"\n":                1,
		"[hook]\non_failure = \"warn":                    1,
		"[hook]\non_failure = \"warn\"\non_failur = 1\n": 1,
		"[hook]\non_failure = \"never\"\n":               1,
		"":                                               1,
	} {
		root := testutil.ShortDir(t)
		journal := testutil.ListenDatagrams(t, filepath.Join(root, "run/systemd/journal/socket"))
		if err := os.MkdirAll(filepath.Join(root, "etc/peerlane"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "etc/peerlane/config.toml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		out, status := command(t, noPlan, "create", "--root", root, "--lane", "@0000:17:00.0")
		if status != want {
			t.Errorf("%q: status %d, %s", text, status, out)
		}
		entry := testutil.ReadDatagram(t, journal)
		if warned := strings.Contains(entry, "PRIORITY=4\n") &&
			strings.Contains(entry, "starts without its lane"); warned != (want == 0) {
			t.Errorf("%q: the journal has %q", text, entry)
		}
	}
}
