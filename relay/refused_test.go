package relay

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/network"
)

// A connection closed after the handshake is usually the loser of a race: that is nothing to warn
// of.
func TestPeerClosedAfterHandshakeIsNotWarnedAbout(t *testing.T) {
	f := newFleet(t, 2, 1)
	handle := f.listen(t, 1, nil)
	logged := make(levels, 100)
	testutil.HookLog(t, logrus.DebugLevel, logged)
	at := f.relays[1].hosts.rails.listening[0].endpoint
	s, err := f.relays[0].hosts.local.Dial(t.Context(), network.Target{Host: handle.Host, Token: handle.Token},
		at.Dials(f.relays[0].hosts.rails.addresses))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s.Conn, make([]byte, 1)); err != nil { // it may come in
		t.Fatal(err)
	}
	if _, err := s.HearRails(); err != nil {
		t.Fatal(err)
	}
	s.Conn.Close()
	select {
	case level := <-logged:
		if level != logrus.DebugLevel {
			t.Errorf("it is logged as %v", level)
		}
	case <-testutil.After(time.Minute):
		t.Error("nothing is logged of it")
	}
	f.relays[1].refused(logrus.NewEntry(logrus.StandardLogger()), network.ErrStranger,
		"a relay of another host was refused")
	if level := <-logged; level != logrus.WarnLevel {
		t.Errorf("a stranger is logged as %v", level)
	}
}

// levels are the levels of logged refusals.
type levels chan logrus.Level

func (levels) Levels() []logrus.Level { return logrus.AllLevels }

func (l levels) Fire(e *logrus.Entry) error {
	if strings.Contains(e.Message, "refused") {
		l <- e.Level
	}
	return nil
}
