package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/integration/traffic"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// sample has the resources of long-lived processes and of the host while no client is attached.
type sample struct {
	at     time.Duration
	values map[series]float64
	peers  map[string]int // number of relays that each process has connections with, by process
}

// series identifies one resource over time.
type series struct{ what, of string }

// slacks has the sampled resources, with the increase that does not count as growth: late one-time
// allocations, such as a thread of Go's scheduler, and the noise of the garbage collector.
var slacks = map[string]float64{
	"memory":      4 << 20, // Pss_Anon and Pss_Shmem of /proc/PID/smaps_rollup, bytes
	"descriptors": 1,
	"threads":     6,
	"mappings":    12,
	"staging":     0, // bytes on GPUs, by the supervisor's accounting
	"host slots":  0, // bytes for relays reached over the network, by the relay's report
	"files":       6, // below the state and the sockets
	"processes":   0,
}

// perPeer lists the resources of a set of connections with another relay. A relay keeps an unused
// set for up to a minute (relay.idleTimeout), and two relays that dial each other at the same time
// have two sets. So a sample subtracts the resources of the existing sets. The test reports a
// resource that an ended set did not return as growth.
var perPeer = []string{"descriptors", "threads", "mappings", "memory"}

// learn measures perPeer: the relay of a container connects with another relay.
func (s *relaySoak) learn() {
	s.Helper()
	c := s.fleet.Pair(launch.RouteStaged, 0)(nil)[0]
	look := func() sample {
		report := s.quiet(c.Generation())
		now := sample{values: map[series]float64{}, peers: map[string]int{"it": len(report.Network.Peers)}}
		i, err := control.Inspect(s.host.Layout, c.Generation())
		if err != nil || i.Status.Relay == nil {
			s.Fatalf("%+v, %v", i.Status, err)
		}
		s.process(&now, "it", i.Status.Relay.PID)
		return now
	}
	before := look()
	s.connect(s.across()[0])
	after := look()
	more := float64(after.peers["it"] - before.peers["it"])
	if more <= 0 {
		s.Fatalf("%v relays are connected, and %v were before", after.peers, before.peers)
	}
	s.each, s.max = map[string]float64{}, map[string]int{}
	for _, what := range perPeer {
		s.each[what] = (after.values[series{what, "it"}] - before.values[series{what, "it"}]) / more
	}
	s.each["memory"] = max(s.each["memory"], 0)
	s.Logf("connections with a further relay take %v", s.each)
}

// across returns clients of staged pairs of a container that lives on and of a container that is
// killed.
func (s *relaySoak) across() (slots []*traffic.Slot) {
	random := rand.New(rand.NewPCG(s.seed, 1<<61))
	for _, pair := range s.fleet.Across(launch.RouteStaged, 0, 1) {
		slots = append(slots, s.fleet.NewSlot(random, pair, traffic.Life{Bytes: 1 << 20, Messages: 1, Largest: 64 << 10,
			Rounds: 1, Memory: []string{traffic.MemoryGPU}, Hands: []string{traffic.HandPlain}}))
	}
	return slots
}

// connect makes two clients exchange messages.
func (s *relaySoak) connect(slot *traffic.Slot) {
	s.Helper()
	rounds := s.fleet.Report().Rounds
	for end := testutil.Begin(); s.fleet.Report().Rounds == rounds; time.Sleep(20 * time.Millisecond) {
		if end.Over() {
			s.Fatalf("no messages between two containers: %v", s.fleet.Report().Problems)
		}
		slot.Live(func() bool { return false })
	}
}

// sample measures the processes that live on, after all relays of route staged have opened their
// NICs again and have connections.
func (s *relaySoak) sample(at time.Duration) {
	s.Helper()
	for _, c := range s.fleet.Containers {
		s.quiet(c.Generation())
	}
	for _, slot := range s.across() {
		s.connect(slot)
	}
	now := s.look(at)
	// An ended process may still be closing descriptors.
	for end := testutil.BeginFor(15 * time.Second); s.more(now, "descriptors") && !end.Over(); now = s.look(at) {
		time.Sleep(200 * time.Millisecond)
	}
	s.samples = append(s.samples, now)
}

