package relay

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// greetingPair is a connection at the begin of the handshake, with the remote end.
func greetingPair(t *testing.T) (ours, theirs packet.Conn) {
	t.Helper()
	a, b, err := packet.Pair()
	if err != nil {
		t.Fatal(err)
	}
	if ours, err = packet.FromFD(a, "ours"); err != nil {
		unix.Close(b)
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close() })
	if theirs, err = packet.FromFD(b, "theirs"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { theirs.Close() })
	return ours, theirs
}

func (g *pendingHandshakes) evicted(c packet.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused[c]
}

func TestGreetingsFloodEvictsFlooderOnly(t *testing.T) {
	const honest, flooder = 1, 2
	g := &pendingHandshakes{from: packet.Relays}
	first, _ := greetingPair(t)
	g.add(first, honest)
	silent, _ := greetingPair(t)
	g.add(silent, flooder)
	// This peer has sent a hello, which the relay has not read yet.
	said, client := greetingPair(t)
	if err := client.Send(&wire.PeerHello{}, 1); err != nil {
		t.Fatal(err)
	}
	g.add(said, flooder)
	for range maxGreetingsOfUID {
		c, _ := greetingPair(t)
		g.add(c, flooder)
	}
	if g.evicted(first) || !g.evicted(silent) || g.evicted(said) {
		t.Errorf("evicted: the honest connection %v, the flooder's silent one %v, its other one %v", g.evicted(first),
			g.evicted(silent), g.evicted(said))
	}
	if err := silent.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := g.receive(silent); !errors.Is(err, errSilent) {
		t.Errorf("an evicted connection: %v", err)
	}
	if _, err := g.receive(said); err != nil {
		t.Error(err)
	}
}

// Many users do not get more than their share.
func TestGreetingsManyUsersEvictLargestShare(t *testing.T) {
	g := &pendingHandshakes{from: packet.Relays}
	var large []packet.Conn
	for range maxGreetingsOfUID {
		c, _ := greetingPair(t)
		g.add(c, 0)
		large = append(large, c)
	}
	for uid := range uint32(maxGreetings - maxGreetingsOfUID + 1) {
		c, _ := greetingPair(t)
		g.add(c, uid+1)
	}
	if !g.evicted(large[0]) || len(g.refused) != 1 || len(g.waiting) != maxGreetings {
		t.Errorf("%d are evicted, %d wait", len(g.refused), len(g.waiting))
	}
}

// A connection counts for the user of the process.
func TestGreetingsCountForUserOfPeerProcess(t *testing.T) {
	c, _ := greetingPair(t)
	if uid := uidOf(c); uid != uint32(unix.Geteuid()) {
		t.Errorf("uid %d", uid)
	}
	c.Close()
	if uid := uidOf(c); uid != unknownUID {
		t.Errorf("uid %d of a closed connection", uid)
	}
}
