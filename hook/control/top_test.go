package control

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/relay/launch"
)

// A relay that hangs takes at most the caller's time limit.
func TestAskHangingRelayEndsAtLimit(t *testing.T) {
	l := paths.New(t.TempDir())
	listen := func(id string) net.Listener {
		if err := os.MkdirAll(l.GenerationDir(id), 0o700); err != nil {
			t.Fatal(err)
		}
		listener, err := net.Listen("unixpacket", admin.Socket(l, id))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
		return listener
	}
	listen("hung") // the kernel connects, and no process reads
	answers := listen("well")
	served := make(chan error, 1)
	go func() {
		conn, err := answers.Accept()
		if err == nil {
			defer conn.Close()
			_, err = conn.Read(make([]byte, 4<<10))
		}
		if err == nil {
			_, err = conn.Write([]byte(`{"version": 1, "report": {"at": 7}}`))
		}
		served <- err
	}()
	before := time.Now()
	hung := Ask(l, []generation.Info{{Generation: generation.Generation{ID: "hung"}}}, 50*time.Millisecond)["hung"]
	if took := time.Since(before); took > admin.Timeout*5/6 {
		t.Errorf("Ask took %v", took)
	}
	if hung.Report != nil || !strings.Contains(hung.NoReport, "no answer in time") {
		t.Errorf("the relay that hangs: %+v", hung)
	}
	well := Ask(l, []generation.Info{{Generation: generation.Generation{ID: "well"}}}, admin.Timeout)["well"]
	if err := <-served; err != nil || well.Report == nil || well.At != 7 {
		t.Errorf("the relay that answers: %+v, %v", well, err)
	}
}

func TestRatesAreDifferencesOfReports(t *testing.T) {
	figures := func(n uint64) launch.Figures {
		return launch.Figures{
			Operations: n, Bytes: 10 * n, InPlace: 3 * n, InFlight: int(n % 7),
			Stalls:  []launch.Stall{{Cause: launch.StallNoSlot, Count: n, Time: time.Duration(n) * time.Millisecond}},
			Latency: []launch.Bucket{{From: 8000, To: 10000, Count: n}},
		}
	}
	at := func(seconds int, n uint64, relay int) Answer {
		return Answer{relay: relay, Report: &launch.Report{
			At: time.Duration(seconds) * time.Second, MoreConnections: 2,
			Lanes: []launch.LaneFigures{{GPU: "0000:17:00.0", Sent: figures(n)}},
			Connections: []launch.ConnectionFigures{
				{
					PID:     7,
					Number:  1,
					GPU:     "0000:17:00.0",
					Peer:    "container b",
					Route:   "direct",
					Sends:   true,
					Figures: figures(n),
				},
			},
		}}
	}
	rates := func(n uint64, inFlight int) Rate {
		return Rate{
			GPU:        "0000:17:00.0",
			Sends:      true,
			Bytes:      10 * n,
			InPlace:    3 * n,
			Operations: n,
			InFlight:   inFlight,
			P50:        9,
			P99:        9,
			Stalls:     []launch.Stall{{Cause: launch.StallNoSlot, Count: n, Time: time.Duration(n) * time.Millisecond}},
		}
	}
	for name, c := range map[string]struct {
		before  Answer
		seconds float64
		want    uint64
	}{
		"the same relay":       {at(3, 100, 1), 2, 33},
		"it was started again": {at(3, 100, 2), 0, 133},
		"none before":          {Answer{NoReport: "it starts"}, 0, 133},
	} {
		var r Rates
		r.between(at(5, 133, 1), c.before)
		connection := rates(c.want, 0)
		connection.PID, connection.Number, connection.Peer, connection.Route = 7, 1, "container b", "direct"
		want := Rates{
			Seconds: c.seconds, MoreConnections: 2, Connections: []Rate{connection},
			Lanes: []Rate{rates(c.want, 0), {GPU: "0000:17:00.0", Stalls: []launch.Stall{}}},
		}
		if d := cmp.Diff(want, r); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}

	// A connection outside a full report has no rate, which would cover the whole life.
	before := at(3, 100, 1)
	before.Connections[0].Number = 2
	var r Rates
	r.between(at(5, 133, 1), before)
	if len(r.Connections) != 0 || r.MoreConnections != 3 {
		t.Errorf("%d connections and %d more: %+v", len(r.Connections), r.MoreConnections, r.Connections)
	}
}
