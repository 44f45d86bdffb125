package hostinstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/network"
)

// fakeSystemd records calls, and returns an error for the call in fails.
type fakeSystemd struct {
	calls []string
	fails string
}

func (f *fakeSystemd) call(words ...string) error {
	call := strings.Join(words, " ")
	f.calls = append(f.calls, call)
	if call == f.fails {
		return errors.New("failed")
	}
	return nil
}

func (f *fakeSystemd) Reload(context.Context) error { return f.call("reload") }
func (f *fakeSystemd) Enable(_ context.Context, units ...string) error {
	return f.call(append([]string{"enable"}, units...)...)
}
func (f *fakeSystemd) Restart(_ context.Context, unit string) error { return f.call("restart", unit) }
func (f *fakeSystemd) Start(_ context.Context, unit string) error   { return f.call("start", unit) }

// put writes files with a mode below a directory.
func put(t *testing.T, dir string, files map[string]string, mode os.FileMode) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(path, []byte(text), mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
}

func configOf(t *testing.T) (Config, *fakeSystemd) {
	log := logrus.New()
	log.Out = io.Discard
	s := &fakeSystemd{}
	c := Config{Payload: t.TempDir(), Host: t.TempDir(), Systemd: s, Log: log}
	put(t, c.Payload, map[string]string{
		"opt/peerlane/libexec/peerlane/peerlane-relay":          "relay 2",
		"opt/peerlane/bin/peerlane":                             "peerlane 2",
		"opt/peerlane/lib/peerlane/libpeerlane.so.0":            "library 2",
		"opt/peerlane/lib/systemd/system/peerlane-relay.socket": "socket 2",
		"opt/peerlane/lib/udev/rules.d/90-peerlane.rules":       "rules 2",
		"opt/peerlane/lib/modprobe.d/peerlane.conf":             "modprobe 2",
		"etc/peerlane/config.toml":                              "default",
		"etc/peerlane/nccl.conf":                                "default",
	}, 0o711)
	return c, s
}

// started lists the calls of an installation.
var started = []string{"reload", "enable peerlane-anchor.service peerlane-relay.socket peerlane-cdi-refresh.service " +
	"peerlane-cdi-refresh.path", "start peerlane-anchor.service", "start peerlane-relay.socket",
	"start peerlane-cdi-refresh.path", "restart peerlane-cdi-refresh.service"}

func TestInstallReplacesProgramsAndKeepsConfigurationAndRunningPrograms(t *testing.T) {
	c, s := configOf(t)
	put(t, c.Host, map[string]string{"opt/peerlane/libexec/peerlane/peerlane-relay": "relay 1",
		"etc/peerlane/config.toml": "of the administrator"}, 0o644)
	running, err := os.Open(filepath.Join(c.Host, "opt/peerlane/libexec/peerlane/peerlane-relay"))
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()
	if err := Install(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"opt/peerlane/libexec/peerlane/peerlane-relay": "relay 2 -rwx--x--x",
		"opt/peerlane/bin/peerlane":                    "peerlane 2 -rwx--x--x",
		"opt/peerlane/lib/peerlane/libpeerlane.so.0":   "library 2 -rwx--x--x",
		"etc/systemd/system/peerlane-relay.socket":     "socket 2 -rwx--x--x",
		"etc/udev/rules.d/90-peerlane.rules":           "rules 2 -rwx--x--x",
		"etc/modprobe.d/peerlane.conf":                 "modprobe 2 -rwx--x--x",
		"etc/peerlane/config.toml":                     "of the administrator -rw-r--r--",
		"etc/peerlane/nccl.conf":                       "default -rwx--x--x",
	} {
		text, err := os.ReadFile(filepath.Join(c.Host, name))
		if err != nil {
			t.Error(err)
			continue
		}
		info, err := os.Stat(filepath.Join(c.Host, name))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%s %v", text, info.Mode()); got != want {
			t.Errorf("%s is %s, expected %s", name, got, want)
		}
	}
	if text, err := io.ReadAll(running); err != nil || string(text) != "relay 1" {
		t.Errorf("a running relay has the program %q, %v", text, err)
	}
	if !reflect.DeepEqual(s.calls, started) {
		t.Errorf("systemd was asked for %q, expected %q", s.calls, started)
	}
}

