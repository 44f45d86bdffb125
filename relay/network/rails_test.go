package network

import (
	"errors"
	"net"
	"net/netip"
	"reflect"
	"testing"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

func railAt(number int, at string, lane bool) Rail {
	return Rail{
		Number:    number,
		Endpoint:  address.Endpoint{Address: netip.MustParseAddr(at), Port: 20000},
		Interface: "ens1f0np0",
		Lane:      lane,
	}
}

// sessionPair is a session's two ends.
func sessionPair(t *testing.T) (a, b *Session) {
	t.Helper()
	one, other := relays(newKeys())
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	i, l := shake(
		func() (*Session, error) { return one.Initiate(ours, toB) },
		func() (*Session, error) { return other.Respond(theirs, admitB) },
		ours,
		theirs,
	)
	if i.err != nil || l.err != nil {
		t.Fatal(i.err, l.err)
	}
	return i.session, l.session
}

// Rails arrive unchanged at the remote side.
func TestRailsReachTheOtherSide(t *testing.T) {
	all := []Rail{
		railAt(0, "10.0.0.1", true),
		railAt(7, "2001:db8::1", false),
		railAt(-1, "fe80::1", false),
		railAt(1023, "10.0.3.1", true),
	}
	full := make([]Rail, MaxRails)
	for i := range full {
		full[i] = railAt(i, "10.0.0.1", true)
	}
	for _, told := range [][]Rail{{}, all[:1], all, full} {
		a, b := sessionPair(t)
		for _, way := range [][2]*Session{{a, b}, {b, a}} {
			said := make(chan error, 1)
			go func() { said <- way[0].TellRails(told) }()
			heard, err := way[1].HearRails()
			if err != nil || <-said != nil || !reflect.DeepEqual(heard, told) {
				t.Errorf("told %v, heard %v, %v", told, heard, err)
			}
		}
	}
	a, _ := sessionPair(t)
	if err := a.TellRails(append(full, full[0])); err == nil {
		t.Error("more than there is room for are told")
	}
}

// Changed, reflected and replayed rails are refused: a relay would connect to a wrong address.
func TestChangedRailsAreRefused(t *testing.T) {
	sealed := func(s *Session) []byte {
		t.Helper()
		recorder, other := net.Pipe()
		defer recorder.Close()
		s.Conn = other
		go func() { _ = s.TellRails([]Rail{railAt(0, "10.0.0.1", true)}); other.Close() }()
		b := make([]byte, railsBytes+tagBytes)
		n := 0
		for n < len(b) {
			k, err := recorder.Read(b[n:])
			if n += k; err != nil {
				t.Fatal(err)
			}
		}
		return b
	}
	hear := func(s *Session, b []byte) error {
		ours, theirs := net.Pipe()
		defer ours.Close()
		s.Conn = theirs
		go func() { _, _ = ours.Write(b); ours.Close() }()
		_, err := s.HearRails()
		return err
	}
	a, b := sessionPair(t)
	c, d := sessionPair(t)
	good := sealed(a)
	if err := hear(b, good); err != nil {
		t.Fatal(err)
	}
	changed := append([]byte(nil), good...)
	changed[20] ^= 1
	for name, err := range map[string]error{
		"changed":            hear(b, changed),
		"its own, sent back": hear(a, good),
		"another session's":  hear(d, good),
		"nobody's":           hear(c, make([]byte, len(good))),
	} {
		if wire.StatusOf(err) != wire.StatusMalformed || !errors.Is(err, errForeignRails) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := hear(b, good[:len(good)-1]); err == nil {
		t.Error("a part is taken for the whole")
	}
}

// A connection by an interface uses that interface or fails.
func TestConnectionByInterfaceUsesThatInterface(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, b := relays(newKeys())
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = b.Respond(conn, admitB)
		}
	}()
	to := []netip.AddrPort{netip.MustParseAddrPort(l.Addr().String())}
	var by *interfaceError
	if _, err := a.DialBy(t.Context(), "peerlane-none", toB, to); !errors.As(err, &by) || by.name != "peerlane-none" {
		t.Errorf("by an interface that there is not: %v", err)
	}
	s, err := a.DialBy(t.Context(), "lo", toB, to)
	if err != nil {
		t.Fatal(err)
	}
	s.Conn.Close()
}

func TestInvalidRailsAreRefused(t *testing.T) {
	for name, change := range map[string]func([]byte){
		"more than there is room for": func(b []byte) {
			for i := range MaxRails {
				copy(b[8+i*railBytes:], b[8:8+railBytes])
			}
			b[0] = MaxRails + 1
		},
		"a number below none": func(b []byte) { copy(b[8:], []byte{0xfe, 0xff, 0xff, 0xff}) },
		"a number above all":  func(b []byte) { copy(b[8:], []byte{0, 4, 0, 0}) },
		"unknown flags":       func(b []byte) { b[12] = 2 },
		"no address":          func(b []byte) { b[0] = 2 },
		"no port":             func(b []byte) { b[16+16], b[16+17] = 0, 0 },
	} {
		b := encodeRails([]Rail{railAt(0, "10.0.0.1", true)})
		change(b)
		if rails, err := decodeRails(b); wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("%s: %v, %v", name, rails, err)
		}
	}
}

// Invalid rails are refused, and accepted rails are the sent rails.
func FuzzRails(f *testing.F) {
	f.Add(encodeRails(nil))
	f.Add(encodeRails([]Rail{railAt(0, "10.0.0.1", true), railAt(-1, "2001:db8::1", false)}))
	bad := encodeRails([]Rail{railAt(0, "10.0.0.1", true)})
	bad[0] = 2 // the second one has no address
	f.Add(bad)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, text []byte) {
		rails, err := decodeRails(text)
		if err != nil {
			return
		}
		if len(rails) > MaxRails {
			t.Fatalf("%d rails", len(rails))
		}
		for _, r := range rails {
			if r.Number < -1 || r.Number > maxRail || r.Endpoint.Port == 0 || !address.Usable(r.Endpoint.Address) ||
				len(r.Interface) > 3*interfaceBytes {
				t.Errorf("%+v", r)
			}
		}
		again, err := decodeRails(encodeRails(rails))
		if err != nil || len(again) != len(rails) {
			t.Errorf("%v, then %v, %v", rails, again, err)
		}
	})
}
