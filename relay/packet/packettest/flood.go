// Package packettest has attacks on packet sockets for tests of several packages.
package packettest

import (
	"sync"

	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// held is the number of silent connections that a thread of Flood keeps open.
const held = 100

// Flood opens connections to the peer socket of a relay without a pause, in two goroutines, and
// keeps the newest of each open and silent. Flood calls first after the first connection and
// returns at once; the goroutines run until the process ends.
func Flood(socket string, first func()) {
	first = sync.OnceFunc(first)
	for thread := range 2 {
		go func() {
			var open []packet.Conn
			for {
				c, err := packet.Dial(socket)
				if err != nil {
					continue // the backlog is full: dial again at once
				}
				first()
				if thread == 0 { // a hello that names no listener
					_ = c.Send(&wire.PeerHello{Magic: wire.Magic, Oldest: wire.OldestVersion, Newest: wire.NewestVersion}, 1)
				}
				if open = append(open, c); len(open) > held {
					open[0].Close()
					open = open[1:]
				}
			}
		}()
	}
}
