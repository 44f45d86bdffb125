package supervisor

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
)

// The supervisor sends a changed key to a relay on the network, and no other key.
func TestCheckKeySendsChangedKey(t *testing.T) {
	l := paths.New(t.TempDir())
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(l.ClusterKey()), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(key string) {
		t.Helper()
		if err := os.WriteFile(l.ClusterKey(), []byte(key), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old")
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	file := os.NewFile(uintptr(fds[0]), "relay")
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	defer conn.Close()
	settings := config.Default().Network
	settings.Interfaces = "=lo"
	s := &supervisor{
		layout:     l,
		log:        logrus.NewEntry(logrus.New()),
		generation: &generation.Generation{Network: settings},
		relay:      &relay{control: conn.(*net.UnixConn), overdue: time.NewTimer(time.Hour)},
	}
	defer s.relay.overdue.Stop()
	s.log.Logger.SetOutput(io.Discard)
	s.goOnNetwork()
	received := func() string {
		t.Helper()
		text := make([]byte, launch.MaxDatagram)
		n, err := unix.Read(fds[1], text)
		if err == unix.EAGAIN {
			return ""
		}
		var r launch.Request
		if err == nil {
			err = json.Unmarshal(text[:n], &r)
		}
		if err != nil || r.Request != launch.RequestSecrets || r.Secrets == nil {
			t.Fatalf("received %s, %v", text[:n], err)
		}
		return string(r.Secrets.ClusterKey.Bytes())
	}
	refuses := launch.Status{Error: "it makes no sense"}
	takes := launch.Status{OK: true}
	remove := func() {
		t.Helper()
		if err := os.Remove(l.ClusterKey()); err != nil {
			t.Fatal(err)
		}
	}
	lost := func() {
		heard := s.relay.control
		s.relay.control = &net.UnixConn{} // sends nothing
		s.checkKey()
		s.relay.control = heard
	}
	s.sendSecrets()
	if got := received(); got != "old" {
		t.Fatalf("at the start the relay gets %q", got)
	}
	for _, step := range []struct {
		what string
		do   func()
		// want is the key that the supervisor sends then; empty for no key.
		want string
	}{
		{"before it has answered", func() { write("new") }, ""},
		{"a new key", func() { s.answered(takes) }, "new"},
		{"the key that it has", func() { s.answered(takes) }, ""},
		{"another key", func() { write("newer") }, "newer"},
		{"a key that it has just refused", func() { s.answered(refuses) }, ""},
		{"one that it refused a while ago", func() { s.relay.secretsRetry = time.Now() }, "newer"},
		{"one that was changed since it refused", func() { s.answered(refuses); write("newest") }, "newest"},
		{"the one before again", func() { s.answered(refuses); write("new") }, "new"},
		{"a key that is gone", func() { s.answered(takes); remove() }, ""},
		{"and is there again", func() { write("new") }, ""},
		{"a key that could not be sent", func() { write("late"); lost() }, "late"},
	} {
		step.do()
		s.checkKey()
		if got := received(); got != step.want {
			t.Errorf("%s: the relay gets %q, want %q", step.what, got, step.want)
		}
	}
}

// The supervisor logs a fault of the key once, and again after a correct key.
func TestLogKeyErrorLogsFaultOnce(t *testing.T) {
	var log bytes.Buffer
	s := &supervisor{log: logrus.NewEntry(logrus.New()), relay: &relay{}}
	s.log.Logger.SetOutput(&log)
	for range 3 {
		s.secretsAnswered(launch.Status{Error: "peerlane-test"})
	}
	s.secretsAnswered(launch.Status{OK: true})
	s.secretsAnswered(launch.Status{Error: "peerlane-test"})
	if n := strings.Count(log.String(), "peerlane-test"); n != 2 {
		t.Errorf("said %d times: %s", n, &log)
	}
}