// more reports whether a process has more of a resource than in the last sample.
func (s *relaySoak) more(now sample, what string) bool {
	if len(s.samples) == 0 {
		return false
	}
	last := s.samples[len(s.samples)-1]
	for of, v := range now.values {
		if old, ok := last.values[of]; ok && of.what == what && v > old {
			return true
		}
	}
	return false
}

func (s *relaySoak) look(at time.Duration) sample {
	s.Helper()
	now := sample{at, map[series]float64{}, map[string]int{}}
	for _, c := range s.fleet.Containers {
		report := s.quiet(c.Generation())
		if !steady(c.Number) {
			continue
		}
		i, err := control.Inspect(s.host.Layout, c.Generation())
		if err != nil {
			s.Fatal(err)
		}
		for _, p := range i.Processes {
			name := p.Role + " of " + c.Name
			s.process(&now, name, p.PID)
			if i.Status.Relay == nil || p.PID != i.Status.Relay.PID || report.Network == nil {
				continue
			}
			now.peers[name] = len(report.Network.Peers)
			s.max[name] = max(s.max[name], now.peers[name])
			for _, what := range perPeer {
				n := now.peers[name]
				if what == "memory" { // the allocator keeps the memory for later connections
					n = s.max[name]
				}
				now.values[series{what, name}] -= s.each[what] * float64(n)
			}
		}
		if i.Status.Starts != 1 || len(i.Processes) != 2 {
			s.Errorf("the relay of %s, to which nothing was done, was started %d times: %s", c.Name, i.Status.Starts,
				i.Status.Error)
		}
		s.staging(&now, c.Name, c.Generation(), report)
	}
	s.process(&now, "the NICs", s.fleet.NICs())
	// The last processes of an ended container may still be ending.
	limit := math.Inf(1)
	if n := len(s.samples); n > 0 {
		limit = s.samples[n-1].values[series{"processes", "the host"}]
	}
	for end := testutil.BeginFor(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		look, err := s.host.Look()
		if err != nil {
			s.Fatal(err)
		}
		counts := map[string]float64{}
		for thing := range look {
			kind, _, _ := strings.Cut(thing, " ")
			counts[kind]++
		}
		if counts["process"] <= limit || end.Over() {
			now.values[series{"files", "the host"}] = counts["file"]
			now.values[series{"processes", "the host"}] = counts["process"]
			break
		}
	}
	return now
}

// staging compares a relay's memory on GPUs with the account, and the relay's host memory with the
// reported size.
func (s *relaySoak) staging(now *sample, name, generation string, report *launch.Report) {
	s.Helper()
	var share struct{ GPUs map[string]float64 }
	text, err := os.ReadFile(filepath.Join(s.host.Layout.GenerationDir(generation), "staging.json"))
	if err == nil {
		err = json.Unmarshal(text, &share)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Fatal(err)
	}
	for _, bytes := range share.GPUs {
		now.values[series{"staging", name}] += bytes
	}
	reported := 0.0
	for _, own := range report.Staging {
		if !own.Host {
			reported += float64(own.Bytes + own.Clients)
			continue
		}
		// Host memory is not staging of a GPU: the lane has its slots once, as configured.
		now.values[series{"host slots", name}] += float64(own.Bytes)
		if size := 2 * uint64(own.Slots) * own.SlotBytes; own.Bytes != size || own.Bytes != own.Wanted || own.Clients != 0 ||
			own.Bytes > report.Limits.HostMemory {
			s.Errorf("the relay of %s has %+v, of %d bytes of host memory", name, own, report.Limits.HostMemory)
		}
	}
	if admitted := now.values[series{"staging", name}]; reported != admitted {
		s.Errorf("the relay of %s has %v bytes of staging, and %v are in the account", name, reported, admitted)
	}
}

func (s *relaySoak) process(now *sample, name string, pid int) {
	s.Helper()
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	for what, path := range map[string]string{"descriptors": "fd", "threads": "task"} {
		entries, err := os.ReadDir(filepath.Join(dir, path))
		if err != nil {
			s.Fatalf("%s: %v", name, err)
		}
		now.values[series{what, name}] = float64(len(entries))
	}
	mappings, err := os.ReadFile(filepath.Join(dir, "maps"))
	if err != nil {
		s.Fatalf("%s: %v", name, err)
	}
	now.values[series{"mappings", name}] = float64(strings.Count(string(mappings), "\n"))
	rollup, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
	if err != nil {
		s.Fatalf("%s: %v", name, err)
	}
	for line := range strings.Lines(string(rollup)) {
		if f := strings.Fields(line); len(f) == 3 && (f[0] == "Pss_Anon:" || f[0] == "Pss_Shmem:") {
			kilobytes, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				s.Fatal(err)
			}
			now.values[series{"memory", name}] += kilobytes * 1024
		}
	}
}

