package relay

import (
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// What a relay holds for its clients is bounded over all of them (launch.Limits):
// each bound of a single session would else be worth as much as processes can be
// started.

// use is what one thing of a client's takes.
type use struct {
	memories, connections, descriptors int
	host                               uint64 // bytes of host memory that is made here
	foreign                            uint64 // of other containers' that is mapped to be written
	staging                            uint64 // on server GPUs, for clients that copy themselves
}

var (
	// socket, pidfd, eventfd, the pipe's end, two memories
	ofSession = use{descriptors: 6}
	// socket, the NIC's or the immediates', and a region's on its way
	ofConnection = use{connections: 1, descriptors: 3}
)

// spareDescriptors are for what belongs to no client: listeners, devices,
// handshakes, staging.
const spareDescriptors = 512

// descriptorLimit is how many files the relay may open for clients.
func descriptorLimit(limit int) int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || r.Cur > uint64(limit)+spareDescriptors {
		return limit
	}
	return max(int(r.Cur)-spareDescriptors, int(r.Cur)/2)
}

// reserve counts what a client is about to take, or says which limit is reached.
// It belongs to the loop.
func (r *Relay) reserve(u use) error {
	for _, c := range []struct {
		have, more, limit int
		what, key         string
	}{
		{r.used.memories, u.memories, r.limits.Memories, "memories are exported", "memories"},
		{r.used.connections, u.connections, r.limits.Connections, "connections are open", "connections"},
		{r.used.descriptors, u.descriptors, r.limits.Descriptors, "files are open for its clients", "descriptors"},
	} {
		if c.more > 0 && c.have+c.more > c.limit {
			return wire.Errorf(wire.StatusLimit, "%d %s in %s, whose limit is %d (relay.limits.%s in config.toml)", c.have, c.what, r.name(), c.limit, c.key)
		}
	}
	for _, c := range []struct {
		have, more uint64
		what       string
	}{
		{r.used.host, u.host, "of host memory are made for the clients"},
		{r.used.foreign, u.foreign, "of other containers' host memory are mapped"},
	} {
		if limit := r.limits.HostMemory; c.more > 0 && (c.more > limit || c.have > limit-c.more) {
			return wire.Errorf(wire.StatusLimit, "%s more is asked for, and %s %s in %s, whose limit is %s (relay.limits.host_memory in config.toml)",
				humanize.IBytes(c.more), humanize.IBytes(c.have), c.what, r.name(), humanize.IBytes(limit))
		}
	}
	if limit := r.limits.Staging; u.staging > 0 && (u.staging > limit || r.used.staging > limit-u.staging) {
		return wire.Errorf(wire.StatusLimit, "%s more of staging memory is asked for, and the clients in %s have %s, whose limit is %s (relay.limits.staging in config.toml)",
			humanize.IBytes(u.staging), r.name(), humanize.IBytes(r.used.staging), humanize.IBytes(limit))
	}
	r.used.host += u.host
	r.used.staging += u.staging
	r.used.foreign += u.foreign
	r.used.memories += u.memories
	r.used.connections += u.connections
	r.used.descriptors += u.descriptors
	return nil
}

// giveBack ends a reserve.
func (r *Relay) giveBack(u use) {
	r.used.host -= u.host
	r.used.staging -= u.staging
	r.used.foreign -= u.foreign
	r.used.memories -= u.memories
	r.used.connections -= u.connections
	r.used.descriptors -= u.descriptors
}

// maxGreetings bounds the connections that have not said their hello, of clients
// and of relays each.
const maxGreetings = 64

// greetings are connections that have not said their hello. When there are too
// many the oldest has to go: who means it says hello at once, so that whoever
// connects and is silent keeps nobody out.
type greetings struct {
	from *packet.Source

	mu      sync.Mutex
	waiting []packet.Conn
	refused map[packet.Conn]bool
}

// errSilent is why a connection had to go.
var errSilent = wire.Errorf(wire.StatusLimit, "%d connections that had not said hello came after this one, which had not either", maxGreetings)

// begin takes a connection in, and has the oldest go where there are too many.
func (g *greetings) begin(conn packet.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting = append(g.waiting, conn)
	if len(g.waiting) <= maxGreetings {
		return
	}
	oldest := g.waiting[0]
	g.waiting = g.waiting[1:]
	if g.refused == nil {
		g.refused = map[packet.Conn]bool{}
	}
	g.refused[oldest] = true
	// Its goroutine reads, or will; that ends now.
	_ = oldest.SetReadDeadline(time.Unix(1, 0)) // fails where it is closed, and not waited for
}

// receive reads the first message of a connection, which brings no descriptors.
func (g *greetings) receive(conn packet.Conn) (wire.Message, error) {
	// Whoever has to go meanwhile has his deadline already.
	err := conn.SetWriteDeadline(time.Now().Add(handshakeTime))
	timer := time.AfterFunc(handshakeTime, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	var m wire.Message
	if err == nil {
		m, _, err = conn.ReceiveBare()
	}
	timer.Stop()
	if !g.end(conn) && err != nil {
		err = errSilent
	}
	return m, err
}

// end takes a connection out that has said its hello, or has gone. It reports
// false where it had to go.
func (g *greetings) end(conn packet.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refused[conn] {
		delete(g.refused, conn)
		return false
	}
	for i, c := range g.waiting {
		if c == conn {
			g.waiting = append(g.waiting[:i:i], g.waiting[i+1:]...)
			break
		}
	}
	return true
}

// grumble bounds what strangers can make a relay write into its log: some lines a
// minute, and then how many more there would have been.
type grumble struct {
	mu    sync.Mutex
	since time.Time
	lines int
}

const (
	grumbleTime  = time.Minute
	grumbleLines = 20
)

// warn logs a warning about what somebody else does.
func (g *grumble) warn(log *logrus.Entry, err error, what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if now.Sub(g.since) > grumbleTime {
		if more := g.lines - grumbleLines; more > 0 {
			logrus.Warnf("%d more of such warnings were left out", more)
		}
		g.since, g.lines = now, 0
	}
	g.lines++
	if g.lines <= grumbleLines {
		log.WithError(err).Warn(what)
	}
	if g.lines == grumbleLines {
		logrus.Warn("more of such warnings are left out for a minute")
	}
}

// limit takes over a configuration's limits.
func (r *Relay) limit(l launch.Limits) {
	r.limits = l.WithDefaults()
	r.limits.Descriptors = descriptorLimit(r.limits.Descriptors)
}
