package hook_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// spare is the index of a GPU whose pairs are good.
const spare = 101

// testerMain is a self-test with the result that TEST_FAULT demands. It reports the job to
// TEST_DIR.
func testerMain(fault func(string) bool) {
	var job launch.PairJob
	if err := json.NewDecoder(os.Stdin).Decode(&job); err != nil {
		fatal(err)
	}
	report("job", job)
	switch {
	case fault("no driver"):
		fmt.Fprintln(os.Stderr, "CUDA library libcuda.so.1 cannot be loaded")
		os.Exit(1)
	case fault("babbles"):
		for {
			fmt.Println(strings.Repeat("x", 1000))
		}
	case fault("hangs"):
		time.Sleep(time.Hour)
	}
	lines := json.NewEncoder(os.Stdout)
	emit := func(value any) {
		if err := lines.Encode(value); err != nil {
			fatal(err)
		}
	}
	emit(launch.PairHost{Driver: 13000})
	for i, name := range job.Pairs {
		p := launch.Pair{
			PairName: name,
			Verdict:  launch.VerdictGood,
			Bytes:    1 << 20,
			Chunk:    4 << 20,
			Depth:    4,
			Streams:  2,
		}
		switch {
		case fault("wrong first") && i == 0 && name.Server.Index != spare:
			p.Verdict, p.Reason, p.Chunk = launch.VerdictWrong, "1 byte arrived wrong", 0
		case fault("untested"):
			p.Verdict, p.Reason = launch.VerdictUntested, "out of memory"
		case fault("slowly"):
			time.Sleep(500 * time.Millisecond)
		case fault("one at a time") && i == 1, fault("about others") && i == 1:
			if fault("about others") {
				p.Server.BusID = "0000:ff:00.0"
				emit(p)
			}
			os.Exit(1)
		}
		emit(p)
	}
	os.Exit(0)
}

// configured waits for a configuration with finished tests that satisfies enough.
func (h host) configured(t *testing.T, enough func(launch.Config) bool) (found launch.Config) {
	t.Helper()
	testutil.Succeeds(t, "the relay hears what was found", func() error {
		all := reports[launch.Config](t, h.dir, "config")
		for _, c := range all {
			if !c.Testing && enough(c) {
				found = c
				return nil
			}
		}
		return fmt.Errorf("the configurations of the relays are %+v", all)
	})
	return found
}

func (h host) log(t *testing.T, id string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(id), "relay.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// tested returns a request with a self-test of the pairs of the relay.
func (h host) tested(id string, pid int, mode, faults string, lanes ...launch.Lane) hook.Request {
	if len(lanes) == 0 {
		lanes = []launch.Lane{lane(3)}
	}
	r := h.request(id, pid, faults, lanes...)
	r.Config.Relay.SelfTest = mode
	return r
}

func (h host) start(t *testing.T, r hook.Request) *generation.Generation {
	t.Helper()
	g, err := hook.Launch(h.layout, r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func (h host) jobs(t *testing.T) []launch.PairJob {
	t.Helper()
	return reports[launch.PairJob](t, h.dir, "job")
}

// module replaces the version of the loaded driver module.
func module(t *testing.T, version string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "version")
	if err := os.WriteFile(file, []byte(version+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	before := selftest.ModuleVersion
	selftest.ModuleVersion = file
	t.Cleanup(func() { selftest.ModuleVersion = before })
}

// The first container of a boot has the pairs tested while the relay starts. The second container
// uses the results.
func TestPairsAreTestedOnceABoot(t *testing.T) {
	h := newHost(t)
	l := lane(3)
	l.Spares = []launch.Spare{{GPU: lane(spare).GPU, NICs: []string{"mlx5_1"}}}
	for i := range 2 {
		c := startProcess(t)
		g := h.start(t, h.tested(fmt.Sprintf("c%d", i), c.Process.Pid, launch.SelfTestOnce, "wrong first", l))
		got := h.configured(t, func(c launch.Config) bool { return c.Generation == g.ID && len(c.Pairs) == 2 })
		if got.SelfTest != launch.SelfTestOnce || !got.Calibrated {
			t.Errorf("the configuration is %+v", got)
		}
		if p := launch.FindPair(got.Pairs, launch.PairName{GPU: l.GPU, Server: l.Servers[0]}); p == nil ||
			p.Verdict != launch.VerdictWrong ||
			p.Reason != "1 byte arrived wrong" {
			t.Errorf("the pair with the server is %+v", p)
		}
		if p := launch.FindPair(got.Pairs, launch.PairName{GPU: l.GPU, Server: l.Spares[0].GPU}); p == nil ||
			p.Verdict != launch.VerdictGood ||
			p.Streams != 2 {
			t.Errorf("the pair with the spare is %+v", p)
		}
		// A spare is a separate job, so that another container does not wait for the spare.
		if jobs := h.jobs(t); len(jobs) != 2 || len(jobs[0].Pairs) != 1 || len(jobs[1].Pairs) != 1 ||
			jobs[0].SlotBytes != 32<<20 {
			t.Errorf("after %d starts the jobs are %+v", i+1, jobs)
		}
		log := h.log(t, g.ID)
		if verdict := strings.Contains(log, "is unfit: 1 byte arrived wrong"); verdict != (i == 0) {
			t.Errorf("the log of start %d says %s", i, log)
		}
		end(c)
	}
	h.gone(t)
	info, err := os.Stat(h.layout.SelfTestFile())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the record: %v, %v", info, err)
	}
}

// Spares are tested in separate jobs: the servers of another container wait for at most a single
// spare.
func TestSparesAreTestedOneByOne(t *testing.T) {
	h := newHost(t)
	l := lane(3)
	for i := range 3 {
		l.Spares = append(l.Spares, launch.Spare{GPU: lane(spare + i).GPU, NICs: []string{"mlx5_1"}})
	}
	h.start(t, h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, "", l))
	h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 4 })
	jobs := h.jobs(t)
	if len(jobs) != 4 {
		t.Fatalf("the jobs are %+v", jobs)
	}
	for _, j := range jobs {
		if len(j.Pairs) != 1 {
			t.Errorf("a job has %v", j.Pairs)
		}
	}
}

