package relay_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// verified returns the results of both hosts' lanes with NICs.
func verified(verdict, reason string, nics ...string) (list []launch.Triple) {
	for _, nic := range nics {
		for _, p := range []launch.PairName{{GPU: gpu(0), Server: gpu(1)}, {GPU: gpu(3), Server: gpu(2)}} {
			list = append(list, launch.Triple{TripleName: launch.TripleName{PairName: p, NIC: nic}, Verdict: verdict,
				Reason: reason})
		}
	}
	return list
}

func TestUnverifiedTripleBounces(t *testing.T) {
	needGPUs(t, 4)
	good := verified(launch.VerdictGood, "", "mlx5_0", "rocep1")
	for _, c := range []struct {
		name, mode string
		triples    []launch.Triple
		says       string // of host a; empty for slots on the server GPU
		member     bool   // half of each lane is in the host's memory
	}{
		{"verified", launch.SelfTestOnce, good, "", false},
		{"verified, required", launch.SelfTestRequired, good, "", false},
		{"verified, half in host memory", launch.SelfTestRequired, good, "", true},
		{"not tested", launch.SelfTestOnce, nil, "are not verified yet", false},
		{"another NIC", launch.SelfTestOnce, verified(launch.VerdictGood, "", "mlx5_7"), "are not verified yet", false},
		{"wrong", launch.SelfTestOnce, verified(launch.VerdictWrong, "1 of 64 bytes are wrong in round 3", "mlx5_0",
			"rocep1"), "failed their test: 1 of 64 bytes are wrong in round 3", false},
		{"could not be tested", launch.SelfTestOnce, verified(launch.VerdictUntested, "port 1 of mlx5_0 is DOWN", "mlx5_0",
			"rocep1"), "could not be verified: port 1 of mlx5_0 is DOWN", false},
		{"no self-test", launch.SelfTestOff, nil, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &byRDMA{change: func(of *launch.Config) {
				of.SelfTest, of.Triples = c.mode, c.triples
				for gpus, server := range map[int]int{0: 1, 3: 2} {
					of.Pairs = append(of.Pairs, launch.Pair{PairName: launch.PairName{GPU: gpu(gpus), Server: gpu(server)},
						Verdict: launch.VerdictGood})
				}
				if c.member {
					of.Bounce = 64 << 20
				}
			}}
			if c.member {
				p.lane = func(l launch.Lane) launch.Lane {
					l.Members = []launch.Member{{Server: l.Servers[0].BusID, NIC: l.NICs[0], Weight: 1}, {NIC: l.NICs[0], Weight: 1}}
					return l
				}
			}
			p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
			p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
			const n = 1<<20 + 5
			p.arrive(t, n)
			for server, side := range map[int]*launch.Report{1: p.relayA.Report(), 2: p.relayB.Report()} {
				is := side.Connections[0]
				if is.GDR != (c.says == "") || !strings.Contains(is.Registration, c.says) {
					t.Errorf("server GPU %d: inspect shows %+v", server, is)
				}
			}
			gpu, host := throughSlots(t, p.a, 1)
			if c.member {
				if gpu == 0 || host == 0 || gpu+host != n {
					t.Errorf("%d bytes went through the server GPU, %d through the host, want a part of %d each", gpu, host, n)
				}
				return
			}
			if (gpu == n) != (c.says == "") || (host == n) != (c.says != "") {
				t.Errorf("%d bytes went through the server GPU, %d through the host", gpu, host)
			}
		})
	}
}

// A verdict that comes while the relay works holds for the next connection.
func TestVerdictOfTripleHoldsForNextConnection(t *testing.T) {
	needGPUs(t, 4)
	var a launch.Config
	p := &byRDMA{change: func(of *launch.Config) {
		of.SelfTest = launch.SelfTestOnce
		if of.Container == "a" {
			a = *of
		} else {
			of.Triples = verified(launch.VerdictGood, "", "rocep1")
		}
	}}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
	if is := p.relayA.Report().Connections[0]; is.GDR {
		t.Fatalf("before the verdict: %+v", is)
	}
	a.Triples = verified(launch.VerdictGood, "", "mlx5_0")
	if err := p.relayA.Configure(a); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "a connection goes by the server GPU", func() error {
		p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
		p.arrive(t, 1<<20)
		for _, is := range p.relayA.Report().Connections {
			if is.GDR {
				return nil
			}
		}
		return errors.New("all connections bounce")
	})
}

// A near GPU's memory is accessed in place once its triple is verified.
func TestUnverifiedTripleOfNearGPUBounces(t *testing.T) {
	for _, verdict := range []string{"", launch.VerdictWrong, launch.VerdictGood} {
		t.Run(verdict, func(t *testing.T) {
			var a launch.Config
			p := &byRDMA{lane: direct, change: func(of *launch.Config) {
				of.SelfTest = launch.SelfTestOnce
				if of.Container == "a" {
					defer func() { a = *of }()
				}
				for gpu, nic := range map[launch.GPU]string{gpu(0): "mlx5_0", gpu(3): "rocep1"} {
					r := launch.Triple{TripleName: launch.TripleName{PairName: launch.PairName{GPU: gpu, Server: gpu}, NIC: nic},
						Verdict: verdict}
					if verdict == launch.VerdictWrong {
						r.Reason = "1 of 64 bytes are wrong in round 3"
					}
					if verdict != "" {
						of.Triples = append(of.Triples, r)
					}
				}
			}}
			p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
			p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
			const n = 1<<20 + 5
			p.source.lend(p.a, 0, n)
			p.target.lend(p.b, 0, n)
			says := map[string]string{"": "are not verified yet",
				launch.VerdictWrong: "failed their test: 1 of 64 bytes are wrong in round 3"}[verdict]
			move := func() (inplace bool) {
				p.moveBetween(t, p.source, p.target, 0, 0, n)
				bytes, is := inPlace(t, p.relayA)
				if bytes == 0 && says != "" && !strings.Contains(is.Registration, says) {
					t.Errorf("inspect shows %+v", is)
				}
				return bytes > 0
			}
			if verdict == launch.VerdictGood { // the NICs register the memory a moment later
				testutil.Until(t, "memory is accessed in place", move)
			} else if first, second := move(), move(); first || second {
				t.Error("memory is accessed in place")
			}
			if verdict == "" { // the verdict applies to existing connections, too
				name := launch.TripleName{PairName: launch.PairName{GPU: gpu(0), Server: gpu(0)}, NIC: "mlx5_0"}
				a.Triples = []launch.Triple{{TripleName: name, Verdict: launch.VerdictGood}}
				if err := p.relayA.Configure(a); err != nil {
					t.Fatal(err)
				}
				testutil.Until(t, "memory is accessed in place after the verdict", move)
			}
		})
	}
}
