package integration_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/relay/network"
)

// Doctors of two hosts in separate network namespaces: first no finding, then a wrong MTU at one
// end, then a wrong key.
func TestDoctorsOfTwoHostsFindFaultsOfEachEnd(t *testing.T) {
	n := newNetworks(t)
	roots := [2]string{t.TempDir(), t.TempDir()}
	for i, root := range roots {
		dir := filepath.Join(root, "etc/peerlane")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "config.toml"),
			[]byte("[network]\ninterfaces = \"="+n.cables[i]+"\"\nfamily = \"ipv4\"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	peerlane := filepath.Join(binaries, "peerlane")
	on := func(host int, args ...string) *exec.Cmd {
		return exec.Command("ip", append([]string{"netns", "exec", n.names[host], peerlane, "--root", roots[host]},
			args...)...)
	}
	share := func() {
		t.Helper()
		key, err := os.ReadFile(filepath.Join(roots[0], "etc/peerlane/cluster.key"))
		if err == nil {
			err = os.WriteFile(filepath.Join(roots[1], "etc/peerlane/cluster.key"), key, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if out, err := on(0, "key", "generate").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	share()

	served := func() (address string, end func()) {
		t.Helper()
		cmd := on(1, "doctor", "--serve")
		var errOut bytes.Buffer
		cmd.Stderr = &errOut
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		end = func() {
			_ = cmd.Process.Signal(unix.SIGINT) // the process may have failed
			if err := cmd.Wait(); err != nil {
				t.Errorf("doctor --serve: %v: %s", err, errOut.String())
			}
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			end()
			t.Fatalf("doctor --serve says %q: %v", line, err)
		}
		return line[strings.LastIndex(strings.TrimSpace(line), " ")+1 : len(line)-1], end
	}
	found := func(at string) map[string]doctor.Finding {
		t.Helper()
		cmd := on(0, "doctor", "--host-root", roots[0], "--interval", "10ms", "-o", "json", "--connect", at)
		out, _ := cmd.Output() // the exit status also reports findings of this machine
		var r struct{ Findings []doctor.Finding }
		if err := json.Unmarshal(out, &r); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		all := map[string]doctor.Finding{}
		for _, f := range r.Findings {
			all[f.Check] = f
		}
		return all
	}
	at, end := served()
	if at != n.addresses[1]+":20999" {
		t.Errorf("address %s", at)
	}
	for check, f := range found(n.addresses[1]) {
		if f.Subject == "other hosts" && f.Status != doctor.OK {
			t.Errorf("%s: %+v", check, f)
		}
	}
	end()

	n.in(1, "ip", "link", "set", n.cables[1], "mtu", "1400")
	_, end = served()
	all := found(n.addresses[1])
	if f := all["mtu"]; f.Status != doctor.Warning || !strings.Contains(f.Found, n.cables[1]+" has 1400 there") {
		t.Errorf("%+v", f)
	}
	if f := all["reached"]; f.Status != doctor.OK {
		t.Errorf("%+v", f)
	}

	keys := network.NewKey(time.Now())
	if err := os.WriteFile(filepath.Join(roots[0], "etc/peerlane/cluster.key"), network.Keys{Current: keys}.Text(),
		0o600); err != nil {
		t.Fatal(err)
	}
	if f := found(n.addresses[1])["cluster-keys"]; f.Status != doctor.Failure ||
		!strings.Contains(f.Found, keys.ID.String()) {
		t.Errorf("%+v", f)
	}
	end()
	if f := found(n.addresses[1])["reached"]; f.Status != doctor.Failure || !strings.Contains(f.Found, "refused") {
		t.Errorf("%+v", f)
	}
}
