package measure

import (
	"errors"
	"net"
	"testing"
	"time"
)

func TestPercentilesOfSamplesAreExact(t *testing.T) {
	if TimesOf(nil) != nil {
		t.Error("no times have percentiles")
	}
	var list []time.Duration
	for i := 2000; i > 0; i-- {
		list = append(list, time.Duration(i)*time.Microsecond)
	}
	if got, want := *TimesOf(list), (Times{2000, 1001, 1801, 1981, 1999, 2000}); got != want {
		t.Errorf("1 to 2000 µs have %+v, want %+v", got, want)
	}
	if got := TimesOf([]time.Duration{5 * time.Microsecond}); got.P50 != 5 || got.Max != 5 {
		t.Errorf("one duration gives %+v", got)
	}
}

func TestRingTimesArePositive(t *testing.T) {
	r, err := (&copies{}).Do(Job{Kind: Ring, Duration: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if r.Times == nil || r.Times.Count < 1 || r.Times.P50 <= 0 {
		t.Errorf("operations through a ring took %+v", r.Times)
	}
}

// aPipe returns both ends of n TCP connections over loopback.
func aPipe(t *testing.T, n int) (ours, theirs []*net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range n {
		c, err := net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
		if err != nil {
			t.Fatal(err)
		}
		other, err := l.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close(); other.Close() })
		ours, theirs = append(ours, c), append(theirs, other)
	}
	return ours, theirs
}

func TestPlainSocketsMoveBytes(t *testing.T) {
	how := Sockets{Threads: 2, Each: 2}
	ours, theirs := aPipe(t, how.Count())
	sent := make(chan error, 1)
	go func() { sent <- how.Send(ours, 5*time.Millisecond) }()
	gbs, err := ReceiveAll(theirs, 5*time.Millisecond)
	if err := errors.Join(err, <-sent); err != nil || gbs <= 0 {
		t.Errorf("%v GB/s, %v", gbs, err)
	}
	// Every connection gets data, even if the time is over before the first write.
	ours, theirs = aPipe(t, how.Count())
	go func() { sent <- how.Send(ours, 0) }()
	gbs, err = ReceiveAll(theirs, 0)
	if err := errors.Join(err, <-sent); err != nil || gbs <= 0 {
		t.Errorf("%v GB/s in no time, %v", gbs, err)
	}
	ours, theirs = aPipe(t, 1)
	answered := make(chan error, 1)
	go func() { answered <- AnswerSocket(theirs[0], 8) }()
	times, err := AskSocket(ours[0], 8, 5*time.Millisecond)
	if err := errors.Join(err, <-answered); err != nil || len(times) == 0 {
		t.Errorf("%d answers, %v", len(times), err)
	}
	// If the peer closes its connections, the result is an error, not a rate.
	ours, theirs = aPipe(t, 1)
	if err := ours[0].SetLinger(0); err != nil {
		t.Fatal(err)
	}
	ours[0].Close()
	if gbs, err := ReceiveAll(theirs, time.Second); err == nil {
		t.Errorf("%v GB/s after a reset", gbs)
	}
}
