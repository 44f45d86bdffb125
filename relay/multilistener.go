package relay

import (
	"net"
	"sync"
)

// multiListener is a listener at several addresses, to which more can come.
type multiListener struct {
	accepted chan accepted
	closed   chan struct{}

	mu        sync.Mutex
	listeners []net.Listener
	shut      bool
	running   sync.WaitGroup
}

type accepted struct {
	conn net.Conn
	err  error
}

func newMultiListener() *multiListener {
	return &multiListener{accepted: make(chan accepted), closed: make(chan struct{})}
}

// add accepts connections from a further listener, which Close also closes.
func (g *multiListener) add(l net.Listener) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut {
		l.Close()
		return
	}
	g.listeners = append(g.listeners, l)
	g.running.Go(func() {
		for {
			conn, err := l.Accept()
			select {
			case g.accepted <- accepted{conn, err}:
			case <-g.closed:
				if err == nil {
					conn.Close()
				}
				return
			}
		}
	})
}

// Accept returns the next connection or error of any listener.
func (g *multiListener) Accept() (net.Conn, error) {
	select {
	case a := <-g.accepted:
		return a.conn, a.err
	case <-g.closed:
		return nil, net.ErrClosed
	}
}

// Close closes the listeners.
func (g *multiListener) Close() error {
	g.mu.Lock()
	if g.shut {
		g.mu.Unlock()
		return nil
	}
	g.shut = true
	close(g.closed)
	for _, l := range g.listeners {
		l.Close()
	}
	g.mu.Unlock()
	g.running.Wait()
	return nil
}

// Addr is the first one's.
func (g *multiListener) Addr() net.Addr {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.listeners[0].Addr()
}
