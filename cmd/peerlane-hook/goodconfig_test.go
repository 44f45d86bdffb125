package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/testutil"
)

// A faulty configuration does not stop containers: the hook uses the last good configuration, and
// reports the fault to the journal. Without a copy of a good configuration the fault is an error.
func TestWrongConfigurationIsReplacedByTheLastGoodOne(t *testing.T) {
	root := testutil.ShortDir(t)
	journal := testutil.ListenDatagrams(t, filepath.Join(root, "run/systemd/journal/socket"))
	l := paths.New(root)
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(l.ConfigFile(), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// The host has no plan: a container starts only with on_failure = "warn".
	create := func(status int) string {
		t.Helper()
		out, got := command(t, noPlan, "create", "--root", root, "--lane", "@0000:17:00.0")
		entry := testutil.ReadDatagram(t, journal)
		if got != status {
			t.Errorf("status %d, want %d: %s", got, status, out)
		}
		return entry
	}
	const (
		good  = "[hook]\non_failure = \"warn\"\n"
		wrong = "[hook]\non_failur = \"fail\"\n"
	)
	write(wrong)
	if entry := create(1); !strings.Contains(entry,
		"unknown key hook.on_failur; did you mean hook.on_failure?") || strings.Contains(entry, "last good") {
		t.Errorf("without a copy the journal has %s", entry)
	}
	write(good)
	if entry := create(0); strings.Contains(entry, "last good") {
		t.Errorf("with a good file the journal has %s", entry)
	}
	for name, text := range map[string]string{"unknown key": wrong, "torn": good[:len(good)-3],
		"wrong value": "[hook]\non_failure = \"never\"\n"} {
		write(text)
		if entry := create(0); !strings.Contains(entry, "PRIORITY=4\n") ||
			!strings.Contains(entry, "containers start with the last good configuration, "+l.GoodConfig()) {
			t.Errorf("%s: the journal has %s", name, entry)
		}
	}
	// The hook copies a changed file, and does not copy a faulty file.
	const other = "[hook]\non_failure = \"fail\"\n"
	write(other)
	create(1)
	write(wrong)
	create(1)
	if text, err := os.ReadFile(l.GoodConfig()); err != nil || string(text) != other {
		t.Errorf("%v: the copy is %q", err, text)
	}
	// A temporary file of a killed hook does not stop the next hook from saving the configuration.
	write(good)
	temporary := l.GoodConfig() + ".new"
	if err := os.WriteFile(temporary, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(temporary, old, old); err != nil {
		t.Fatal(err)
	}
	create(0)
	create(0)
	if text, err := os.ReadFile(l.GoodConfig()); err != nil || string(text) != good {
		t.Errorf("%v: the copy is %q", err, text)
	}
	if left, err := filepath.Glob(temporary); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
	// The hook ignores a copy that other users can write.
	write(wrong)
	if err := os.Chmod(l.GoodConfig(), 0o666); err != nil {
		t.Fatal(err)
	}
	if entry := create(1); strings.Contains(entry, "last good") {
		t.Errorf("with a copy that others can write the journal has %s", entry)
	}
}
