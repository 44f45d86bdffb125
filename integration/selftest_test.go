package integration_test

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
)

// The installed command tests every pair that the lanes of a host can stage on, including spares,
// and leaves no files.
func TestSelfTestCoversEveryPair(t *testing.T) {
	temporary := t.TempDir()
	cmd := exec.Command(filepath.Join(binaries, "peerlane"), "self-test", "--gpus", "simulated", "-o", "json")
	cmd.Env = append(cmd.Environ(), "TMPDIR="+temporary)
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	var report struct {
		launch.PairHost
		Kept  bool
		Pairs []launch.Pair
	}
	if err := json.Unmarshal(text, &report); err != nil {
		t.Fatal(err)
	}
	if !report.Simulated || report.Kept || len(report.Pairs) != 16 {
		t.Errorf("the report has simulated %v, kept %v, %d pairs", report.Simulated, report.Kept, len(report.Pairs))
	}
	for _, p := range report.Pairs {
		if p.Verdict != launch.VerdictGood || p.Reader != "passed" || p.Bytes == 0 || p.Push.Client == 0 ||
			p.Pull.Bounce == 0 || p.Milliseconds == 0 {
			t.Errorf("%v: %s %s, kernel %s, %d bytes, %+v, %+v", p.PairName, p.Verdict, p.Reason, p.Reader, p.Bytes, p.Push,
				p.Pull)
		}
	}
	if left, err := filepath.Glob(filepath.Join(temporary, "*")); err != nil || len(left) > 0 {
		t.Errorf("remaining: %v, %v", left, err)
	}
}
