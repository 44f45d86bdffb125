package main

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/launch"
)

// A relay refuses a supervisor of an unsupported version, and the error names both versions.
func TestRelayOfAnotherReleaseNamesBothVersions(t *testing.T) {
	for name, c := range map[string]struct {
		message any
		want    launch.VersionError
	}{
		"configuration of a later supervisor": {launch.Config{Version: launch.Version + 1},
			launch.VersionError{Supervisor: launch.Version + 1}},
		"configuration before the first version": {launch.Config{Version: launch.OldestVersion - 1},
			launch.VersionError{Supervisor: launch.OldestVersion - 1}},
		"unknown request": {launch.Request{Request: "dance"},
			launch.VersionError{Supervisor: launch.Version, Request: "dance"}},
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := socketPair(t)
			text, err := json.Marshal(c.message)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := theirs.Write(text); err != nil {
				t.Fatal(err)
			}
			// The relay may be nil, because configure does not pass the message to it.
			if configured, err := configure(nil, &supervisor{conn: ours, version: launch.Version}); configured || err != nil {
				t.Fatalf("configure returns %v, %v", configured, err)
			}
			answer := make([]byte, launch.MaxDatagram)
			n, err := theirs.Read(answer)
			if err != nil {
				t.Fatal(err)
			}
			var status launch.Status
			if err := json.Unmarshal(answer[:n], &status); err != nil {
				t.Fatal(err)
			}
			c.want.Oldest, c.want.Newest = launch.OldestVersion, launch.Version
			// Compare the text, because the status has no type of error.
			if status.OK || status.Error != c.want.Error() {
				t.Errorf("the answer is %+v, not %q", status, c.want.Error())
			}
		})
	}
}

// Earlier supervisors, of a099472 for example, send no version, which reads as 0.
func TestCheckVersionServesEarlierSupervisors(t *testing.T) {
	for version := launch.OldestVersion; version <= launch.Version; version++ {
		if err := launch.CheckVersion(version); err != nil {
			t.Errorf("version %d: %v", version, err)
		}
	}
	var refused *launch.VersionError
	if err := launch.CheckVersion(launch.Version + 1); !errors.As(err, &refused) ||
		refused.Supervisor != launch.Version+1 || refused.Newest != launch.Version {
		t.Errorf("a later version: %v", err)
	}
}

func socketPair(t *testing.T) (ours, theirs *net.UnixConn) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "pair")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conns[i] = conn.(*net.UnixConn)
	}
	return conns[0], conns[1]
}
