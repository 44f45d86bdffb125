package relay_test

import (
	"strings"
	"testing"
	"time"

	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// found returns a self-test's result for GPU 0 and a server GPU.
func found(server int, verdict, reason string) launch.Pair {
	return launch.Pair{PairName: launch.PairName{GPU: gpu(0), Server: gpu(server)}, Verdict: verdict, Reason: reason}
}

// triplesOf are good results of GPU 0, servers and a NIC.
func triplesOf(nic string, servers ...int) (list []launch.Triple) {
	for _, s := range servers {
		list = append(list, launch.Triple{TripleName: launch.TripleName{PairName: launch.PairName{GPU: gpu(0),
			Server: gpu(s)}, NIC: nic}, Verdict: launch.VerdictGood})
	}
	return list
}

// A pair that fails the test, or is slower than the bounce, is replaced and reported; so is an
// untested pair, if tests are required.
func TestUnfitPairsAreReplacedAndReported(t *testing.T) {
	needGPUs(t, 3)
	wrong := found(1, launch.VerdictWrong, "1 of 8388608 bytes arrived wrong")
	slow := found(1, launch.VerdictSlow, "3.0 GB/s, and the bounce 25.0")
	unknown := found(1, launch.VerdictUntested, "out of memory")
	fit, alsoWrong := found(2, launch.VerdictGood, ""), found(2, launch.VerdictWrong, "a copy does not end")
	for _, c := range []struct {
		name, mode string
		pairs      []launch.Pair
		on         int    // the GPU with the staging, -1 for the host's memory
		says       string // in the log, and in the report of GPU 1
	}{
		{"wrong bytes, and a spare", launch.SelfTestOnce, []launch.Pair{wrong, fit}, 2,
			"the pair failed its self-test: 1 of 8388608 bytes arrived wrong"},
		{"slow, and a spare", launch.SelfTestOnce, []launch.Pair{slow}, 2, "the pair is slower than the bounce: 3.0 GB/s"},
		{"no pair is fit", launch.SelfTestOnce, []launch.Pair{slow, alsoWrong}, -1, "has no staging"},
		{"not tested", launch.SelfTestOnce, []launch.Pair{unknown}, 1, ""},
		{"nothing is known", launch.SelfTestOnce, nil, 1, ""},
		{"not tested, where it has to be", launch.SelfTestRequired, []launch.Pair{unknown, fit}, 2, `relay.self_test is "required": out of memory`},
		{"nothing is known, where it has to be", launch.SelfTestRequired, []launch.Pair{fit}, 2,
			"the pair is not tested yet"},
		{"nobody cares", launch.SelfTestOff, []launch.Pair{wrong}, 1, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.change = func(l *launch.Config) {
				l.SelfTest, l.Pairs, l.Triples = c.mode, c.pairs, triplesOf("nic0", 1, 2)
			}
			lane := far(0, 1, "nic0")
			lane.Spares = []launch.Spare{{GPU: gpu(2), NICs: []string{"nic2"}}}
			log := listenToLog(t)
			f := newSelf(t, h, lane)
			f.move(t)
			if c.on == -1 {
				for _, says := range []string{"no server GPU is fit to stage for", "slower than the bounce: 3.0 GB/s",
					"a copy does not end"} {
					if why := f.bouncesBecause(t); !strings.Contains(why, says) {
						t.Errorf("it bounces because of %q", why)
					}
				}
			}
			if c.says != "" && log.count(c.says) == 0 || c.says == "" && len(log.lines) != 0 {
				t.Errorf("the log says %q", log.lines)
			}
			for i, server := range map[int]wire.UUID{1: uuid(t, 1), 2: uuid(t, 2), -1: {}} {
				if in := through(t, f.session, server).In; (in > 0) != (i == c.on) {
					t.Errorf("%d bytes went into slots on GPU %d", in, i)
				}
			}
			if note := f.staging(t, 1).Note; c.on == 2 && !strings.Contains(note, c.says) {
				t.Errorf("the report says %q", note)
			}
		})
	}
}

