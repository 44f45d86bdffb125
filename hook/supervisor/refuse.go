package supervisor

import (
	"errors"
	"net"
	"os"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// refusalTimeout limits the wait for the hello of a connection, and maxRefused the number of open
// connections.
const (
	refusalTimeout = time.Second
	maxRefused     = 64
)

// refusal answers clients and peers on a relay's sockets while no relay runs.
type refusal struct {
	listeners []net.Listener
	// stop is closed by end.
	stop chan struct{}
	// ended gets one value per listener that has ended.
	ended chan struct{}
}

// refuse sends the reason to clients and peer relays that connect.
func refuse(clients, peers *os.File, reason string) (*refusal, error) {
	r := &refusal{stop: make(chan struct{}), ended: make(chan struct{}, 2)}
	for _, to := range []struct {
		socket *os.File
		status wire.Status
	}{{clients, wire.StatusRelayDied}, {peers, wire.StatusUnreachable}} {
		listener, err := net.FileListener(to.socket) // a copy of the socket
		if err != nil {
			return nil, errors.Join(err, r.end())
		}
		r.listeners = append(r.listeners, listener)
		message := wire.Encode(wire.NewFailure(wire.Errorf(to.status, "%s", reason)), 1)
		go func() {
			accept(listener, message, r.stop)
			r.ended <- struct{}{}
		}()
	}
	return r, nil
}

func accept(listener net.Listener, message []byte, stop <-chan struct{}) {
	room := make(chan struct{}, maxRefused)
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(firstPause) // temporarily out of descriptors or memory
			continue
		}
		// A hello can contain the descriptor of a socket that lingers, and its sender then
		// controls the time of reading and closing.
		select {
		case room <- struct{}{}:
		case <-stop:
			go conn.Close()
			return
		}
		go func() {
			defer func() { conn.Close(); <-room }()
			if conn.SetReadDeadline(time.Now().Add(refusalTimeout)) != nil {
				return // already disconnected
			}
			// Read the hello first, because a client that gets an end of file while it sends does
			// not read the message. A silent client gets the message too.
			_, err := conn.Read(make([]byte, wire.MaxMessage))
			if (err == nil || errors.Is(err, os.ErrDeadlineExceeded)) &&
				conn.SetWriteDeadline(time.Now().Add(refusalTimeout)) == nil {
				_, _ = conn.Write(message) // the client may have disconnected
			}
		}()
	}
}

// end stops the refusals, so that a relay can use the sockets.
func (r *refusal) end() error {
	if r == nil {
		return nil
	}
	close(r.stop)
	var err error
	for _, l := range r.listeners {
		err = errors.Join(err, l.Close())
	}
	for range r.listeners {
		<-r.ended
	}
	return err
}
