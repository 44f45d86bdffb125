//go:build vm

package units_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/integration/vm/inside"
)

// nullSocket starts a unit that only sends a line, as peerlane-relay.socket starts a relay's unit.
const (
	nullAddress = "/run/null.sock"
	nullSocket  = "[Socket]\nListenSequentialPacket=" + nullAddress + "\nAccept=yes\nTriggerLimitIntervalSec=0\n"
	nullService = "[Unit]\nCollectMode=inactive-or-failed\nStartLimitIntervalSec=0\n[Service]\nExecStart=/bin/busybox " +
		"echo here\nStandardInput=socket\nStandardOutput=socket\n"
)

// BenchmarkLauncher measures the wait of a hook: for a unit of systemd that sends a line, for a
// relay started by systemd, and for a relay started by fork, in turn.
func BenchmarkLauncher(b *testing.B) {
	o := newOperator(b, asItIs)
	for name, text := range map[string]string{"null.socket": nullSocket, "null@.service": nullService} {
		if err := os.WriteFile(filepath.Join(units, name), []byte(text), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	reload(b)
	inside.Command(b, "systemctl", "start", "null.socket")
	b.Cleanup(func() {
		if out, err := exec.Command("systemctl", "stop", "null.socket").CombinedOutput(); err != nil {
			b.Errorf("%v: %s", err, out)
		}
		for _, name := range []string{"null.socket", "null@.service"} {
			if err := os.Remove(filepath.Join(units, name)); err != nil {
				b.Error(err)
			}
		}
	})
	gpu, err := o.Plan.GPU(o.Plan.Lanes[0].GPU)
	if err != nil {
		b.Fatal(err)
	}
	lanes, err := lanes.Find(o.Plan, []string{gpu.UUID + "@" + gpu.BusID})
	if err != nil {
		b.Fatal(err)
	}
	relay := func(launcher string) func() (time.Duration, error) {
		c := o.Config
		c.Relay.Launcher = launcher
		return func() (time.Duration, error) {
			init := exec.Command("sleep", "1000")
			if err := init.Start(); err != nil {
				return 0, err
			}
			began := time.Now()
			_, err := hook.Launch(o.Layout, hook.Request{
				Container: generation.Container{ID: launcher,
					PID: init.Process.Pid}, Lanes: lanes, Config: c, HookBinary: o.HookBinary(),
			})
			took := time.Since(began)
			_ = init.Process.Kill() // may still run
			_ = init.Wait()         // killed
			o.nothingIsLeft()
			return took, err
		}
	}
	kinds := []struct {
		name string
		once func() (time.Duration, error)
	}{{"null-unit", null}, {"systemd", relay(config.LauncherSystemd)}, {"fork", relay(config.LauncherFork)}}
	times := map[string][]time.Duration{}
	for b.Loop() {
		for _, k := range kinds {
			took, err := k.once()
			if err != nil {
				b.Fatalf("%s: %v", k.name, err)
			}
			times[k.name] = append(times[k.name], took)
		}
	}
	median := func(name string) float64 {
		slices.Sort(times[name])
		return times[name][len(times[name])/2].Seconds() * 1000
	}
	for _, k := range kinds {
		b.ReportMetric(median(k.name), k.name+"-ms")
	}
	b.ReportMetric(median("systemd")/median("null-unit"), "systemd/null-unit")
	b.ReportMetric(median("systemd")/median("fork"), "systemd/fork")
}

// null returns the wait for the line of the null unit.
func null() (time.Duration, error) {
	began := time.Now()
	conn, err := net.Dial("unixpacket", nullAddress)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(began.Add(time.Minute)); err != nil {
		return 0, err
	}
	word := make([]byte, 10)
	n, err := conn.Read(word)
	if err != nil || string(word[:n]) != "here\n" {
		return 0, fmt.Errorf("the null unit says %q, %v", word[:n], err)
	}
	took := time.Since(began)
	_, err = conn.Read(word)
	if err == io.EOF {
		err = nil
	}
	return took, err
}
