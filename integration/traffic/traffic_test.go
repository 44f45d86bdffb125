package traffic

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestMessagesOfIterationFitMemory(t *testing.T) {
	decades := Decades{}
	odd := [2]int{}
	for seed := range uint64(300) {
		const bytes = 1 << 20
		r := round{Seed: seed, Messages: atOnce, Largest: 256 << 10}
		list := r.messages(int(seed%2), bytes)
		if len(list) == 0 || len(list) > atOnce {
			t.Fatalf("round %d has %d messages", seed, len(list))
		}
		from, to := uint64(0), uint64(margin)
		for i, m := range list {
			if m.size < 1 || m.size > r.Largest || m.from < from || m.to < to+margin || m.to+m.size+margin > bytes ||
				m.from+m.size > bytes {
				t.Fatalf("round %d, message %d is %+v, after %d and %d", seed, i, m, from, to)
			}
			from, to = m.from+m.size, m.to+m.size+margin
			odd[0] += int(m.from % 2)
			odd[1] += int(m.to % 2)
			decades.count(m.size)
		}
		other := r.messages(1-int(seed%2), bytes)
		if fmt.Sprint(other) == fmt.Sprint(list) || fmt.Sprint(r.messages(int(seed%2), bytes)) != fmt.Sprint(list) {
			t.Fatalf("round %d: both sides send the same, or not the same each time", seed)
		}
	}
	for i, n := range decades[:6] {
		if n < 50 {
			t.Errorf("%d messages of decade %d: %v", n, i, decades)
		}
	}
	if odd[0] < 100 || odd[1] < 100 {
		t.Errorf("offsets that are odd: %v", odd)
	}
	// A message above the buffer's size is cut.
	r := round{Seed: 1, Messages: 1, Largest: 1 << 40}
	for r.Seed = range uint64(50) {
		if m := r.messages(0, 4096)[0]; m.to < margin || max(m.from, m.to)+m.size+margin > 4096 {
			t.Errorf("in 4096 bytes: %+v", m)
		}
	}
}

// The comparison covers every byte of a message and the neighbouring bytes.
func TestCompareSeesEveryByte(t *testing.T) {
	r := round{Seed: 7, Messages: 3, Largest: 300}
	const bytes = 64 << 10
	canary := r.canary(0)
	received := make([]byte, bytes)
	canary.Fill(received)
	source := make([]byte, bytes)
	for _, m := range r.messages(0, bytes) {
		begin := m.from / 8 * 8
		m.pattern.Fill(source[begin : (m.from+m.size+7)/8*8])
		copy(received[m.to:m.to+m.size], source[m.from:])
	}
	for _, m := range r.messages(0, bytes) {
		offset := m.to - margin
		window := received[offset : m.to+m.size+margin]
		if text := m.compare(window, offset, canary); text != "" {
			t.Fatal(text)
		}
		for i := range window {
			window[i] ^= 4
			text := m.compare(window, offset, canary)
			if !strings.Contains(text, fmt.Sprintf("at offset %d, ", offset+uint64(i))) {
				t.Fatalf("byte %d is wrong, and it says %q", i, text)
			}
			window[i] ^= 4
		}
	}
}

// Errors with and without a death as an explanation.
func TestFleetDeathExplainsError(t *testing.T) {
	died := func(status wire.Status) error { return &failure{status: status, text: "client 1: " + status.String()} }
	for _, c := range []struct {
		name    string
		err     error
		killed  string // "" for nothing
		before  bool   // before the life
		problem bool
	}{
		{"the relay died", died(wire.StatusRelayDied), "a", false, false},
		{"another one did", died(wire.StatusRelayDied), "c", false, true},
		{"it did before", died(wire.StatusRelayDied), "a", true, true},
		{"nothing did", died(wire.StatusPeerClientDied), "", false, true},
		{"an error that says nothing of a death", died(wire.StatusCUDA), "a", false, true},
		{"the process itself was killed", &failure{killed: true, text: "client 1, round: it ended"}, "client 1", false,
			false},
		{"the process crashed when its relay died", &failure{text: "client 1, round: it ended"}, "a", false, true},
		{"it hangs", &failure{hangs: true, text: "it hangs"}, "a", false, true},
		{"one of two is explained", errors.Join(died(wire.StatusRelayDied), died(wire.StatusOutOfRange)), "a", false, true},
		{"an error of the fleet's", errors.New("connected by another route"), "a", false, true},
	} {
		f := &Fleet{report: Report{Kills: map[string]int{}, Explained: map[string]int{}}}
		begin := time.Now()
		if c.killed != "" {
			f.killed("relay", c.killed)()
		}
		if c.before {
			begin = time.Now().Add(time.Second)
		}
		f.failed(c.err, begin, []string{"a", "b", "client 1"})
		r := f.Report()
		if (len(r.Problems) > 0) != c.problem {
			t.Errorf("%s: problems %v, explained %v", c.name, r.Problems, r.Explained)
		}
	}
	// A dead process or container without a successor explains later errors.
	f := &Fleet{report: Report{Kills: map[string]int{}, Explained: map[string]int{}}}
	f.killed("container", "a")
	f.failed(died(wire.StatusPeerContainerDied), time.Now().Add(time.Hour), []string{"a"})
	if r := f.Report(); len(r.Problems) > 0 || r.Kills["container"] != 1 {
		t.Errorf("%+v", r)
	}
}

