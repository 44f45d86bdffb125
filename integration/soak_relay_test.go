package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/integration/traffic"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
)

// Variables of `make soak-relay`: duration and seed. Without a duration the test runs soakSegments
// segments of soakLives lives of two clients.
const (
	soakTimeVariable = "PEERLANE_SOAK_TIME"
	soakSegments     = 5
	soakLives        = 5
	// Segments of a short run without a sample: heaps and stacks of relays grow to the size for 16
	// clients.
	soakUnsampled = 3
	soakPairs     = 8 // of clients, concurrently
	// Length of a segment in a long run.
	soakSegment = 45 * time.Second
)

// TestSoakOfRelaysLeaksNothing runs 16 clients at a time, which exchange verified messages by both routes,
// while it kills clients, relays and containers at random, takes a NIC's port down, and stops clients
// for a while. No byte is corrupt, no client gets an error that no death explains, no operation hangs,
// and no resource of long-lived processes grows.
//
// Between two segments all clients detach, so that the state is the same each time, and the test
// compares the resources of relays, supervisors and the NIC that were left alone (growth, in
// soak_growth_test.go). Clients attach again in each segment.
func TestSoakOfRelaysLeaksNothing(t *testing.T) {
	seed := fromEnvironment(t, soakSeedVariable, uint64(time.Now().UnixNano()))
	whole := time.Duration(0)
	if text := os.Getenv(soakTimeVariable); text != "" {
		var err error
		if whole, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", soakTimeVariable, err)
		}
	}
	s := newRelaySoak(t, seed)
	if whole == 0 {
		t.Logf("%d segments of %d lives; %s=%d makes the same choices again", soakSegments, soakLives, soakSeedVariable, seed)
	} else {
		t.Logf("%v; %s=%d makes the same choices again", whole, soakSeedVariable, seed)
	}
	s.warm()
	s.learn()
	begin := time.Now()
	first := 0
	if whole == 0 {
		first = -soakUnsampled
	}
	for n := first; whole == 0 && n < soakSegments || time.Since(begin) < whole; n++ {
		var over func() bool
		if whole == 0 {
			var lives atomic.Int32
			over = func() bool { return lives.Add(1) > soakLives }
		} else {
			end := time.Now().Add(min(soakSegment, whole-time.Since(begin)))
			over = func() bool { return time.Now().After(end) }
		}
		s.segment(n, whole > 0, over)
		if n >= 0 {
			s.sample(time.Since(begin))
		}
		if r := s.fleet.Report(); len(r.Problems) > 0 {
			break
		}
	}
	for _, p := range s.fleet.Report().Problems {
		t.Error(p)
	}
	for _, text := range s.growth() {
		t.Error(text)
	}
	s.print()
}

// relaySoak is a run of the soak test.
type relaySoak struct {
	*testing.T
	host    *testbed.Host
	fleet   *traffic.Fleet
	c       traffic.C
	seed    uint64
	begin   time.Time
	samples []sample
	each    map[string]float64 // of perPeer
	max     map[string]int     // the largest value of sample.peers, by process
}

// steady reports a container that the test never kills: number 0 of its GPU and route. Such
// containers run throughout, and their resources must not grow. Their clients and connected
// containers are killed as usual.
func steady(number int) bool { return number == 0 }

func newRelaySoak(t *testing.T, seed uint64) *relaySoak {
	compiler, err := exec.LookPath("cc")
	programs.MustHave(t, err)
	root := newRoot(t)
	h, err := testbed.New(root, binaries, testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	h.ClientCopy = true
	// Remove specifications that the administrator created before.
	if err := h.Configure(asItIs); err != nil {
		t.Fatal(err)
	}
	before, err := h.Look()
	if err != nil {
		t.Fatal(err)
	}
	s := &relaySoak{T: t, host: h, seed: seed, begin: time.Now()}
	s.c = buildTransfer(t, compiler)
	s.fleet, err = traffic.NewFleet(context.Background(), h, traffic.Options{
		GPUs: 2, PerGPU: 2, NICs: 2,
		Change: func(c *config.Config) {
			c.Relay.Slots, c.Relay.SlotSize = 4, 256<<10
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.logs()
		}
		if err := s.fleet.Close(); err != nil {
			t.Error(err)
		}
		left, err := h.Left(before, patience)
		if err != nil {
			t.Fatal(err)
		}
		for _, thing := range left {
			t.Errorf("left on the host: %s", thing)
		}
	})
	return s
}

// buildTransfer builds the C example, with the library as pkg-config says.
func buildTransfer(t *testing.T, compiler string) traffic.C {
	t.Helper()
	places := libpeerlane.Installed()
	places.DestDir = t.TempDir()
	if err := libpeerlane.Install(places); err != nil {
		t.Fatal(err)
	}
	c := traffic.C{Program: filepath.Join(places.DestDir, "transfer"),
		Library: filepath.Join(places.DestDir, places.Library)}
	out, err := exec.Command(compiler, "-o", c.Program, "../relay/libpeerlane/examples/transfer.c",
		"-I"+filepath.Join(places.DestDir, places.Include), "-L"+c.Library, "-l:"+libpeerlane.Name, "-ldl").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return c
}

// warm makes long-lived relays allocate their one-time resources, mainly staging memory.
func (s *relaySoak) warm() {
	random := rand.New(rand.NewPCG(s.seed, 1<<62))
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		for _, memory := range []string{traffic.MemoryGPU, traffic.MemoryHost, traffic.MemoryStaging} {
			life := traffic.Life{
				Bytes: 4 << 20, Messages: 8, Largest: 1 << 20, Rounds: 1, Memory: []string{memory}, Hands: []string{
					traffic.HandPlain},
			}
			s.fleet.NewSlot(random, s.fleet.Pair(route, 0), life).Live(func() bool { return false })
		}
	}
}