// growth lists the resources that have grown.
func (s *relaySoak) growth() []string {
	s.Helper()
	all := map[series][]float64{}
	for _, each := range s.samples {
		for what, v := range each.values {
			all[what] = append(all[what], v)
		}
	}
	var grown []string
	for _, what := range slices.SortedFunc(maps.Keys(all),
		func(a, b series) int { return strings.Compare(a.what+a.of, b.what+b.of) }) {
		values := all[what]
		by, grows := grew(values, slacks[what.what])
		s.Logf("%-12s %-30s %v, by %.1f", what.what, what.of, shown(values), by)
		if grows {
			grown = append(grown, fmt.Sprintf("%s of %s grow: %v", what.what, what.of, shown(values)))
		}
	}
	return grown
}

// shown returns at most twelve of the values, including the first and the last.
func shown(values []float64) []float64 {
	if len(values) <= 12 {
		return values
	}
	var list []float64
	for i := range 12 {
		list = append(list, values[i*(len(values)-1)/11])
	}
	return list
}

// grew returns the growth of values sampled in equal states, and whether it is significant. It
// skips the first quarter, in which one-time allocations happen. The growth is the median of the
// slopes between every two values (Theil and Sen), times the total time, which neither outliers nor
// a single step change. Growth is significant if it exceeds the slack and every value of the last
// third exceeds every value of the first: temporary use is no growth.
func grew(values []float64, slack float64) (by float64, grows bool) {
	values = values[(len(values)+3)/4:]
	n := len(values)
	if n < 2 {
		return 0, false
	}
	var slopes []float64
	for i := range n {
		for k := range i {
			slopes = append(slopes, (values[i]-values[k])/float64(i-k))
		}
	}
	slices.Sort(slopes)
	by = (slopes[(len(slopes)-1)/2] + slopes[len(slopes)/2]) / 2 * float64(n-1)
	third := max(n/3, 1)
	return by, by > slack && slices.Min(values[n-third:]) > slices.Max(values[:third])
}

func TestGrowthIsDetected(t *testing.T) {
	line := func(n int, f func(i int) float64) (list []float64) {
		for i := range n {
			list = append(list, f(i))
		}
		return list
	}
	noise := func(i int) float64 { return float64(i * 7919 % 5) }
	for _, c := range []struct {
		name   string
		values []float64
		slack  float64
		want   bool
	}{
		{"the same", line(20, func(int) float64 { return 30 }), 0, false},
		{"noise", line(20, noise), 4, false},
		{"one descriptor a segment", line(20, func(i int) float64 { return float64(30 + i) }), 4, true},
		{"the same in noise", line(30, func(i int) float64 { return 30 + float64(i) + noise(i) }), 4, true},
		{"the same with values that are off", line(30, func(i int) float64 { return 30 + float64(i) - 100*float64(i%10/9) }),
			4, false},
		{"what is made at the start", line(20, func(i int) float64 { return min(30, 10+10*float64(i)) }), 0, false},
		{"one late step", line(20, func(i int) float64 { return 30 + 3*float64(i/15) }), 4, false},
		{"what comes and goes", line(20, func(i int) float64 { return 30 + 10*float64(i%4) }), 4, false},
		{"less and less", line(20, func(i int) float64 { return 60 - float64(i) }), 0, false},
		{"five samples, a few descriptors each", []float64{30, 40, 50, 60, 70}, 4, true},
		{"five samples alike", []float64{30, 42, 42, 42, 42}, 4, false},
		{"five samples, a descriptor for each client", []float64{15, 17, 19, 21, 21}, 1, true},
		{"five samples, one socket that is being closed", []float64{15, 15, 15, 16, 15}, 1, false},
		{"one sample", []float64{1}, 0, false},
	} {
		if by, got := grew(c.values, c.slack); got != c.want {
			t.Errorf("%s: grows %v, by %v: %v", c.name, got, by, c.values)
		}
	}
}
