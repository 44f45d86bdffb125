package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/network"
)

// hostOnLoopback returns the root of a host with a cluster key whose relays use loopback.
func hostOnLoopback(t *testing.T, keys network.Keys, more string) string {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "etc/peerlane")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"cluster.key": string(keys.Text()),
		"config.toml": "[network]\ninterfaces = \"lo\"\nfamily = \"ipv4\"\n" + more} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// serving runs `doctor --serve` on a host, and returns the address that the command prints.
func serving(t *testing.T, root string) string {
	t.Helper()
	read, write := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	_, host := recordedHost(t) // --sysfs DIR --proc DIR
	var errOut bytes.Buffer
	go func() {
		a := &app{out: terminal.New(write), errOut: terminal.New(&errOut), log: logrus.New(), layout: paths.New(root)}
		a.log.SetOutput(&errOut)
		err := a.serveDoctor(ctx, &doctor.Host{Sysfs: host[1], Proc: host[3], Root: root, Layout: a.layout}, "127.0.0.1:0")
		write.CloseWithError(err)
		ended <- err
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("doctor --serve: %v: %s", err, errOut.String())
		}
	})
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, read) }()
	fields := strings.Fields(line)
	return fields[len(fields)-1]
}

// connected returns the findings of `doctor --connect` by check.
func connected(t *testing.T, root string, at string) map[string]doctor.Finding {
	t.Helper()
	_, host := recordedHost(t)
	var out, errOut bytes.Buffer
	args := slices.Concat([]string{"doctor", "--root", root, "--host-root", root, "--interval", "10ms", "-o", "json",
		"--connect", at}, host)
	run(args, &out, &errOut)
	var r doctorReport
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v: %s", err, errOut.String())
	}
	found := map[string]doctor.Finding{}
	for _, f := range r.Findings {
		found[f.Check] = f
	}
	return found
}

func TestDoctorOfTwoGoodHostsFindsNoFault(t *testing.T) {
	keys := network.Keys{Current: network.NewKey(time.Now())}
	remote := serving(t, hostOnLoopback(t, keys, ""))
	found := connected(t, hostOnLoopback(t, keys, ""), remote)
	for _, c := range doctor.Others() {
		want := doctor.OK
		if c.Name == "link-rate" { // loopback has no link rate
			want = doctor.Unknown
		}
		if f, ok := found[c.Name]; !ok || f.Status != want || f.On != remote {
			t.Errorf("%s: %+v", c.Name, f)
		}
	}
	if f := found["cluster-keys"]; !strings.Contains(f.Found, keys.Current.ID.String()) {
		t.Errorf("%+v", f)
	}
	// Another port range shows in the facts; another key does not.
	if f := connected(t, hostOnLoopback(t, keys, "ports = \"7000-7009\"\n"),
		remote)["ports"]; f.Status != doctor.Failure || !strings.Contains(f.Found, "7000-7009 here and 20000-20999 there") {
		t.Errorf("%+v", f)
	}
	other := network.Keys{Current: network.NewKey(time.Now())}
	if f := connected(t, hostOnLoopback(t, other, ""), remote)["cluster-keys"]; f.Status != doctor.Failure {
		t.Errorf("%+v", f)
	}
}

// A doctor with --serve uses a rotated key, like relays.
func TestDoctorServesWhileKeysRotate(t *testing.T) {
	keys := network.Keys{Current: network.NewKey(time.Now())}
	root := hostOnLoopback(t, keys, "")
	remote := serving(t, root)
	here := hostOnLoopback(t, keys, "")
	if code := run([]string{"key", "rotate", "--root", root}, io.Discard, os.Stderr); code != 0 {
		t.Fatal("exit status ", code)
	}
	if f := connected(t, here, remote)["cluster-keys"]; f.Status != doctor.Warning ||
		!strings.Contains(f.Found, "a rotation is under way") {
		t.Errorf("%+v", f)
	}
	if code := run([]string{"key", "rotate", "--finish", "--root", root}, io.Discard, os.Stderr); code != 0 {
		t.Fatal("exit status ", code)
	}
	if f := connected(t, here, remote)["cluster-keys"]; f.Status != doctor.Failure {
		t.Errorf("%+v", f)
	}
}

func TestDoctorIsServedAndConnectsInTurn(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"doctor", "--serve", "--connect", "host2"}, exitUsage, "serve"},
		{[]string{"doctor", "--serve", "--root", t.TempDir()}, exitFailure, "cluster key"},
		{[]string{"doctor", "--serve=127.0.0.1:x", "--root", hostOnLoopback(t,
			network.Keys{Current: network.NewKey(time.Now())}, "")}, exitFailure, `"x" is not a port`},
	} {
		var out, errOut bytes.Buffer
		if code := run(c.args, &out, &errOut); code != c.code || !strings.Contains(errOut.String(), c.want) {
			t.Errorf("%v: exit status %d, %s", c.args, code, errOut.String())
		}
	}
}