// segment runs clients until over returns true, and waits until all have left.
func (s *relaySoak) segment(number int, long bool, over func() bool) {
	var clients, killers sync.WaitGroup
	ended := make(chan struct{})
	for i := range soakPairs {
		random := rand.New(rand.NewPCG(s.seed, uint64(number)<<16+uint64(i)))
		life := traffic.Life{
			Bytes: 4 << 20, Messages: 24, Largest: 1 << 20, Rounds: 40,
			Memory: []string{traffic.MemoryGPU, traffic.MemoryGPU, traffic.MemoryHost, traffic.MemoryStaging},
			Hands:  []string{traffic.HandPlain, traffic.HandTimeline, traffic.HandOver},
		}
		if !long {
			life.Rounds = 4
		}
		slot := s.fleet.NewSlot(random, s.fleet.AnyPair, life)
		clients.Go(func() {
			for !over() {
				if random.IntN(6) == 0 {
					slot.LiveInC(s.c, 1+random.Uint64N(300_000), 1+random.Uint64N(8))
					continue
				}
				slot.Live(func() bool { return long && over() })
			}
		})
	}
	killers.Go(func() { s.kill(rand.New(rand.NewPCG(s.seed, uint64(number)<<16+1000)), long, ended) })
	if long {
		killers.Go(func() {
			for {
				select {
				case <-ended:
					return
				case <-time.After(10 * time.Second):
					s.progress()
				}
			}
		})
	}
	clients.Wait()
	close(ended)
	killers.Wait()
}

// kill kills and stops processes at random until all clients have left.
func (s *relaySoak) kill(random *rand.Rand, long bool, ended <-chan struct{}) {
	pause := 300 * time.Millisecond
	if long {
		pause = 3 * time.Second
	}
	for {
		select {
		case <-ended:
			return
		case <-time.After(time.Duration(random.Int64N(int64(pause)))):
		}
		var err error
		switch n := random.IntN(20); {
		case n < 7:
			s.fleet.KillClient(random.IntN)
		case n < 12:
			s.fleet.StopClient(random.IntN, time.Duration(random.Int64N(int64(pause))))
		case n < 17:
			_, err = s.fleet.KillRelay(s.fleet.Any(random, func(c int) bool { return !steady(c) }))
		case n < 19:
			err = s.fleet.KillContainer(s.fleet.Any(random, func(c int) bool { return !steady(c) }))
		default:
			err = s.fleet.FlapNIC(1, time.Duration(random.Int64N(int64(pause))))
		}
		if err != nil {
			s.Error(err)
			return
		}
	}
}

func (s *relaySoak) progress() {
	r := s.fleet.Report()
	fmt.Printf("soak: %v, %d lives, %d rounds, %d messages, %d MB, killed %v, stopped %d, flapped %d, ended so %v, "+
		"wrong %d, problems %d\n",
		time.Since(s.begin).Round(time.Second), r.Lives, r.Rounds, r.Transfers, r.Bytes>>20, r.Kills, r.Stops, r.Flaps,
		r.Explained, r.Wrong, len(r.Problems))
}

func (s *relaySoak) print() {
	r := s.fleet.Report()
	text, err := json.Marshal(r)
	if err != nil {
		s.Fatal(err)
	}
	s.Logf("in %v: %s", time.Since(s.begin).Round(time.Second), text)
}

// logs prints the tails of the relays' logs.
func (s *relaySoak) logs() {
	files, err := filepath.Glob(filepath.Join(s.host.Layout.GenerationDir("*"), "relay.log"))
	if err != nil {
		s.Error(err)
	}
	for _, file := range files {
		text, _ := os.ReadFile(file) // the file may not exist any more
		s.Logf("%s: ...%s", file, text[max(0, len(text)-3000):])
	}
}

// quiet waits until the relay of a generation has no client and holds no resources, and returns the report.
func (s *relaySoak) quiet(generation string) *launch.Report {
	s.Helper()
	for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
		i, err := control.Inspect(s.host.Layout, generation)
		if err == nil && i.Report != nil && len(i.Report.Clients) == 0 && i.Report.Used == (launch.Limits{}) {
			return i.Report
		}
		if end.Over() {
			text, _ := json.Marshal(i.Report)
			s.Fatalf("relay %s still has clients, or does not answer: %v, %s, %s", generation, err, i.NoReport, text)
		}
	}
}