// A port that was down explains that containers were not reached by its NIC, and no other error.
func TestFleetDownPortExplainsUnreachable(t *testing.T) {
	unreachable := &failure{status: wire.StatusUnreachable, text: "client 1: connect: no port is active"}
	for _, c := range []struct {
		name    string
		err     error
		route   string
		flapped string
		ended   time.Duration // of the flap, after the begin of the life; 0 for an open end
		problem bool
	}{
		{"staged, still down", unreachable, launch.RouteStaged, "nic0", 0, false},
		{"staged, by the NIC of the other side", unreachable, launch.RouteStaged, "nic1", time.Second, false},
		{"staged, another NIC", unreachable, launch.RouteStaged, "nic2", 0, true},
		{"direct", unreachable, launch.RouteDirect, "nic0", 0, true},
		{"staged, before the life", unreachable, launch.RouteStaged, "nic0", -time.Second, true},
		{"staged, no NIC", unreachable, launch.RouteStaged, "", 0, true},
		{"staged, a connection that failed", &failure{status: wire.StatusPeerRelayDied, text: "client 1: send"},
			launch.RouteStaged, "nic0", 0, true},
	} {
		f := &Fleet{report: Report{Explained: map[string]int{}}}
		begin := time.Now()
		if c.flapped != "" {
			flap := &death{what: c.flapped, from: begin}
			if c.ended != 0 {
				flap.to = begin.Add(c.ended)
			}
			f.flaps = append(f.flaps, flap)
		}
		in := [2]*container{
			{Name: "a", Route: c.route, nics: []string{"nic0"}}, {Name: "b", Route: c.route, nics: []string{"nic1"}},
		}
		f.failed(c.err, begin, f.names(in, &Slot{}))
		if r := f.Report(); (len(r.Problems) > 0) != c.problem || c.problem == (r.Explained["a port was down"] > 0) {
			t.Errorf("%s: problems %v, explained %v", c.name, r.Problems, r.Explained)
		}
	}
}

// A client that is killed while it waits for the next life gets a successor. A client that ends
// without a kill is a problem.
func TestFleetClientKilledBetweenLives(t *testing.T) {
	for _, c := range []struct {
		name     string
		command  []string
		kill     bool // by the fleet
		idle     bool
		problems bool
	}{
		{"it waits", []string{"sleep", "86400"}, false, true, false},
		{"it was killed", []string{"sleep", "86400"}, true, false, false},
		{"it ended by itself", []string{"false"}, false, false, true},
		{"somebody else killed it", []string{"sh", "-c", "kill -9 $$"}, false, false, true},
	} {
		f := &Fleet{victims: map[*victim]bool{}, report: Report{Kills: map[string]int{}}}
		in := &container{Name: "a"}
		read := func(out io.Reader) { _, _ = io.Copy(io.Discard, out) }
		v, err := f.begin("client 1", in, exec.Command(c.command[0], c.command[1:]...), read)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case c.kill:
			f.KillClient(func(int) int { return 0 })
		case !c.idle:
			<-v.ended
		}
		idle, err := f.idle(&worker{victim: v, container: in})
		if idle != c.idle || (err != nil) != c.problems {
			t.Errorf("%s: idle %v, %v", c.name, idle, err)
		}
		if c.idle {
			f.KillClient(func(int) int { return 0 })
		}
	}
}

func TestPairsCoverAllGPUs(t *testing.T) {
	for _, c := range []struct{ gpus, each, pairs, want int }{{2, 2, 0, 8}, {2, 1, 1, 2}, {4, 2, 0, 12}, {3, 2, 2, 12}} {
		f := &Fleet{Options: Options{PerGPU: c.each}}
		for _, route := range []string{"staged", "direct"} {
			for k := range c.each {
				for i := range c.gpus {
					at := &container{Name: fmt.Sprint(route, i, k), Number: k, Route: route}
					at.gpu.Index, at.gpu.BusID = i, fmt.Sprint(i)
					f.Containers = append(f.Containers, at)
				}
			}
		}
		seen, used := map[string]bool{}, map[string]bool{}
		list := Torture{Pairs: c.pairs}.pairs(f)
		for _, p := range list {
			if p[0].Route != p[1].Route || p[0].gpu.Index == p[1].gpu.Index {
				t.Errorf("%d GPUs: a pair of %s and %s", c.gpus, p[0].Name, p[1].Name)
			}
			seen[fmt.Sprint(p[0].Route, p[0].gpu.Index, p[1].gpu.Index)] = true
			used[p[0].Name], used[p[1].Name] = true, true
		}
		if len(list) != c.want || len(seen) != c.gpus*(c.gpus-1) {
			t.Errorf("%d GPUs: %d pairs, of %v", c.gpus, len(list), seen)
		}
		// Every container has a client if the pairs suffice.
		if c.pairs != 1 && c.gpus < 4 && len(used) != len(f.Containers) {
			t.Errorf("%d GPUs: %v", c.gpus, used)
		}
		random := rand.New(rand.NewPCG(1, 2))
		for range 20 {
			if p := f.AnyPair(random); p[0].Route != p[1].Route || p[0].gpu.BusID == p[1].gpu.BusID {
				t.Errorf("any pair is %s and %s", p[0].Name, p[1].Name)
			}
		}
	}
}