// A relay receives the bad verdict of a pair of a GPU of a lane and a GPU of another container. A
// relay receives no verdict of unrelated GPUs.
func TestBadVerdictOfOtherContainerReachesRelay(t *testing.T) {
	h := newHost(t)
	other, strangers := launch.PairName{
		GPU:    lane(7).GPU,
		Server: lane(3).GPU,
	}, launch.PairName{
		GPU:    lane(7).GPU,
		Server: lane(8).GPU,
	}
	for _, n := range []launch.PairName{other, strangers} {
		if verdict, err := verdicts(t, h.tester(t, "wrong first"), false, []launch.PairName{n}); err != nil ||
			verdict != "7 wrong" {
			t.Fatalf("%s, %v", verdict, err)
		}
	}
	r := h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, "")
	r.Config.Relay.Environment = h.request("", 0, "wrong first").Config.Relay.Environment
	g := h.start(t, r)
	got := h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 2 })
	if launch.FindPair(got.Pairs, other) == nil {
		t.Errorf("the pairs of the configuration are %v", got.Pairs)
	}
	inspected, err := control.Inspect(h.layout, g.ID)
	if err != nil || len(inspected.Pairs) != 2 ||
		inspected.Pairs[1].PairName != launch.FindPair(got.Pairs, other).PairName {
		t.Errorf("inspect tells of %v, %v", inspected.Pairs, err)
	}
}

// The relay starts during the self-test. The first configuration makes the relay wait before
// staging.
func TestRelayStartsDuringSelfTest(t *testing.T) {
	h := newHost(t)
	g := h.start(t, h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, "slowly"))
	if _, err := h.ask(g.ID); err != nil {
		t.Fatal(err)
	}
	h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 1 })
	first := reports[launch.Config](t, h.dir, "config")[0]
	if !first.Testing || len(first.Pairs) != 0 {
		t.Errorf("the first configuration is %+v", first)
	}
}

