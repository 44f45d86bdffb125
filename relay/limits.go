package relay

import (
	"fmt"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// launch.Limits bounds the resources of a relay's clients together: otherwise a container could
// evade per-session limits by starting more processes.

// quota is the resource use of a client's object.
type quota struct {
	memories, connections, descriptors int
	host                               uint64 // bytes of host memory that is made here
	foreign                            uint64 // of other containers' that is mapped to be written
	staging                            uint64 // on server GPUs, for clients that copy themselves
	own                                uint64 // of the relay's hostAccount
}

var (
	// socket, pidfd, eventfd, the pipe's end, two memories
	ofSession = quota{descriptors: 6, own: wire.SubmitBytes + wire.CompleteBytes}
	// socket, the NIC's or the immediates', and a region's on its way
	ofConnection = quota{connections: 1, descriptors: 3, own: uint64(packet.SharedBytes(true))}
)

// spareDescriptors are for files without a client: listeners, devices, handshakes, staging.
const spareDescriptors = 512

// descriptorLimit is how many files the relay may open for clients.
func descriptorLimit(limit int) int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || r.Cur > uint64(limit)+spareDescriptors {
		return limit
	}
	return max(int(r.Cur)-spareDescriptors, int(r.Cur)/2)
}

// limitMet returns the error of a limit that a key of config.toml sets.
func limitMet(key, format string, arguments ...any) error {
	return wire.Errorf(wire.StatusLimit, "%w", &fault.Error{Code: fault.LimitMet, Operation: fmt.Sprintf(format,
		arguments...), Remedy: "free memory or connections, or raise " + key + " in config.toml"}).On(key)
}

// reserve counts a client's new resources, or returns an error that names the reached limit. Call
// reserve on the loop.
func (r *Relay) reserve(u quota) error {
	for _, c := range []struct {
		have, more, limit int
		what, key         string
	}{
		{r.used.memories, u.memories, r.limits.Memories, "memories are exported", "memories"},
		{r.used.connections, u.connections, r.limits.Connections, "connections are open", "connections"},
		{r.used.descriptors, u.descriptors, r.limits.Descriptors, "files are open for its clients", "descriptors"},
	} {
		if c.more > 0 && c.have+c.more > c.limit {
			return limitMet("relay.limits."+c.key, "%d %s in %s, whose limit is %d", c.have, c.what, r.name(), c.limit)
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
			return limitMet("relay.limits.host_memory", "%s more is asked for, and %s %s in %s, whose limit is %s",
				humanize.IBytes(c.more), humanize.IBytes(c.have), c.what, r.name(), humanize.IBytes(limit))
		}
	}
	if limit := r.limits.Staging; u.staging > 0 && (u.staging > limit || r.used.staging > limit-u.staging) {
		return limitMet("relay.limits.staging",
			"%s more of staging memory is asked for, and the clients in %s have %s, whose limit is %s",
			humanize.IBytes(u.staging), r.name(), humanize.IBytes(r.used.staging), humanize.IBytes(limit))
	}
	if u.own > 0 {
		if err := r.own.take(u.own, r.name()); err != nil {
			return err
		}
	}
	r.used.host += u.host
	r.used.staging += u.staging
	r.used.foreign += u.foreign
	r.used.memories += u.memories
	r.used.connections += u.connections
	r.used.descriptors += u.descriptors
	return nil
}

// release ends a reserve.
func (r *Relay) release(u quota) {
	r.own.release(u.own)
	r.used.host -= u.host
	r.used.staging -= u.staging
	r.used.foreign -= u.foreign
	r.used.memories -= u.memories
	r.used.connections -= u.connections
	r.used.descriptors -= u.descriptors
}

// Limits of connections without a hello, separate for clients and relays. A relay has a separate
// uid, and so a separate share of the connections.
const (
	maxGreetings      = 256 // in all
	maxGreetingsOfUID = 64
)

// pendingHandshakes are the connections that have not said hello, oldest first. When a uid has too
// many connections, pendingHandshakes evicts a connection of that uid; when the total is too large,
// a connection of the uid with the most. So a flooding process evicts only connections of the same
// user. The evicted connection is the oldest that has sent nothing.
type pendingHandshakes struct {
	from *packet.Source

	mu      sync.Mutex
	waiting []greeting
	refused map[packet.Conn]bool
}

// greeting is a connection without a hello, and the uid of the connecting process.
type greeting struct {
	conn packet.Conn
	uid  uint32
}

