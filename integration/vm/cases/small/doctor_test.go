//go:build vm

package small_test

import (
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/integration/vm/inside"
)

// found returns the findings of peerlane doctor on this kernel, by check.
func found(t *testing.T, root string, more ...string) map[string][]doctor.Finding {
	t.Helper()
	out, err := exec.Command(filepath.Join(inside.Binaries, "peerlane"),
		append([]string{"doctor", "-o", "json", "--interval", "10ms", "--root", root}, more...)...).Output()
	var status *exec.ExitError
	// exit status 5 to 7 encodes the worst finding
	if err != nil && (!errors.As(err, &status) || status.ExitCode() < 5) {
		t.Fatalf("peerlane doctor: %v", err)
	}
	var report struct{ Findings []doctor.Finding }
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatal(err)
	}
	by := map[string][]doctor.Finding{}
	for _, f := range report.Findings {
		by[f.Check] = append(by[f.Check], f)
	}
	return by
}

// On a real kernel's files correct settings give no finding. Wrong settings give findings, and the
// printed remedy corrects the settings.
func TestDoctorOnKernelFindsWrongSettings(t *testing.T) {
	twoNICs(t, inside.RoCE)
	root := t.TempDir()
	testbed.UnmountAnchor(t, paths.New(root))
	inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "cdi", "generate", "--root", root, "--spec-dir",
		filepath.Join(root, "etc/cdi"))
	by := found(t, root)
	for _, check := range []string{"pcie-link", "acs", "iommu", "port-state", "port-physical", "port-rate", "link-layer",
		"subnet-manager", "configuration", "relays", "leftovers", "cpu-governor"} {
		if w := doctor.Worst(by[check]); len(by[check]) == 0 || w != doctor.OK {
			t.Errorf("%s is %v: %+v", check, w, by[check])
		}
	}
	for _, check := range []string{"driver", "xid", "specification", "error-counters"} {
		t.Logf("%s: %+v", check, by[check])
	}

	const port = "0000:17:00.0"
	original := strings.TrimSpace(inside.Command(t, "setpci", "-s", port, "ECAP_ACS+6.W"))
	inside.Command(t, "setpci", "-s", port, "ECAP_ACS+6.W=001d")
	inside.Command(t, "ethtool", "-s", "rail1", "speed", "200000", "duplex", "full")
	t.Cleanup(func() { // for later tests
		for _, c := range []*exec.Cmd{exec.Command("setpci", "-s", port, "ECAP_ACS+6.W="+original),
			exec.Command("ethtool", "-s", "rail1", "speed", "400000", "duplex", "full")} {
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%v: %v: %s", c, err, out)
			}
		}
	})
	inside.Plug(t, "rail0", false)
	inside.Eventually(t, "mlx5_0 is DOWN", func() (bool, string) {
		got := inside.Port(t, "mlx5_0", "state")
		return strings.HasSuffix(got, "DOWN"), got
	})
	by = found(t, root)
	for check, want := range map[string]string{"acs": "setpci -s " + port + " ECAP_ACS+6.w=0:2c",
		"port-state": "it is DOWN", "port-physical": "", "specification": ""} {
		if text, err := json.Marshal(by[check]); err != nil || doctor.Worst(by[check]) < doctor.Warning ||
			!strings.Contains(string(text), want) {
			t.Errorf("%s does not say %q: %s, %v", check, want, text, err)
		}
	}
	// The remedy keeps the other bits. A caution precedes the commands.
	_, commands, _ := strings.Cut(by["acs"][0].Remedy, "apart: ")
	commands, _, _ = strings.Cut(commands, "; for each start")
	for _, command := range strings.Split(commands, "; ") {
		args := strings.Fields(command)
		inside.Command(t, args[0], args[1:]...)
	}
	if got := strings.TrimSpace(inside.Command(t, "setpci", "-s", port, "ECAP_ACS+6.W")); got != "0011" {
		t.Errorf("ACS at %s after the remedy: %s", port, got)
	}
	inside.Plug(t, "rail0", true)
	inside.Eventually(t, "mlx5_0 is ACTIVE", func() (bool, string) {
		got := inside.Port(t, "mlx5_0", "state")
		return strings.HasSuffix(got, "ACTIVE"), got
	})
	by = found(t, root)
	for _, check := range []string{"acs", "port-state", "port-physical"} {
		if w := doctor.Worst(by[check]); w != doctor.OK {
			t.Errorf("%s is %v: %+v", check, w, by[check])
		}
	}
	if text, err := json.Marshal(by["port-rate"]); err != nil ||
		!strings.Contains(string(text), "its rate is 200 Gb/s, and that of mlx5_0") {
		t.Errorf("port-rate: %s, %v", text, err)
	}
}