// A failed test stops no container, and is logged.
func TestFailedTesterStopsNoContainer(t *testing.T) {
	for _, c := range []struct {
		fault, reason string
	}{
		{"untested", "out of memory"},
		{"no driver", "the self-test failed: exit status 1: CUDA library libcuda.so.1 cannot be loaded"},
		{"babbles", "line 1 of the self-test: invalid character 'x'"},
	} {
		t.Run(c.fault, func(t *testing.T) {
			h := newHost(t)
			g := h.start(t, h.tested("c", startProcess(t).Process.Pid, launch.SelfTestRequired, c.fault))
			got := h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 1 })
			if p := got.Pairs[0]; p.Verdict != launch.VerdictUntested || !strings.Contains(p.Reason, c.reason) {
				t.Errorf("verdict %s: %s", p.Verdict, p.Reason)
			}
			if log := h.log(t, g.ID); !strings.Contains(log, "are not tested: ") {
				t.Errorf("the log says %s", log)
			}
			if _, err := h.ask(g.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

// The end of a container, and stop and drain of a relay, end the tester. By then the tester holds
// no GPU.
func TestTesterEndsWithItsContainer(t *testing.T) {
	for name, stop := range map[string]func(t *testing.T, h host, g *generation.Generation){
		"ends": nil,
		"stopped": func(t *testing.T, h host, g *generation.Generation) {
			if err := control.Stop(h.layout, g.ID); err != nil {
				t.Fatal(err)
			}
			h.state(t, g.ID, generation.StateStopped)
		},
		"drained": func(t *testing.T, h host, g *generation.Generation) {
			if err := control.Drain(h.layout, g.ID); err != nil {
				t.Fatal(err)
			}
			h.state(t, g.ID, generation.StateDrained)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			c := startProcess(t)
			g := h.start(t, h.tested("c", c.Process.Pid, launch.SelfTestOnce, "hangs"))
			testutil.Succeeds(t, "the tester runs", func() error {
				if len(h.jobs(t)) != 1 {
					return errors.New("the tester does not run")
				}
				return nil
			})
			if stop != nil {
				stop(t, h, g)
			} else {
				end(c)
				h.gone(t)
			}
			for _, s := range reports[relayStart](t, h.dir, "start") {
				if err := unix.Kill(s.PID, 0); slices.Equal(s.Args, []string{"self-test"}) && err != unix.ESRCH {
					t.Errorf("the tester %d is there still: %v", s.PID, err)
				}
			}
			end(c)
			h.gone(t)
		})
	}
}

// busy holds the lock of the self-test until the caller calls letGo.
func (h host) busy(t *testing.T) (letGo func()) {
	t.Helper()
	if err := h.layout.CreateState(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(h.layout.SelfTestLock(), os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return func() { f.Close() }
}

// A tester that waits for another self-test stops waiting when the context ends.
func TestWaitingForAnotherSelfTestEnds(t *testing.T) {
	h := newHost(t)
	letGo := h.busy(t)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if err := h.tester(t, "").Test(ctx, names(1), false, func(launch.PairHost, launch.Pair) {}); !errors.Is(
		err,
		context.Canceled,
	) {
		t.Errorf("Test ended with %v", err)
	}
	c := startProcess(t)
	g := h.start(t, h.tested("c", c.Process.Pid, launch.SelfTestOnce, ""))
	if err := control.Drain(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	h.state(t, g.ID, generation.StateDrained)
	if err := control.Resume(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	letGo()
	// The drained relay leaves no verdict for the next relay.
	h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 1 && c.Pairs[0].Verdict == launch.VerdictGood })
	if log := h.log(t, g.ID); strings.Contains(log, "are not tested") || strings.Contains(log, "a driver holds it") {
		t.Errorf("the log says %s", log)
	}
}

func (h host) tester(t *testing.T, faults string) *selftest.Tester {
	t.Helper()
	r := h.request("", 0, faults)
	tester, err := selftest.NewTester(h.layout, r.Config, r.HookBinary)
	if err != nil {
		t.Fatal(err)
	}
	return tester
}

func names(n int) (list []launch.PairName) {
	for i := range n {
		list = append(list, launch.PairName{GPU: lane(i).GPU, Server: lane(100).GPU})
	}
	return list
}

// verdicts runs a tester on pairs, and returns GPU and verdict per pair.
func verdicts(t *testing.T, tester *selftest.Tester, again bool, list []launch.PairName) (string, error) {
	t.Helper()
	var results []string
	err := tester.Test(t.Context(), list, again, func(_ launch.PairHost, p launch.Pair) {
		if err := p.Check(); err != nil {
			t.Error(err)
		}
		results = append(results, fmt.Sprintf("%d %s", p.GPU.Index, p.Verdict))
	})
	return strings.Join(results, ", "), err
}

// A record is valid for the boot and the driver, and only if root made the file. Without a valid
// record the pairs are tested again.
func TestSelfTestRecordIsValidForBootAndDriver(t *testing.T) {
	replace := func(old, now string) func(t *testing.T, file string) {
		return func(t *testing.T, file string) {
			text, err := os.ReadFile(file)
			if err == nil && !strings.Contains(string(text), old) {
				t.Fatalf("%s has no %s", text, old)
			}
			if err == nil {
				err = os.WriteFile(file, []byte(strings.Replace(string(text), old, now, 1)), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	// before sets the verdict and the age of the recorded pairs.
	before := func(verdict string, ago time.Duration) func(t *testing.T, file string) {
		return func(t *testing.T, file string) {
			text, err := os.ReadFile(file)
			var r launch.PairRecord
			if err == nil {
				r, err = launch.ReadPairRecord(text)
			}
			for i := range r.Pairs {
				p := &r.Pairs[i]
				p.Verdict, p.At = verdict, time.Now().Add(-ago).Unix()
				if verdict != launch.VerdictGood {
					p.Reason = "so it seemed"
				}
			}
			if err == nil {
				text, err = json.Marshal(r)
			}
			if err = errors.Join(err, os.WriteFile(file, text, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	errorIs := func(err error) func(string) error { return func(string) error { return err } }
	for _, c := range []struct {
		name    string
		change  func(t *testing.T, file string)
		again   bool // the pairs are tested again
		damaged func(path string) error
	}{
		{"as it was left", func(*testing.T, string) {}, false, nil},
		{"good, hours ago", before(launch.VerdictGood, 5*time.Hour), false, nil},
		{"slow, more than an hour ago", before(launch.VerdictSlow, 61*time.Minute), true, nil},
		{"untested, more than ten minutes ago", before(launch.VerdictUntested, 11*time.Minute), true, nil},
		{"another boot", replace(strings.TrimSpace(string(boot)), "00000000-0000-0000-0000-000000000000"), true, nil},
		{"another driver", func(t *testing.T, _ string) { module(t, "581.00") }, true, nil},
		{"torn", func(t *testing.T, file string) {
			if err := os.Truncate(file, 100); err != nil {
				t.Fatal(err)
			}
		}, true, errorIs(io.ErrUnexpectedEOF)},
		{"keys of nobody's", replace(`"boot"`, `"root":1,"boot"`), true, errorIs(&launch.UnknownFieldError{Field: "root"})},
		{"a verdict of nobody's", replace(`"good"`, `"best"`), true, errorIs(&launch.ValueError{Field: "verdict", Value: "best"})},
		{"another's file", func(t *testing.T, file string) {
			if os.Getuid() != 0 {
				t.Skip("only root can give a file away")
			}
			if err := os.Chown(file, 12345, 0); err != nil {
				t.Fatal(err)
			}
		}, true, func(path string) error { return &paths.OwnerError{Path: path, UID: 12345} }},
		{"for everybody to write", func(t *testing.T, file string) {
			if err := os.Chmod(file, 0o666); err != nil {
				t.Fatal(err)
			}
		}, true, func(path string) error { return &paths.ModeError{Path: path, Mode: 0o666} }},
		{"a link", func(t *testing.T, file string) {
			if err := errors.Join(os.Rename(file, file+".real"), os.Symlink(file+".real", file)); err != nil {
				t.Fatal(err)
			}
		}, true, errorIs(paths.ErrNotRegular)},
		{"gigabytes", func(t *testing.T, file string) {
			if err := os.Truncate(file, 1<<30); err != nil {
				t.Fatal(err)
			}
		}, true, func(path string) error {
			return &paths.SizeError{Path: path, Bytes: 1 << 30, Limit: launch.MaxPairRecord}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			module(t, "580.95")
			tester := h.tester(t, "")
			if verdict, err := verdicts(t, tester, false, names(2)); err != nil || verdict != "0 good, 1 good" {
				t.Fatalf("%s, %v", verdict, err)
			}
			c.change(t, h.layout.SelfTestFile())
			known, err := tester.Known()
			if c.damaged == nil && err != nil ||
				c.damaged != nil && !testutil.HasError(err, c.damaged(h.layout.SelfTestFile())) {
				t.Errorf("reading the record: %v", err)
			}
			if (len(known.Pairs) == 0) != c.again {
				t.Errorf("known are %d pairs", len(known.Pairs))
			}
			if verdict, err := verdicts(t, tester, false, names(2)); err != nil || verdict != "0 good, 1 good" {
				t.Errorf("%s, %v", verdict, err)
			}
			if jobs := h.jobs(t); (len(jobs) == 2) != c.again {
				t.Errorf("%d jobs", len(jobs))
			}
			// The tester replaces a damaged record.
			if known, err := tester.Known(); err != nil || len(known.Pairs) != 2 {
				t.Errorf("known are %d pairs, %v", len(known.Pairs), err)
			}
		})
	}
}

// A bad verdict stays: slow for an hour, wrong for the boot.
func TestBadVerdictOfPairIsKept(t *testing.T) {
	h := newHost(t)
	tester := h.tester(t, "")
	if _, err := verdicts(t, tester, false, names(2)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(h.layout.SelfTestFile())
	if err != nil {
		t.Fatal(err)
	}
	r, err := launch.ReadPairRecord(text)
	if err != nil {
		t.Fatal(err)
	}
	slow, wrong := &r.Pairs[0], &r.Pairs[1]
	slow.Verdict, slow.Reason, slow.At = launch.VerdictSlow, "so it seemed", time.Now().Add(-30*time.Minute).Unix()
	wrong.Verdict, wrong.Reason, wrong.At = launch.VerdictWrong, "1 byte", time.Now().Add(-5*time.Hour).Unix()
	if text, err = json.Marshal(r); err == nil {
		err = os.WriteFile(h.layout.SelfTestFile(), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if verdict, err := verdicts(t, tester, false, names(2)); err != nil || verdict != "0 slow, 1 wrong" {
		t.Errorf("%s, %v", verdict, err)
	}
}

// A tester that exits early is started again for the remaining pairs. Results for pairs that are
// not in the job are ignored.
func TestTesterThatExitsEarlyIsStartedAgain(t *testing.T) {
	for _, c := range []struct {
		fault, verdict string
		jobs           int
	}{
		{"one at a time", "0 good, 1 good, 2 good", 3},
		{"about others", "0 good, 1 good, 2 good", 3},
		{"no driver", "0 untested, 1 untested, 2 untested", 3},
	} {
		t.Run(c.fault, func(t *testing.T) {
			h := newHost(t)
			if verdict, err := verdicts(t, h.tester(t, c.fault), false, names(3)); err != nil || verdict != c.verdict {
				t.Errorf("%s, %v", verdict, err)
			}
			if jobs := h.jobs(t); len(jobs) != c.jobs {
				t.Errorf("%d jobs", len(jobs))
			}
		})
	}
}

// Concurrent self-tests of a pair run the test once. A request with again runs the test again.
func TestConcurrentSelfTestsOfPairRunOnce(t *testing.T) {
	h := newHost(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if verdict, err := verdicts(t, h.tester(t, "slowly"), false, names(1)); err != nil || verdict != "0 good" {
				t.Errorf("%s, %v", verdict, err)
			}
		})
	}
	all.Wait()
	if jobs := h.jobs(t); len(jobs) != 1 {
		t.Errorf("%d jobs", len(jobs))
	}
	if verdict, err := verdicts(t, h.tester(t, ""), true, names(1)); err != nil || verdict != "0 good" {
		t.Errorf("%s, %v", verdict, err)
	}
	if jobs := h.jobs(t); len(jobs) != 2 {
		t.Errorf("%d jobs", len(jobs))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := h.tester(t, "hangs").Test(ctx, names(2), false, func(launch.PairHost, launch.Pair) {}); !errors.Is(
		err,
		context.DeadlineExceeded,
	) {
		t.Errorf("after the timeout: %v", err)
	}
}

// A tester has only the pipes as descriptors, has the environment of a relay, and has a uid that
// no relay has.
func TestTesterRunsInSandbox(t *testing.T) {
	h := newHost(t)
	if verdict, err := verdicts(t, h.tester(t, ""), false, names(1)); err != nil || verdict != "0 good" {
		t.Fatalf("%s, %v", verdict, err)
	}
	starts := reports[relayStart](t, h.dir, "start")
	if len(starts) != 1 {
		t.Fatalf("%d starts", len(starts))
	}
	s := starts[0]
	for _, fd := range s.Descriptors {
		if number, _, _ := strings.Cut(fd, " "); !slices.Contains([]string{"0", "1", "2"}, number) {
			t.Errorf("the tester has descriptor %s", fd)
		}
	}
	if !slices.Equal(s.Args, []string{"self-test"}) || s.Directory != "/" || len(s.Environment) != 4 {
		t.Errorf("the tester was started as %+v", s)
	}
	first, _, err := config.Default().Relay.UIDRange()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(h.dir, "job-*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	var stat unix.Stat_t
	if err := unix.Stat(files[0], &stat); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 && sandbox.CheckMapped(first) == nil && stat.Uid != uint32(first) {
		t.Errorf("the uid of the tester is %d", stat.Uid)
	}
}
