package libpeerlane_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestConnectBeginReturnsAtOnce(t *testing.T) {
	eachKind(t, "attempts", func(t *testing.T, path string) {
		a, b := newHost(t).pair(launch.RouteDirect, 0, 1)
		start(t, path, a, b, devices[0].UUID, devices[1].UUID).end()
	})
}

// At a relay that does nothing no call waits that must not.
func TestRelayThatReadsNothingBlocksNoCall(t *testing.T) {
	eachKind(t, "attempts", func(t *testing.T, path string) {
		full, ended := make(chan bool), make(chan bool)
		socket := pretend(t, func(f *fake) {
			f.welcome(nil)
			defer f.free()
			select {
			case <-full:
			case <-ended:
				return
			}
			// The client closes unrequested connections, of which it keeps 64.
			for i := range uint32(65) {
				f.raw(wire.Encode(&wire.Exported{Memory: i + 1}, 1<<30))
			}
			<-ended
		})
		defer close(ended)
		p := start(t, path, socket, devices[0].UUID)
		line := p.line()
		close(full)
		if line != "full" {
			t.Fatalf("it says %q", line)
		}
		p.say("go on")
		p.end()
	})
}
