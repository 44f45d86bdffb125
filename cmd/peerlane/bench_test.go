package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

// aBench is a saved result with a row of each kind, a row without a baseline, and a failed
// measurement.
const aBench = `{
  "version": 1, "date": "2026-11-22T12:00:00Z", "release": "v1", "command": ["peerlane", "bench", "--quick"],
  "host": "a host", "gpus": ["NVIDIA H200", "NVIDIA H200"], "driver": 13000, "simulated": false,
  "rows": [
    {"table": "copy", "what": "client to slot", "size": 4194304, "depth": 16, "value": 310, "unit": "GB/s", "baseline": "raw 4.0 MiB", "asked": {"min": 0.98}},
    {"table": "latency", "what": "rings, to and fro, both sides busy", "size": 8, "depth": 1, "value": 0.5, "unit": "µs",
      "times": {"count": 9, "p50": 0.5, "p90": 0.6, "p99": 0.7, "p999": 6.7, "max": 8}, "asked": {"max": 1}},
    {"table": "busy", "what": "client to slot, p99 of idle", "size": 8, "depth": 1, "state": "SMs held: client GPU", "value": 27, "unit": "µs",
      "baseline": "a relay's copy, p99, 8 B, client to slot, idle", "asked": {"max": 2}},
    {"table": "memory", "what": "of a server GPU, besides staging", "state": "GPU 1", "value": 0, "unit": "MiB", "asked": {"max": 0}},
    {"table": "bounce", "what": "container A to container B", "route": "staged", "transport": "verbs", "size": 65536, "depth": 16, "value": 7.5, "unit": "GB/s"}
  ],
  "baselines": [
    {"name": "raw 4.0 MiB", "value": 320, "unit": "GB/s"},
    {"name": "a relay's copy, p99, 8 B, client to slot, idle", "value": 9, "unit": "µs"}
  ],
  "missing": [{"table": "cpu", "what": "idle", "why": "/proc is not there"}]
}`

func TestBenchOutputShowsRowsAndVerdicts(t *testing.T) {
	file := filepath.Join(t.TempDir(), "result.json")
	if err := os.WriteFile(file, []byte(aBench), 0o644); err != nil {
		t.Fatal(err)
	}
	golden(t, "bench.txt", peerlane(t, "bench", "--input", file))
	simulated := strings.Replace(aBench, `"simulated": false`, `"simulated": true`, 1)
	if err := os.WriteFile(file, []byte(simulated), 0o644); err != nil {
		t.Fatal(err)
	}
	text := peerlane(t, "bench", "--input", file)
	for _, no := range []string{"fall short", "  yes ", "  no "} {
		if strings.Contains(text, no) {
			t.Errorf("a simulated result says %q:\n%s", no, text)
		}
	}
	// The bench of another host may have written the file: its text is untrusted.
	hostile := strings.NewReplacer(`"a host"`, `"a \u001b[2Jhost"`, `"rings, to`, `"\u001b[31mrings, to`).Replace(aBench)
	if err := os.WriteFile(file, []byte(hostile), 0o644); err != nil {
		t.Fatal(err)
	}
	if text := peerlane(t, "bench", "--input", file); strings.Contains(text, "\x1b") {
		t.Errorf("output contains terminal control characters: %q", text)
	}
	// Without the baseline of a ratio, the command fails and prints no row.
	lacking := strings.Replace(aBench, `{"name": "raw 4.0 MiB"`, `{"name": "raw 1.0 MiB"`, 1)
	if err := os.WriteFile(file, []byte(lacking), 0o644); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"bench", "--input", file}, &out, &errOut); code == 0 || out.Len() > 0 ||
		!strings.Contains(errOut.String(), "did not measure") {
		t.Errorf("exit status %d, printed %q and %q", code, out.String(), errOut.String())
	}
}

func TestBenchInvalidCommandLineIsRefused(t *testing.T) {
	for _, arguments := range [][]string{
		{"--table", "copies"}, {"--busy", "nobody"}, {"--sizes", "large"}, {"--gpus", "some"}, {"--pace", "0"},
		{"--listen", "--connect", "host"}, {"--connect", ""}, {"--connect", "host", "--table", "copy"}, {"--connect", "host",
			"--transport", "pigeon"},
		{"--listen", "--sizes", "8"}, {"--listen", "1.2.3.4", "5.6.7.8"}, {"--listen=1.2.3.4",
			"5.6.7.8"}, {"1.2.3.4"}, {"--transport", "tcp"}, {"--connect", "host", "--input", "result.json"},
	} {
		var out, errOut bytes.Buffer
		if code := run(append([]string{"bench"}, arguments...), &out, &errOut); code != exitUsage {
			t.Errorf("bench %q: exit status %d: %s", arguments, code, errOut.String())
		}
	}
	root := t.TempDir()
	for _, arguments := range [][]string{{"--listen"}, {"--listen", "127.0.0.1"}, {"--connect", "127.0.0.1"}} {
		var out, errOut bytes.Buffer
		if code := run(append([]string{"bench", "--root", root}, arguments...), &out, &errOut); code != exitFailure ||
			!strings.Contains(errOut.String(), root) || !strings.Contains(errOut.String(), string(fault.NoClusterKey)) {
			t.Errorf("bench %q without a key: exit status %d: %s", arguments, code, errOut.String())
		}
	}
	if err := os.MkdirAll(filepath.Join(root, "etc/peerlane"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "etc/peerlane/config.toml"), []byte("[network]\nlisten = \"off\"\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"bench", "--root", root, "--listen"}, &out, &errOut); code != exitFailure ||
		!strings.Contains(errOut.String(), string(fault.NoNetwork)) {
		t.Errorf("on a host that is on no network: exit status %d: %s", code, errOut.String())
	}
}

// The relays of a bench have no container, and so no annotation.
func TestBenchNetworkTenantAnnotationIsCleared(t *testing.T) {
	l := paths.New(t.TempDir())
	if err := os.MkdirAll(filepath.Dir(l.ConfigFile()), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.ConfigFile(),
		[]byte("[network]\ntenant_annotation = \"example.com/tenant\"\nports = \"7000-7010\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	a := &app{log: logrus.New(), layout: l}
	c, err := a.onNetwork()
	if err != nil || c.Network.TenantAnnotation != "" || c.Network.Ports != "7000-7010" ||
		c.Network.Key != l.ClusterKey() {
		t.Errorf("%v: %+v", err, c.Network)
	}
}