// errSilent is why a connection was evicted.
var errSilent = wire.Errorf(wire.StatusBusy,
	"%d connections of the same user, or %d of all, that had not said hello came after this one, which had not either",
	maxGreetingsOfUID, maxGreetings)

// unknownUID stands for a uid that the kernel does not tell.
const unknownUID = ^uint32(0)

// begin adds a connection, and evicts one above the limits.
func (g *pendingHandshakes) begin(conn packet.Conn) { g.add(conn, uidOf(conn)) }

func (g *pendingHandshakes) add(conn packet.Conn, uid uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting = append(g.waiting, greeting{conn, uid})
	count := map[uint32]int{}
	for _, w := range g.waiting {
		count[w.uid]++
	}
	if count[uid] > maxGreetingsOfUID {
		g.evict(uid)
		return
	}
	if len(g.waiting) <= maxGreetings {
		return
	}
	most := g.waiting[0].uid
	for _, w := range g.waiting {
		if count[w.uid] > count[most] {
			most = w.uid
		}
	}
	g.evict(most)
}

// evict ends the wait for a connection of a uid with at least one.
func (g *pendingHandshakes) evict(uid uint32) {
	evicted := -1
	for i, w := range g.waiting {
		if w.uid != uid {
			continue
		}
		if evicted < 0 {
			evicted = i
		}
		if !unread(w.conn) {
			evicted = i
			break
		}
	}
	conn := g.waiting[evicted].conn
	g.waiting = append(g.waiting[:evicted:evicted], g.waiting[evicted+1:]...)
	if g.refused == nil {
		g.refused = map[packet.Conn]bool{}
	}
	g.refused[conn] = true
	// Its goroutine reads, or will; that ends now.
	_ = conn.SetReadDeadline(time.Unix(1, 0)) // fails where it is closed, and not waited for
}

// uidOf is the uid of the process that made a connection.
func uidOf(conn packet.Conn) uint32 {
	uid := unknownUID
	control(conn, func(fd int) {
		if credentials, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid = credentials.Uid
		}
	})
	return uid
}

// unread reports whether a connection has an unread message.
func unread(conn packet.Conn) bool {
	n := 0
	control(conn, func(fd int) {
		n, _ = unix.IoctlGetInt(fd, unix.SIOCINQ) // 0 where it fails
	})
	return n > 0
}

// control calls f with the descriptor of a connection, unless that is closed.
func control(conn packet.Conn, f func(fd int)) {
	if raw, err := conn.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { f(int(fd)) }) // fails where it is closed
	}
}

// receive reads the first message of a connection, which brings no descriptors.
func (g *pendingHandshakes) receive(conn packet.Conn) (wire.Message, error) {
	// An evicted connection already has a deadline.
	err := conn.SetWriteDeadline(time.Now().Add(handshakeTimeout))
	timer := time.AfterFunc(handshakeTimeout, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
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

// end removes a connection that has said hello, or has ended. The result is false for an evicted
// connection.
func (g *pendingHandshakes) end(conn packet.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refused[conn] {
		delete(g.refused, conn)
		return false
	}
	for i, w := range g.waiting {
		if w.conn == conn {
			g.waiting = append(g.waiting[:i:i], g.waiting[i+1:]...)
			break
		}
	}
	return true
}

// rateLimitedLogger limits the log lines that strangers can cause: some lines a minute, and then
// the number of omitted lines.
type rateLimitedLogger struct {
	mu    sync.Mutex
	since time.Time
	lines int
}

const (
	warningInterval = time.Minute
	maxWarnings     = 20
)

// warn logs a warning about a remote side.
func (g *rateLimitedLogger) warn(log *logrus.Entry, err error, what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if now.Sub(g.since) > warningInterval {
		if more := g.lines - maxWarnings; more > 0 {
			logrus.Warnf("%d more of such warnings were left out", more)
		}
		g.since, g.lines = now, 0
	}
	g.lines++
	if g.lines <= maxWarnings {
		log.WithError(err).Warn(what)
	}
	if g.lines == maxWarnings {
		logrus.Warn("more of such warnings are left out for a minute")
	}
}

// limit takes over a configuration's limits.
func (r *Relay) limit(l launch.Limits) {
	r.limits = l.WithDefaults()
	r.limits.Descriptors = descriptorLimit(r.limits.Descriptors)
}
