package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

func testedPair(server int, verdict, reason string) launch.Pair {
	return launch.Pair{
		PairName: launch.PairName{GPU: launch.GPU{BusID: "0000:17:00.0", Index: 3},
			Server: launch.GPU{BusID: "0000:18:00.0", Index: server}},
		Verdict: verdict, Reason: reason, Reader: "passed", Bytes: 28 << 20, Milliseconds: 1250,
		Push: launch.PairRate{Client: 395.04, Server: 393, Bounce: 55.2}, Pull: launch.PairRate{Client: 394, Server: 390,
			Bounce: 54},
		Chunk: 8 << 20, Depth: 4, Streams: 2,
	}
}

func TestSelfTestTableShowsVerdicts(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: terminal.New(&out)}
	untried := testedPair(1, launch.VerdictGood, "")
	untried.Reader = "not tried: no PTX here"
	nothing := launch.Pair{PairName: testedPair(5, "", "").PairName, Verdict: launch.VerdictUntested,
		Reason: "out of memory\x1b[2J"}
	a.printSelfTest(selfTestReport{
		PairHost: launch.PairHost{Driver: 13000, Simulated: true}, Host: "a host", Kept: true,
		Pairs: []launch.Pair{testedPair(0, launch.VerdictGood, ""), untried, testedPair(4, launch.VerdictSlow, "3.0 GB/s"),
			nothing},
	})
	for _, want := range []string{
		`CUDA driver 13000`, `simulated: the figures say nothing`,
		`(?m)^GPU +SERVER +VERDICT +CHECKED +KERNEL +OUT GB/S +IN +BOUNCE OUT +IN +BY SERVER OUT +IN +CHOSEN +SECONDS +REASON$`,
		`(?m)^  3 +0 +good +28 MiB +passed +395\.0 +394\.0 +55\.2 +54\.0 +393\.0 +390\.0 +8\.0 MiB × 4 by 2 +1\.[23] +-$`,
		`3 +1 +good .* not tried .*kernel not tried: no PTX here`, `3 +4 +slow .* 3\.0 GB/s`,
		`3 +5 +untested +0 B +- +- .*out of memory.\[2J`, `until the next boot`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Error("the text of a tester is not sanitised")
	}
}

func TestSelfTestExitStatusFollowsVerdicts(t *testing.T) {
	good, slow := testedPair(0, launch.VerdictGood, ""), testedPair(1, launch.VerdictSlow, "x")
	wrong, untested := testedPair(2, launch.VerdictWrong, "x"), testedPair(3, launch.VerdictUntested, "x")
	for _, c := range []struct {
		pairs []launch.Pair
		code  int
		cause error
		count string
	}{
		{[]launch.Pair{good, good}, 0, nil, ""},
		{[]launch.Pair{good, slow}, exitPairs, errUnfit, "1 of 2 pairs of GPUs"},
		{[]launch.Pair{wrong, slow, untested}, exitPairs, errUnfit, "2 of 3 pairs of GPUs"},
		{[]launch.Pair{good, untested}, exitFailure, errUntested, "1 of 2 pairs of GPUs"},
	} {
		err := verdictError(c.pairs)
		code := 0
		if finding := (findingError{}); errors.As(err, &finding) {
			code = finding.code
		} else if err != nil {
			code = exitFailure
		}
		f, _ := errors.AsType[*fault.Error](err)
		if finding := (findingError{}); errors.As(err, &finding) {
			f, _ = errors.AsType[*fault.Error](finding.error)
		}
		if code != c.code || (f == nil) != (c.cause == nil) || f != nil && (f.Cause != c.cause || f.Object != c.count) {
			t.Errorf("%d, %v; want %d, %s: %v", code, err, c.code, c.count, c.cause)
		}
	}
}

func TestSelfTestInvalidCommandLineIsRefused(t *testing.T) {
	for _, c := range []struct {
		arguments []string
		code      int
		want      string
	}{
		{[]string{"--gpus", "some"}, exitUsage, "--gpus some is neither real nor simulated"},
		{[]string{"trainer"}, exitUsage, "takes no arguments"},
		// The directory of the test binary has no hook.
		{[]string{"--sysfs", t.TempDir(), "--hook", "/nonexistent"}, exitFailure, ""},
	} {
		var out, errOut bytes.Buffer
		code := run(append([]string{"self-test", "--root", t.TempDir()}, c.arguments...), &out, &errOut)
		if code != c.code || !strings.Contains(errOut.String(), c.want) || out.Len() != 0 {
			t.Errorf("%v: exit status %d, %s%s", c.arguments, code, out.String(), errOut.String())
		}
	}
}

func TestPairWordsShowVerdictAndRates(t *testing.T) {
	for want, pair := range map[string]launch.Pair{
		"GPU 3 with server 0: good; out 395.0, in 394.0 GB/s (bounce 55.2, 54.0); pieces of 8.0 MiB × 4 by 2 " +
			"streams": testedPair(0, launch.VerdictGood, ""),
		"GPU 3 with server 0: untested: not tested yet": {
			PairName: testedPair(0, "", "").PairName, Verdict: launch.VerdictUntested, Reason: "not tested yet"},
	} {
		if got := pairWords(pair); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, c := range map[string]launch.Config{
		"issued by the client's GPU, chunk by slots and slot_size, depth by slots and slot_size, streams by slots and " +
			"slot_size": {},
		"issued by the client's GPU, chunk 4.0 MiB by relay.chunk, depth by the pair's calibration, streams 3 by " +
			"relay.streams": {Calibrated: true, Chunk: 4 << 20, Streams: 3},
	} {
		if got := tuningWords(c); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The report does not claim to keep a result that could not be recorded.
func TestSelfTestUnwritableRecordIsReported(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "var"), nil, 0o600); err != nil { // a file in place of a directory
		t.Fatal(err)
	}
	c := config.Default()
	c.Relay.Binary = self
	tester, err := selftest.NewTester(paths.New(root), c, self)
	if err != nil {
		t.Fatal(err)
	}
	a := &app{out: terminal.New(&bytes.Buffer{}), errOut: terminal.New(&bytes.Buffer{})}
	report, err := a.selfTest(t.Context(), &selfTested{tester: tester, kept: true},
		[]launch.PairName{testedPair(0, "", "").PairName}, false)
	if err == nil || report.Kept {
		t.Errorf("kept is %v, with %v", report.Kept, err)
	}
}
