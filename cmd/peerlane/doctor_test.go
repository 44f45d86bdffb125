package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/cmd/terminal"
)

// examined runs `peerlane doctor` on the recorded host with an empty root.
func examined(t *testing.T, code int, args ...string) (out, errOut string) {
	t.Helper()
	_, host := recordedHost(t)
	root := t.TempDir()
	var o, e bytes.Buffer
	args = slices.Concat([]string{"doctor", "--root", root, "--host-root", root, "--interval", "10ms"}, host, args)
	if got := run(args, &o, &e); got != code {
		t.Fatalf("peerlane %s: exit status %d, want %d: %s", strings.Join(args, " "), got, code, e.String())
	}
	return o.String(), e.String()
}

func TestDoctorsJSONIsThatOfTheSchema(t *testing.T) {
	text, err := os.ReadFile("../../docs/doctor.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var s struct {
		Properties struct {
			Findings struct {
				Items struct {
					Required   []string
					Properties map[string]any
				}
			}
		}
	}
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	out, errOut := examined(t, exitDoctorFailure, "-o", "json")
	if !strings.Contains(errOut, "failures: ") {
		t.Errorf("standard error: %q", errOut)
	}
	var report doctorReport
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if report.Version != 1 || report.Worst != doctor.Failure || report.For != nil {
		t.Errorf("version %d, worst %v, for %v", report.Version, report.Worst, report.For)
	}
	var raw struct{ Findings []map[string]any }
	if err := json.Unmarshal([]byte(out), &raw); err != nil {
		t.Fatal(err)
	}
	checks := map[string]bool{}
	items := s.Properties.Findings.Items
	for _, f := range raw.Findings {
		checks[f["check"].(string)] = true
		for _, name := range items.Required {
			if _, ok := f[name]; !ok {
				t.Errorf("a finding without %q: %v", name, f)
			}
		}
		for name := range f {
			if _, known := items.Properties[name]; !known {
				t.Errorf("the schema does not know %q", name)
			}
		}
	}
	for _, c := range doctor.All() {
		if !checks[c.Name] {
			t.Errorf("no finding about %s", c.Name)
		}
	}
}

func TestDoctorForOneLaneShowsItsFindings(t *testing.T) {
	for _, name := range []string{"gpu3", "GPU-e1b60f38-5a7d-4c92-a4e3-16c8d7f9e403"} {
		out, _ := examined(t, exitDoctorFailure, "-o", "json", "--for", name)
		var report doctorReport
		if err := json.Unmarshal([]byte(out), &report); err != nil {
			t.Fatal(err)
		}
		if report.For == nil || *report.For != 3 {
			t.Fatalf("--for %s is about %v", name, report.For)
		}
		for _, f := range report.Findings {
			if f.Lanes != nil && !slices.Contains(f.Lanes, 3) {
				t.Errorf("--for %s: %+v", name, f)
			}
		}
	}
	if _, errOut := examined(t, exitFailure, "--for", "gpu17"); !strings.Contains(errOut, `no GPU "17"`) {
		t.Errorf("a GPU that there is not: %q", errOut)
	}
	if _, errOut := examined(t, exitUsage, "--selftest"); !strings.Contains(errOut, "omit it with the files of "+
		"another host") {
		t.Errorf("a self-test of a recorded host: %q", errOut)
	}
	examined(t, exitUsage, "--interval", "1ns")
}

// Reasons and remedies follow the table, worst finding first, with sanitised text.
func TestDoctorTableListsWorstFirst(t *testing.T) {
	var printed bytes.Buffer
	a := &app{out: terminal.New(&printed)}
	a.printDoctor(doctorReport{Findings: []doctor.Finding{
		{Check: "fine", On: "host", Found: "all is well"},
		{Check: "slow", Status: doctor.Warning, On: "mlx5_0", Found: "half", LookedAt: "rate", Why: "it is slow",
			Remedy: "a cable", Lanes: []int{0, 1}},
		{Check: "broken", Status: doctor.Failure, On: "x\x1b[2J", Found: "no", LookedAt: "state", Why: "it fails",
			Remedy: "mend it"},
	}})
	out := printed.String()
	if strings.Contains(out, "\x1b") {
		t.Errorf("an escape reaches the terminal: %q", out)
	}
	failure, warning := strings.Index(out, "FAILURE broken"), strings.Index(out, "WARNING slow, mlx5_0: half")
	if failure < 0 || warning < failure || strings.Contains(out, "OK fine") {
		t.Errorf("findings are missing or not ordered worst first:\n%s", out)
	}
	for _, want := range []string{"why:       it is slow", "remedy:    a cable", "lanes:     0, 1", "lanes:     all",
		"looked at: state"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestDoctorExitStatusFollowsWorstFinding(t *testing.T) {
	for status, code := range map[doctor.Status]int{doctor.Unknown: exitDoctorUnknown, doctor.Warning: exitDoctorWarning,
		doctor.Failure: exitDoctorFailure} {
		err, ok := diagnosis(doctorReport{Worst: status}).(findingError)
		if !ok || err.code != code {
			t.Errorf("%v gives %v", status, err)
		}
	}
	if err := diagnosis(doctorReport{}); err != nil {
		t.Errorf("ok gives %v", err)
	}
}

// The check "configuration" reports a wrong key once, and other checks refer to it. Checks of
// absent devices are n/a.
func TestDoctorReportsAWrongKeyOnce(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("[relay]\nslot_sice = \"1MiB\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	sysfs, proc := filepath.Join(root, "sys"), filepath.Join(root, "proc")
	for _, dir := range []string{sysfs, proc} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"doctor", "--root", root, "--sysfs", sysfs, "--proc", proc}, &out,
		&errOut); code != exitDoctorFailure {
		t.Errorf("exit status %d: %s", code, errOut.String())
	}
	table, details, _ := strings.Cut(out.String(), "\n\n")
	for _, part := range []string{table, details} {
		if n := strings.Count(part, "unknown key relay.slot_sice; did you mean relay.slot_size?"); n != 1 {
			t.Errorf("the wrong key is reported %d times:\n%s", n, part)
		}
	}
	for _, want := range []string{`(?m)^n/a +port-physical +host +there is no RDMA device`,
		`(?m)^n/a +mig +host +there is no NVIDIA GPU`, `(?m)^could not tell +staging +host +the configuration cannot be read: see the check configuration`} {
		if !regexp.MustCompile(want).MatchString(table) {
			t.Errorf("no row %q:\n%s", want, table)
		}
	}
}
