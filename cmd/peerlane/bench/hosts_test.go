package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// withKey returns the options of a host with a cluster key.
func withKey(t *testing.T, keys network.Keys) Options {
	t.Helper()
	n := config.Default().Network
	n.Key = filepath.Join(t.TempDir(), "cluster.key")
	if err := os.WriteFile(n.Key, keys.Text(), 0o600); err != nil {
		t.Fatal(err)
	}
	return Options{GPUs: testbed.GPUsSimulated, Network: n}
}

func newKeys() network.Keys { return network.Keys{Current: network.NewKey(time.Now())} }

func locally(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// answering starts a bench that calls talk for a connection after the handshake, and returns its
// address.
func answering(t *testing.T, own *network.Local, talk func(*lines)) string {
	t.Helper()
	l := locally(t)
	server := network.Server{
		Local: own, Admit: func(network.Greeting) error { return nil }, Refused: func(net.Addr, error) {},
		Accept: func(s *network.Session) {
			go func() {
				defer s.Conn.Close()
				talk(newLines(s.Conn))
			}()
		},
	}
	ended := make(chan struct{})
	go func() {
		server.Serve(l)
		close(ended)
	}()
	t.Cleanup(func() {
		l.Close()
		<-ended
	})
	return l.Addr().String()
}

func mustLocal(t *testing.T, o Options) *network.Local {
	t.Helper()
	own, err := local(o.Network)
	if err != nil {
		t.Fatal(err)
	}
	return own
}

func TestBenchWithoutPartnerFails(t *testing.T) {
	keys := newKeys()
	o := withKey(t, keys)
	hangsUp := func(*lines) {}
	answers := func(text string) func(*lines) {
		return func(l *lines) {
			if _, err := l.next(); err == nil {
				_, _ = l.conn.Write([]byte(text + "\n")) // the connecting bench checks the answer
				_, _ = l.next()
			}
		}
	}
	later := mustLocal(t, o)
	later.Oldest, later.Newest = 7, 8
	silent := locally(t)
	go func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
	gone := locally(t)
	gone.Close()
	r, end, err := begin(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	}()
	same, err := r.side()
	if err != nil {
		t.Fatal(err)
	}
	errorIs := func(target error) func(error) bool { return func(err error) bool { return errors.Is(err, target) } }
	for name, c := range map[string]struct {
		to      string
		errorIs func(error) bool
	}{
		"nobody is there": {gone.Addr().String(), func(err error) bool {
			f, ok := errors.AsType[*fault.Error](err)
			return ok && f.Object == gone.Addr().String() && errors.Is(err, syscall.ECONNREFUSED)
		}},
		"one that says nothing": {silent.Addr().String(), errorIs(os.ErrDeadlineExceeded)},
		"another key":           {answering(t, mustLocal(t, withKey(t, newKeys())), hangsUp), errorIs(fault.KeyNotProven)},
		"another version": {answering(t, later, hangsUp), func(err error) bool {
			return wire.StatusOf(err) == wire.StatusVersion
		}},
		"one that goes away": {answering(t, mustLocal(t, o), hangsUp), func(err error) bool {
			e, ok := errors.AsType[*lostError](err)
			return ok && e.when == "before its answer (meet)"
		}},
		"one that does not say who": {answering(t, mustLocal(t, o), answers("{}")), errorIs(errNoName)},
		"one of another language": {answering(t, mustLocal(t, o), answers("hello")), func(err error) bool {
			return testutil.HasError(err, &json.SyntaxError{Offset: 1})
		}},
		"one that cannot": {answering(t, mustLocal(t, o), answers(`{"error": "no GPU is here"}`)), func(err error) bool {
			e, ok := errors.AsType[*remoteError](err)
			return ok && e.reason == "no GPU is here"
		}},
		"real GPUs": {answering(t, mustLocal(t, o), answers(`{"side": {"name": "b", "simulated": false}}`)),
			func(err error) bool {
				e, ok := errors.AsType[*kindError](err)
				return ok && e.simulated && e.other == "b" && !e.simulatedOthers
			}},
		"a bench of the same host": {answering(t, mustLocal(t, o), answers(jsonOf(t, taskResult{Side: &same}))),
			errorIs(errOneHost)},
	} {
		own := mustLocal(t, o)
		if name == "one that says nothing" {
			own.Time = 20 * time.Millisecond // the test waits for the end of this time
		}
		f, err := meet(context.Background(), o, own, c.to)
		if err == nil {
			err = f.giveUp(r.withHost(f))
			f.conn.Close()
		}
		if !c.errorIs(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	without := o
	without.Network.Key += ".none"
	for what, do := range map[string]func(context.Context, Options, string) (*Report, error){"connects": Connect,
		"listens": Listen} {
		if _, err := do(context.Background(), without, ""); !errors.Is(err, fault.NoClusterKey) {
			t.Errorf("bench without a key %s: %v", what, err)
		}
	}
}

// If plain sockets fail because the other bench has ended, the error says so.
func TestPlainSocketsOfEndedBenchReportItsEnd(t *testing.T) {
	o := withKey(t, newKeys())
	gone := locally(t)
	gone.Close()
	to := answering(t, mustLocal(t, o), func(l *lines) {
		if _, err := l.next(); err == nil {
			// The connecting bench checks the answer.
			_, _ = l.conn.Write([]byte(jsonOf(t, taskResult{Address: gone.Addr().String(), Token: make([]byte, tokenBytes)}) +
				"\n"))
		}
	})
	f, err := meet(context.Background(), o, mustLocal(t, o), to)
	if err != nil {
		t.Fatal(err)
	}
	defer f.conn.Close()
	r := &run{ctx: context.Background()}
	_, err = r.plainWith(f, plain{Sockets: measure.Sockets{Threads: 1, Each: 1}, Duration: time.Millisecond})
	lost, ok := errors.AsType[*lostError](err)
	if !ok || lost.bench != f.name || !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("error %v", err)
	}
}

// A listening bench refuses invalid tasks of a connecting bench.
func TestListenJudgesConnectingBench(t *testing.T) {
	o := withKey(t, newKeys())
	side := `{"task": "meet", "side": {"name": "a", "simulated": true}}`
	r, end, err := begin(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	}()
	lost := func(err error) bool {
		e, ok := errors.AsType[*lostError](err)
		return ok && e.when == "before the end"
	}
	for name, c := range map[string]struct {
		want []string
		// answer is the answer to the last line.
		answer  string
		errorIs func(error) bool
	}{
		"one that goes away": {[]string{side}, `"gpus":`, lost},
		"one that gives up": {[]string{side, `{"task": "end", "why": "no lane here"}`}, "", func(err error) bool {
			e, ok := errors.AsType[*abortError](err)
			return ok && e.reason == "no lane here"
		}},
		"one with real GPUs": {[]string{`{"task": "meet", "side": {"name": "a"}}`}, "the GPUs of a are real", lost},
		"one that hurries":   {[]string{`{"do": "send", "size": 8, "depth": 1}`}, "no client has been started", lost},
		"one that wants much": {[]string{`{"task": "attach", "bytes": 1099511627776, "transport": "tcp"}`},
			"1099511627776 bytes", lost},
		"a result that is none": {[]string{`{"task": "end", "report": {"version": 1}}`}, "",
			func(err error) bool { return errors.Is(err, errNoRows) }},
	} {
		t.Run(name, func(t *testing.T) {
			l := locally(t)
			at := netip.MustParseAddrPort(l.Addr().String())
			type answer struct {
				*Report
				err error
			}
			ended := make(chan answer, 1)
			go func() {
				r, err := r.forHost(mustLocal(t, o), l)
				ended <- answer{r, err}
			}()
			s, err := mustLocal(t, o).Dial(context.Background(), meetingPlace, []netip.AddrPort{at})
			if err != nil {
				t.Fatal(err)
			}
			conversation := newLines(s.Conn)
			for i, text := range c.want {
				if _, err := s.Conn.Write([]byte(text + "\n")); err != nil {
					t.Fatal(err)
				}
				line, err := conversation.next()
				if last := i == len(c.want)-1; last && c.answer != "" && (err != nil || !strings.Contains(string(line), c.answer)) {
					t.Errorf("%s is answered %q, %v; want %q", text, line, err, c.answer)
				} else if last && c.answer != "" {
					// A second bench gets the error that another bench is connected.
					if _, err := mustLocal(t, o).Dial(context.Background(), meetingPlace, []netip.AddrPort{at}); err == nil ||
						wire.StatusOf(err) != wire.StatusLimit {
						t.Errorf("second bench: %v", err)
					}
				}
			}
			s.Conn.Close()
			if got := <-ended; !c.errorIs(got.err) {
				t.Errorf("error %v, %v", got.Report, got.err)
			}
		})
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	enough := errors.New("enough")
	cancel(enough)
	r.ctx = ctx
	if _, err := r.forHost(mustLocal(t, o), locally(t)); !errors.Is(err, enough) {
		t.Errorf("bench stopped while waiting: %v", err)
	}
}

// The bench detects the end of the other bench while its client executes a task, and ends every
// wait.
func TestListenNoticesLostBench(t *testing.T) {
	for name, want := range map[string]string{
		"it waits for a connection": `{"do": "accept"}`,
		"it waits for messages":     `{"do": "receive", "size": 8, "depth": 1, "duration": 1000}`,
	} {
		t.Run(name, func(t *testing.T) {
			conn, theirs := net.Pipe()
			r := &run{ctx: t.Context()}
			g := r.guest("a", theirs)
			client := exec.Command("sleep", "3600") // never answers
			orders, in := io.Pipe()
			answers, silence := io.Pipe()
			if err := client.Start(); err != nil {
				t.Fatal(err)
			}
			died := make(chan error, 1)
			go func() {
				died <- client.Wait()
				silence.Close()
			}()
			g.register(&worker{name: "of this host", command: client, in: in, out: json.NewDecoder(answers)})
			ended := make(chan error, 1)
			go func() {
				_, err := g.serve()
				ended <- err
			}()
			if _, err := conn.Write([]byte(want + "\n")); err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(orders).ReadString('\n'); err != nil { // the task has started
				t.Fatal(err)
			}
			conn.Close()
			select {
			case err := <-ended:
				if lost, ok := errors.AsType[*lostError](err); !ok || lost.bench != "a" {
					t.Errorf("error %v", err)
				}
			case <-testutil.After(time.Minute):
				t.Error("serve blocks after the end of the other bench")
				_ = client.Process.Kill() // end the test
				<-ended
			}
			<-died
		})
	}
}

func TestHostAndPortAreParsed(t *testing.T) {
	for text, want := range map[string]string{
		"": "|19999", "host1": "host1|19999", "host1:7": "host1|7", ":7": "|7", "10.0.0.1": "10.0.0.1|19999",
		"fe80::1%eth0": "fe80::1%eth0|19999", "[fe80::1]:7": "fe80::1|7",
	} {
		host, port, err := hostAndPort(text)
		if got := fmt.Sprintf("%s|%d", host, port); err != nil || got != want {
			t.Errorf("%q is %q, %v; want %q", text, got, err, want)
		}
	}
	for _, text := range []string{"host1:", "host1:0", "host1:70000", "host1:ssh", "[::1", "a:b:c"} {
		if host, port, err := hostAndPort(text); err == nil {
			t.Errorf("%q is %q and %d", text, host, port)
		}
	}
}

func jsonOf(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The receiver of plain sockets, or the side that asks, has the result.
func TestPlainSocketsInBothDirectionsReturnResult(t *testing.T) {
	r := &run{ctx: context.Background()}
	for _, back := range []bool{false, true} {
		found, err := r.onLoopback(0, plain{Sockets: measure.Sockets{Threads: 2, Each: 2}, Duration: 5 * time.Millisecond,
			Back: back})
		if err != nil || found.GBs <= 0 {
			t.Errorf("a stream (back: %v): %+v, %v", back, found, err)
		}
		found, err = r.onLoopback(0, plain{Sockets: measure.Sockets{Threads: 1, Each: 1}, Size: 8,
			Duration: 5 * time.Millisecond, Back: back})
		if err != nil || found.Times == nil || found.Times.P50 <= 0 {
			t.Errorf("8 bytes (back: %v): %+v, %v", back, found, err)
		}
	}
	// Connections without the token do not count.
	l, err := listenPlain(r.ctx, netip.MustParseAddr("127.0.0.1"), config.Default().Network)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	c, err := net.Dial("tcp4", l.address().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(bytes.Repeat([]byte{0}, tokenBytes)); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a stranger reads %d bytes, %v", n, err)
	}
}

// A row names one transport per direction; a change of the transport is an error.
func TestRowsOfChangingTransportAreRefused(t *testing.T) {
	by := func(outbound, back string) (sees [2]launch.ConnectionFigures) {
		sees[0].Transport, sees[1].Transport = outbound, back
		return sees
	}
	for _, c := range []struct {
		before, after string
		want          error
	}{
		{"verbs verbs", "verbs verbs", nil}, {"verbs tcp", "verbs tcp", nil},
		{"tcp verbs", "verbs verbs", &transportError{"A", "B", "tcp", "verbs"}},
		{"verbs verbs", "verbs tcp", &transportError{"B", "A", "verbs", "tcp"}},
		{"verbs verbs", "verbs ", &transportError{"B", "A", "verbs", ""}},
	} {
		outbound, back, _ := strings.Cut(c.before, " ")
		after, afterBack, _ := strings.Cut(c.after, " ")
		err := checkTransports([2]string{"A", "B"}, by(outbound, back), by(after, afterBack))
		if !testutil.HasError(err, c.want) {
			t.Errorf("%s, then %s: %v", c.before, c.after, err)
		}
		got := transports(by(outbound, back))
		if mixes := outbound != back; mixes != (got != outbound) || !strings.Contains(got, outbound) ||
			!strings.Contains(got, back) {
			t.Errorf("to and fro over %s is %q", c.before, got)
		}
	}
}

func TestResultOfTwoHostsIsPrinted(t *testing.T) {
	r := &Report{
		Version: version, Host: "A is a; B is b", GPUs: []string{"GPU"}, Hosts: []Side{{Name: "a"}, {Name: "b"}},
		Rows: []Row{
			{Table: tableHosts, What: "A to B", Route: staged, Transport: "tcp", Size: 64 << 10, Depth: 1, Value: 1, Unit: GBs,
				Baseline: "plain TCP A to B"},
			{Table: tableHosts, What: "A to B", Route: staged, Transport: "tcp", Size: 16 << 20, Depth: 16, Value: 9, Unit: GBs,
				Baseline: "plain TCP A to B"},
			{Table: tableHosts, What: "A to B, from post to completion", Route: staged, Transport: "tcp", Size: 8, Depth: 1,
				Value: 20, Unit: microseconds,
				Times: &measure.Times{Count: 9, P50: 20, P90: 21, P99: 30, P999: 40, Max: 41}, Baseline: "plain TCP A to B, 8 B"},
			{Table: tableHosts, What: "B to A", Route: staged, Transport: "tcp", Size: 16 << 20, Depth: 16, Value: 5, Unit: GBs,
				Baseline: "plain TCP B to A"},
		},
		Baselines: []Baseline{{Name: "plain TCP A to B", Value: 10, Unit: GBs},
			{Name: "plain TCP B to A", Value: 10, Unit: GBs}, {Name: "plain TCP A to B, 8 B", Value: 10, Unit: microseconds}},
	}
	if err := r.check(); err != nil {
		t.Fatal(err)
	}
	if got, want := r.Summary(), "A to B 9 GB/s over tcp, 0.90 of plain TCP; B to A 5 GB/s over tcp, 0.50 of plain "+
		"TCP; 8 B in 20.0 µs, p99 30.0 (2.00 of plain TCP's time)."; got != want {
		t.Errorf("the summary is %q, want %q", got, want)
	}
	if v := r.Verdicts(); len(v) != 1 || v[0].Verdict != "reported" {
		t.Errorf("the verdicts are %+v", v)
	}
	if svg := r.SVG(); !bytes.Contains(svg, []byte("two hosts, 1 × GPU")) ||
		!bytes.Contains(svg, []byte("plain TCP A to B")) {
		t.Error("the plot does not say that it is of two hosts, or has no baseline")
	}
	r.Simulated = true
	if err := r.check(); !errors.Is(err, errMixed) {
		t.Errorf("real and simulated GPUs: %v", err)
	}
	r.Hosts[0].Simulated, r.Hosts[1].Simulated = true, true
	if got := r.Summary(); !strings.Contains(got, "simulated") {
		t.Errorf("the summary is %q", got)
	}
	r.Hosts = r.Hosts[:1]
	if err := r.check(); err == nil {
		t.Error("a result of one of two hosts is taken")
	}
}

// FuzzTaskParseKeepsValue checks that parseTask refuses a text or returns a task within the
// limits.
func FuzzTaskParseKeepsValue(f *testing.F) {
	for _, text := range []string{
		`{"do": "send", "size": 8, "depth": 1, "duration": 1000}`,
		`{"task": "plain", "plain": {"threads": 4, "each": 2, "duration": 5}}`,
		`{"task": "attach", "bytes": 1, "transport": "tcp"}`, `{"task": "meet", "side": {}}`, `{"task": "end"}`,
		`{"do": "attach", "socket": "/"}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		e, err := parseTask(line)
		if err != nil {
			return
		}
		if p := e.Plain; e.Task == taskPlain && (p.Count() < 1 || p.Count() > maxSockets || p.Duration <= 0 ||
			p.Duration > maxDuration) {
			t.Errorf("plain sockets %+v", p)
		}
		if e.Bytes > maxBytes || e.Size > maxBytes || e.Duration < 0 || e.Duration > maxDuration || e.Depth < 0 ||
			e.Depth > maxDepth || e.Socket != "" || e.Do == doAttach && e.Task == "" {
			t.Errorf("%s is taken: %+v", line, e)
		}
	})
}