// Staging waits for a running self-test, and uses the result.
func TestStagingDuringSelfTestWaits(t *testing.T) {
	needGPUs(t, 3)
	h := newHost(t)
	h.nic("nic2")
	var config launch.Config
	h.change = func(l *launch.Config) {
		l.SelfTest, l.Testing = launch.SelfTestOnce, true
		l.Reserve = launch.ReserveStart
		config = *l
	}
	lane := far(0, 1, "nobody")
	lane.Spares = []launch.Spare{{GPU: gpu(2), NICs: []string{"nic2"}}}
	_, r := h.start("waits", launch.RouteStaged, -1, lane)
	testutil.Until(t, "the relay has no context", func() bool { return len(r.Report().Contexts) != 0 })
	time.Sleep(50 * time.Millisecond)
	if s := r.Report().Staging; len(s) != 0 {
		t.Fatalf("it has not waited: %+v", s)
	}
	// Of a server that is not fit alone nothing comes: the spare may not be either.
	config.Pairs = []launch.Pair{found(1, launch.VerdictWrong, "1 byte")}
	if err := r.Configure(config); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	if s := r.Report().Staging; len(s) != 0 {
		t.Fatalf("it has not waited for the spare: %+v", s)
	}
	config.Testing = false
	if err := r.Configure(config); err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); ; time.Sleep(5 * time.Millisecond) {
		if s := r.Report().Staging; len(s) == 2 && s[0].Bytes == 0 && s[1].Bytes > 0 {
			break
		}
		if end.Over() {
			t.Fatalf("staging is %+v", r.Report().Staging)
		}
	}
}

// A relay that has staged on a pair with a late wrong verdict ends with that reason, so that the
// next relay has the verdict before it stages. The relay continues after a slow verdict, or a
// verdict on a foreign pair.
func TestLateBadVerdictEndsRelay(t *testing.T) {
	needGPUs(t, 3)
	for _, c := range []struct {
		name, mode string
		pair       launch.Pair
		ends       error
	}{
		{"wrong", launch.SelfTestOnce, found(1, launch.VerdictWrong, "1 byte"), codes.UnfitPair},
		{"slow", launch.SelfTestOnce, found(1, launch.VerdictSlow, "1 GB/s"), nil},
		{"of another server", launch.SelfTestOnce, found(2, launch.VerdictWrong, "1 byte"), nil},
		{"nobody cares", launch.SelfTestOff, found(1, launch.VerdictWrong, "1 byte"), nil},
	} {
		late := func(t *testing.T) (h *host, tell func(*relay.Relay)) {
			h = newHost(t)
			h.nic("nic0")
			h.ends = c.ends
			var config launch.Config
			h.change = func(l *launch.Config) {
				l.SelfTest, l.Triples = c.mode, triplesOf("nic0", 1)
				config = *l
			}
			return h, func(r *relay.Relay) {
				config.Pairs = []launch.Pair{c.pair}
				if err := r.Configure(config); err != nil {
					t.Fatal(err)
				}
			}
		}
		t.Run(c.name, func(t *testing.T) {
			h, tell := late(t)
			f := newSelf(t, h, far(0, 1, "nic0"))
			f.move(t)
			tell(f.relay)
			if c.ends == nil {
				f.move(t)
			}
		})
		t.Run(c.name+", where clients copy", func(t *testing.T) {
			h, tell := late(t)
			lane := far(0, 1, "nic0")
			lane.Copy = true
			socket, r := h.start("a", launch.RouteDirect, -1, lane)
			s := attach(t, socket)
			if _, err := s.Staging(within(t), driver, client.Staging{Bytes: mib, GPU: uuid(t, 0)}); err != nil {
				t.Fatal(err)
			}
			tell(r)
		})
	}
}

// With a bad verdict on copies between two containers' GPUs the messages are staged, regardless of
// the client's GPU in the test; or refused, where that is forced.
func TestDirectRouteOfUnfitPairIsStagedOrRefused(t *testing.T) {
	needGPUs(t, 4)
	swapped := launch.Pair{PairName: launch.PairName{GPU: gpu(3), Server: gpu(0)}, Verdict: launch.VerdictWrong,
		Reason: "1 byte"}
	for _, c := range []struct {
		name, route string
		pair        launch.Pair
		want        uint32 // 0: refused
	}{
		{"good", launch.RouteAuto, found(3, launch.VerdictGood, ""), wire.RouteDirect},
		{"wrong", launch.RouteAuto, found(3, launch.VerdictWrong, "1 byte"), wire.RouteStaged},
		{"slow, in the other order", launch.RouteAuto, swapped, wire.RouteStaged},
		{"of other GPUs", launch.RouteAuto, found(2, launch.VerdictWrong, "1 byte"), wire.RouteDirect},
		{"forced", launch.RouteDirect, swapped, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			h.change = func(l *launch.Config) { l.SelfTest, l.Pairs = launch.SelfTestOnce, []launch.Pair{c.pair} }
			log := listenToLog(t)
			a, b := attach(t, h.relay("a", c.route, far(0, 1, "nic0"))), attach(t, h.relay("b", c.route, far(3, 2, "nic1")))
			listener, err := b.Listen(within(t), uuid(t, 3))
			if err != nil {
				t.Fatal(err)
			}
			connection, err := a.Connect(within(t), uuid(t, 0), listener.Handle())
			if c.want == 0 {
				demandOf(t, err, wire.StatusUnreachable, devices[0].UUID)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if connection.Route != c.want {
				t.Errorf("the route is %d", connection.Route)
			}
			if n := log.count("is staged, and not direct to"); (n == 1) != (c.want == wire.RouteStaged) {
				t.Errorf("the log says %q", log.lines)
			}
		})
	}
}

