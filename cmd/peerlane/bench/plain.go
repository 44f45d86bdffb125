package bench

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/relay/network/address"
)

// plainTimeout limits the time for a plain socket to connect and send its token.
const plainTimeout = 30 * time.Second

const tokenBytes = 16

// plainListener accepts plain sockets at the addresses of relays, so that the same firewall rules
// apply. A socket begins with a token of this measurement, so that other connections do not count.
type plainListener struct {
	*net.TCPListener
	token []byte
	own   chan *net.TCPConn
	ended chan struct{}
}

func listenPlain(ctx context.Context, at netip.Addr, n config.Network) (*plainListener, error) {
	ports, err := address.ParsePorts(n.Ports)
	if err != nil {
		return nil, err
	}
	listener, err := address.Listen(ctx, at, ports)
	if err != nil {
		return nil, err
	}
	l := &plainListener{TCPListener: listener, token: make([]byte, tokenBytes), own: make(chan *net.TCPConn),
		ended: make(chan struct{})}
	_, _ = rand.Read(l.token) // never fails
	go l.accept()
	return l, nil
}

func (l *plainListener) address() netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() }

func (l *plainListener) close() {
	close(l.ended)
	l.Close()
}

// maxStrangers limits the connections that have not sent the token yet.
const maxStrangers = 512

func (l *plainListener) accept() {
	strangers := make(chan struct{}, maxStrangers)
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(100 * time.Millisecond) // for example, no free descriptor
			continue
		}
		strangers <- struct{}{}
		go func() {
			defer func() { <-strangers }()
			received := make([]byte, tokenBytes)
			_ = c.SetReadDeadline(time.Now().Add(plainTimeout)) // fails only if the socket is closed, and so does the read
			if _, err := io.ReadFull(c, received); err != nil || !hmac.Equal(received, l.token) {
				c.Close()
				return
			}
			select {
			case l.own <- c:
			case <-l.ended:
				c.Close()
			}
		}()
	}
}

// do executes the accepting side of plain sockets.
func (l *plainListener) do(ctx context.Context, p plain) (r measure.Result, err error) {
	var conns []*net.TCPConn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	late := time.NewTimer(plainTimeout)
	defer late.Stop()
	for len(conns) < p.Count() {
		select {
		case c := <-l.own:
			conns = append(conns, c)
		case <-late.C:
			return r, fmt.Errorf("%d of %d plain sockets connected to %v within "+
				"%v", len(conns), p.Count(), l.Addr(), plainTimeout)
		case <-ctx.Done():
			return r, context.Cause(ctx)
		}
	}
	defer context.AfterFunc(ctx, func() {
		for _, c := range conns {
			c.Close()
		}
	})()
	return p.do(conns, p.Back)
}