func TestInstallAgainWritesNothing(t *testing.T) {
	c, _ := configOf(t)
	var inodes [2]os.FileInfo
	for n := range inodes {
		if err := Install(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		var err error
		if inodes[n], err = os.Stat(filepath.Join(c.Host, "opt/peerlane/bin/peerlane")); err != nil {
			t.Fatal(err)
		}
	}
	if !os.SameFile(inodes[0], inodes[1]) {
		t.Error("the second installation replaced a file that is equal")
	}
	left, err := filepath.Glob(filepath.Join(c.Host, "opt/peerlane/bin/.*"))
	if err != nil || len(left) > 0 {
		t.Errorf("the installation left %v, %v", left, err)
	}
}

func TestInstallReportsTheUnitThatFails(t *testing.T) {
	for _, call := range started {
		c, s := configOf(t)
		s.fails = call
		err := Install(t.Context(), c)
		if err == nil || s.calls[len(s.calls)-1] != call {
			t.Errorf("%s fails: %v after %q", call, err, s.calls)
			continue
		}
		var failed *unitError
		if words := strings.Fields(call); len(words) == 2 && (!errors.As(err, &failed) || failed.unit != words[1]) {
			t.Errorf("the error does not name %s: %v", words[1], err)
		}
	}
}

func TestInstallWithoutSystemdCopiesFiles(t *testing.T) {
	c, _ := configOf(t)
	var err error
	c.Systemd, err = Connect(t.Context(), filepath.Join(c.Host, "run/systemd/private"))
	if err != nil || c.Systemd != nil {
		t.Fatalf("%v, %v", c.Systemd, err)
	}
	if err := Install(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(c.Host, "opt/peerlane/bin/peerlane")); err != nil {
		t.Error(err)
	}
}

func TestInstallOfIncompletePayloadFails(t *testing.T) {
	c, s := configOf(t)
	if err := os.RemoveAll(filepath.Join(c.Payload, "opt/peerlane/lib/systemd")); err != nil {
		t.Fatal(err)
	}
	if err := Install(t.Context(), c); !errors.Is(err, os.ErrNotExist) || len(s.calls) > 0 {
		t.Errorf("%v, systemd was asked for %q", err, s.calls)
	}
}

func TestCopyKeyFollowsTheSecretAndKeepsTheKeyOfAFaultyOne(t *testing.T) {
	dir := t.TempDir()
	secret, host := filepath.Join(dir, "secret"), filepath.Join(dir, "etc/peerlane/cluster.key")
	first := network.Keys{Current: network.NewKey(time.Now())}
	second, err := first.Rotate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name           string
		secret         []byte
		want           []byte // the host's key
		changes, fails bool
	}{
		{"first key", first.Text(), first.Text(), true, false},
		{"same key", first.Text(), first.Text(), false, false},
		{"cut key", second.Text()[:40], first.Text(), false, true},
		{"empty key", []byte{}, first.Text(), false, true},
		{"rotated key", second.Text(), second.Text(), true, false},
	} {
		put(t, dir, map[string]string{"secret": string(c.secret)}, 0o600)
		ids, err := CopyKey(secret, host)
		if (ids != "") != c.changes || (err != nil) != c.fails {
			t.Errorf("%s: ids %q, %v", c.name, ids, err)
		}
		if got, err := os.ReadFile(host); err != nil || string(got) != string(c.want) {
			t.Errorf("%s: the host has another key, %v", c.name, err)
		}
		if info, err := os.Stat(host); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", c.name, info, err)
		}
	}
	if err := os.Remove(secret); err != nil {
		t.Fatal(err)
	}
	if _, err := CopyKey(secret, host); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a secret: %v", err)
	}
	if err := errors.Join(os.Remove(host), os.Symlink("elsewhere", host)); err != nil {
		t.Fatal(err)
	}
	put(t, dir, map[string]string{"secret": string(first.Text())}, 0o600)
	if _, err := CopyKey(secret, host); err == nil {
		t.Error("a link was replaced")
	}
}
