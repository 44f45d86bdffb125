//go:build vm

package units_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/internal/testutil"
)

const (
	exporterService = "peerlane-exporter.service"
	exporterSocket  = "peerlane-exporter-collector.socket"
	exporterProgram = "/usr/bin/peerlane"
	exporterUser    = "peerlane-exporter"
	metricsSocket   = "/run/peerlane-exporter/metrics.sock"
	collectorSocket = "/run/peerlane/collector.sock"
)

// exporterFiles are the units as packages install them.
var exporterFiles = []string{exporterService, exporterSocket, "peerlane-exporter-collector@.service"}

// installExporter installs units, program and user until the test ends.
func installExporter(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("journalctl", "--no-pager", "--lines=60", "--unit=peerlane-exporter*").CombinedOutput()
			t.Logf("%s", out)
		}
		for _, arguments := range [][]string{
			{"systemctl", "stop", exporterService, exporterSocket}, {"userdel", exporterUser}, {"groupdel", "peerlane-relay"},
		} {
			if out, err := exec.Command(arguments[0], arguments[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%v: %v: %s", arguments, err, out)
			}
		}
		for _, name := range exporterFiles {
			if err := os.Remove(filepath.Join(units, name)); err != nil {
				t.Error(err)
			}
		}
		if err := os.Remove(exporterProgram); err != nil {
			t.Error(err)
		}
		reload(t)
	})
	place(t, filepath.Join(inside.Binaries, "peerlane"), exporterProgram, 0o755)
	for _, name := range exporterFiles {
		place(t, filepath.Join("/source/packaging/systemd", name), filepath.Join(units, name), 0o644)
	}
	inside.Command(t, "systemd-sysusers", "/source/packaging/sysusers.d/peerlane.conf")
	reload(t)
}

// connectAs connects to a socket with the rights of a user and group.
func connectAs(t *testing.T, uid, gid int, path string) error {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd)
			err = errors.Join(unix.Setfsgid(gid), unix.Setfsuid(uid))
		}
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		result <- err
	}()
	return testutil.Receive(t, "the connection to "+path, result)
}

// metricsAt returns the metrics at a socket, or at loopback if the path is empty.
func metricsAt(t *testing.T, path string) (string, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		if path != "" {
			network, address = "unix", path
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}}
	defer transport.CloseIdleConnections()
	ctx, cancel := testutil.WithLimit(t.Context(), 30*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9836/metrics", nil)
	if err != nil {
		return "", err
	}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %s: %s", answer.Status, text)
	}
	return string(text), err
}

// The exporter has a user without capabilities. Metrics at loopback have no container ids; those
// at its socket do, and only the group of the exporter can connect.
func TestExporterUnitShowsNamesToItsGroupOnly(t *testing.T) {
	o := newOperator(t, asItIs)
	c, _ := o.start()
	installExporter(t)
	inside.Command(t, "systemctl", "start", exporterService)
	var open string
	testutil.Succeeds(t, "the metrics of the relay", func() (err error) {
		if open, err = metricsAt(t, ""); err == nil && !strings.Contains(open, "peerlane_relay_up{") {
			err = errors.New(open)
		}
		return err
	})
	if strings.Contains(open, c.id) || !strings.Contains(open, `peerlane_relay_up{container="",relay="`) {
		t.Errorf("metrics at loopback, with container %s:\n%s", c.id, open)
	}
	if text, err := metricsAt(t, metricsSocket); err != nil ||
		!strings.Contains(text, fmt.Sprintf("peerlane_relay_up{container=%q", c.id)) {
		t.Errorf("metrics at the socket, without container %s: %v\n%s", c.id, err, text)
	}

	account, err := user.Lookup(exporterUser)
	if err != nil {
		t.Fatal(err)
	}
	uid, uidErr := strconv.Atoi(account.Uid)
	gid, gidErr := strconv.Atoi(account.Gid)
	if err := errors.Join(uidErr, gidErr); err != nil || uid == 0 || gid == 0 {
		t.Fatalf("user %+v, %v", account, err)
	}
	const trainer = 1000
	for _, path := range []string{metricsSocket, collectorSocket} {
		if err := connectAs(t, trainer, trainer, path); !errors.Is(err, unix.EACCES) {
			t.Errorf("a user outside the group connects to %s: %v", path, err)
		}
		if err := connectAs(t, trainer, gid, path); err != nil {
			t.Errorf("a user of the group connects to %s: %v", path, err)
		}
	}
	if info, err := os.Stat(metricsSocket); err != nil || info.Mode() != fs.ModeSocket|0o660 ||
		int(info.Sys().(*syscall.Stat_t).Uid) != uid {
		t.Errorf("%s: %v, %v", metricsSocket, info, err)
	}

	pid := strings.TrimSpace(inside.Command(t, "systemctl", "show", "--value", "--property=MainPID", exporterService))
	status := read(t, filepath.Join("/proc", pid, "status"))
	for _, line := range []string{
		fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d", uid), fmt.Sprintf("Gid:\t%d\t%[1]d\t%[1]d\t%[1]d", gid),
		"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1",
		"Seccomp:\t2",
	} {
		if !strings.Contains(status, line+"\n") {
			t.Errorf("the exporter has no %q:\n%s", line, status)
		}
	}
	// The exposure level of systemd-analyze, times ten; 100 is a unit without any restriction.
	for unit, limit := range map[string]string{exporterService: "15", "peerlane-exporter-collector@x.service": "25"} {
		out, err := exec.Command("systemd-analyze", "security", "--no-pager", "--threshold="+limit, unit).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", unit, err, out)
		} else {
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			t.Log(lines[len(lines)-1])
		}
	}
}