// Of spares nothing has to be known where a server is fit.
func TestStagingWithFitServerDoesNotWaitForSpares(t *testing.T) {
	needGPUs(t, 3)
	h := newHost(t)
	h.nic("nic0")
	h.change = func(l *launch.Config) {
		l.SelfTest, l.Testing, l.Pairs = launch.SelfTestOnce, true, []launch.Pair{found(1, launch.VerdictGood, "")}
		l.Triples = triplesOf("nic0", 1)
	}
	lane := far(0, 1, "nic0")
	lane.Spares = []launch.Spare{{GPU: gpu(2), NICs: []string{"nic2"}}}
	newSelf(t, h, lane).move(t)
}

// Of a lane that has no server GPU nothing is tested.
func TestLaneThatBouncesWaitsForNoSelfTest(t *testing.T) {
	h := newHost(t)
	h.nic("nic0")
	h.change = func(l *launch.Config) {
		l.SelfTest, l.Testing = launch.SelfTestOnce, true
		l.Reserve = launch.ReserveStart
	}
	begun := testutil.BeginFor(15 * time.Second) // a relay waits 20 s for a self-test
	f := newSelf(t, h, launch.Lane{GPU: gpu(0), Role: "far", Relay: true, NICs: []string{"nic0"}})
	f.move(t)
	if begun.Over() {
		t.Errorf("it waited")
	}
	if why := f.bouncesBecause(t); !strings.Contains(why, "the plan has no server GPU for this lane") {
		t.Errorf("it bounces because of %q", why)
	}
}

// The calibration decides on slots and streams, within the configured memory, and explicit
// configuration wins.
func TestCalibrationChoosesSlotsWithinConfiguration(t *testing.T) {
	needGPUs(t, 2)
	tuned := found(1, launch.VerdictGood, "")
	tuned.Chunk, tuned.Depth, tuned.Streams = 4*mib, 8, 2
	large := tuned
	large.Chunk = 64 * mib
	for _, c := range []struct {
		name    string
		change  func(*launch.Config)
		slots   int
		size    uint64
		streams int
	}{
		{"by the calibration", func(l *launch.Config) { l.Calibrated = true }, 16, 4 * mib, 2},
		{"not wanted", func(*launch.Config) {}, 8, 32 * mib, 1},
		{"a chunk of the configuration's", func(l *launch.Config) { l.Calibrated, l.Chunk = true, 8*mib }, 16, 8 * mib, 2},
		{"all of the configuration's", func(l *launch.Config) { l.Chunk, l.Depth, l.Streams = 16*mib, 4, 3 }, 8, 16 * mib, 3},
		{"a chunk alone", func(l *launch.Config) { l.Chunk = 16 * mib }, 16, 16 * mib, 1},
		{"larger than slots", func(l *launch.Config) { l.Calibrated, l.Pairs = true, []launch.Pair{large} }, 8, 32 * mib, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.change = func(l *launch.Config) {
				asConfigured(l)
				l.SelfTest, l.Pairs, l.Triples = launch.SelfTestOnce, []launch.Pair{tuned}, triplesOf("nic0", 1)
				c.change(l)
			}
			f := newSelf(t, h, far(0, 1, "nic0"))
			f.moveBytes(t, c.size+2*mib) // more than a slot
			f.move(t)
			if s := f.staging(t, 1); s.Slots != c.slots || s.SlotBytes != c.size || s.Streams != c.streams ||
				s.Bytes != 2*uint64(c.slots)*c.size || s.Note != "" {
				t.Errorf("staging is %+v", s)
			}
		})
	}
}
