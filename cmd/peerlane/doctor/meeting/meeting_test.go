package meeting

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

func side(name string, key network.Key) Side {
	return Side{Name: name, Keys: func() network.Keys { return network.Keys{Current: key} }, bulkTimeout: time.Minute}
}

var theirs = Facts{
	Host: "there", Release: "v1", Oldest: 1, Newest: 1, Keys: []string{"k"}, Ports: "20000-20999",
	Interfaces: []Interface{{Name: "eth0", Addresses: []string{"10.0.0.2"}, MTU: 1500, Mbps: 1000}},
	Rails:      []Rail{{Rail: 1, NIC: "mlx5_1", LinkLayer: "InfiniBand", Gbps: 400}},
}

// listen returns a listener on loopback, wrapped by change, and its address.
func listen(t *testing.T, change func(net.Listener) net.Listener) (net.Listener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	return change(l), at
}

func asItIs(l net.Listener) net.Listener { return l }

// serve runs a doctor on the listener until the test ends.
func serve(t *testing.T, l net.Listener, s Side) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- Serve(l, s, func() Facts { return theirs }, func(net.Addr, error) {}) }()
	t.Cleanup(func() {
		l.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestTwoDoctorsMeet(t *testing.T) {
	key := network.NewKey(time.Now())
	l, at := listen(t, asItIs)
	serve(t, l, side("there", key))
	gone, nobody := listen(t, asItIs)
	gone.Close()
	m := Meet(context.Background(), side("here", key), []netip.AddrPort{nobody, at})
	if m.At != at {
		t.Errorf("met at %v, want %v", m.At, at)
	}
	if m.Err != nil || m.Stuck != nil || !m.Connected || !m.Proven || !reflect.DeepEqual(m.Theirs, theirs) {
		t.Fatalf("%+v", m)
	}
	// Both sides use one clock over loopback.
	if m.Offset.Abs() > m.Uncertainty || m.Uncertainty <= 0 || m.PathMTU < 1500 ||
		m.Ours != netip.MustParseAddr("127.0.0.1") || !strings.HasPrefix(m.Peer, "there at ") {
		t.Errorf("%+v", m)
	}
}

func TestMeetingWithoutKeyGetsNoAnswer(t *testing.T) {
	l, at := listen(t, asItIs)
	serve(t, l, side("there", network.NewKey(time.Now())))
	m := Meet(context.Background(), side("here", network.NewKey(time.Now())), []netip.AddrPort{at})
	if !errors.Is(m.Err, network.ErrSilent) || !m.Connected || m.Proven || m.Theirs.Host != "" {
		t.Errorf("%+v", m)
	}
}

func TestMeetingWithoutListenerFails(t *testing.T) {
	l, at := listen(t, asItIs)
	l.Close()
	if m := Meet(context.Background(), side("here", network.NewKey(time.Now())), []netip.AddrPort{at}); m.Err == nil ||
		m.Connected {
		t.Errorf("%+v", m)
	}
}

func TestMeetingWithRelayFails(t *testing.T) {
	key := network.NewKey(time.Now())
	l, at := listen(t, asItIs)
	relay := &network.Server{
		Local: &network.Local{Host: wire.UUID{7}, Name: "relay", Oldest: 1, Newest: 1,
			Keys: func() network.Keys { return network.Keys{Current: key} }},
		Admit:   func(network.Greeting) error { return nil },
		Accept:  func(s *network.Session) { s.Conn.Close() },
		Refused: func(net.Addr, error) {},
	}
	ended := make(chan struct{})
	go func() { defer close(ended); relay.Serve(l) }()
	defer func() { l.Close(); <-ended }()
	if m := Meet(context.Background(), side("here", key), []netip.AddrPort{at}); wire.StatusOf(
		m.Err) != wire.StatusBadHandle || !m.Proven {
		t.Errorf("%+v", m)
	}
}

// narrow is a listener that delivers a limited number of bytes per connection, as if a switch
// dropped packets of full size.
type narrow struct {
	net.Listener
	max int64
}

func (n narrow) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	if err != nil {
		return nil, err
	}
	left := &atomic.Int64{}
	left.Store(n.max)
	return narrowConn{c, left}, nil
}

type narrowConn struct {
	net.Conn
	left *atomic.Int64
}

func (c narrowConn) Read(p []byte) (int, error) {
	left := c.left.Load()
	if left <= 0 { // discard until the peer gives up
		one := make([]byte, 4096)
		for {
			if _, err := c.Conn.Read(one); err != nil {
				return 0, io.EOF
			}
		}
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), left)])
	c.left.Add(-int64(n))
	return n, err
}

func TestMeetingReportsStuckBytes(t *testing.T) {
	key := network.NewKey(time.Now())
	l, at := listen(t, func(l net.Listener) net.Listener { return narrow{l, 100 << 10} })
	serve(t, l, side("there", key))
	ours := side("here", key)
	ours.bulkTimeout = 100 * time.Millisecond
	m := Meet(context.Background(), ours, []netip.AddrPort{at})
	if m.Err != nil || !errors.Is(m.Stuck, os.ErrDeadlineExceeded) || m.Theirs.Host != "there" {
		t.Errorf("%+v", m)
	}
}

// Meet returns when its context ends, even if no doctor answers.
func TestMeetingEndsWithItsContext(t *testing.T) {
	l, at := listen(t, asItIs)
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	begun := time.Now()
	m := Meet(ctx, side("here", network.NewKey(time.Now())), []netip.AddrPort{at})
	if m.Err == nil || !m.Connected && !errors.Is(m.Err, context.DeadlineExceeded) || time.Since(begun) > time.Minute {
		t.Errorf("%+v after %v", m, time.Since(begun))
	}
}

func TestParseFactsSanitisesText(t *testing.T) {
	for text, want := range map[string]error{
		`{"host":"a\u001b[2Jb","release":"` + strings.Repeat("x", 1000) + `"}`: nil,
		`{"host":"a\u009b[2Jb","release":"` + strings.Repeat("y", 1000) + `"}`: nil,
		`{"keys":["1","2","3"]}`:        &factsError{keys: 3},
		`{"oldest":2,"newest":1}`:       &factsError{oldest: 2, newest: 1},
		`{"host":7}`:                    &json.UnmarshalTypeError{Value: "number"},
		strings.Repeat(" ", maxFacts+1): &sizeError{maxFacts + 1},
	} {
		f, err := parseFacts([]byte(text))
		if !testutil.HasError(err, want) || want == nil && (f.Host != "a [2Jb" || len(f.Release) != maxText) {
			t.Errorf("%.40q: %+v, %v", text, f, err)
		}
	}
}

func FuzzFacts(f *testing.F) {
	text, err := theirs.text()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"interfaces":[{"addresses":["x"]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		facts, err := parseFacts(text)
		if err != nil {
			return
		}
		if strings.ContainsAny(facts.Host+facts.Release+facts.Why, "\n\x1b\u009b") || len(facts.Host) > maxText ||
			len(facts.Interfaces) > maxList {
			t.Errorf("%+v", facts)
		}
		if _, err := facts.text(); err != nil {
			t.Errorf("%+v: %v", facts, err)
		}
	})
}
