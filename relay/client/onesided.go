package client

import (
	"context"

	"github.com/peerlane/peerlane/relay/wire"
)

// Offer is a range of this process's memory that others read or write by themselves.
type Offer struct {
	session *Session
	number  uint32
	key     wire.RemoteKey
}

// Offer lets the other sides of the listener's connections, those of now and those to come,
// which need not be accepted for it, read or write [offset, offset+n) of a memory that is of the listener's GPU, by the key of
// the offer. access is wire.RemoteRead, for which the memory has to be exported for sending,
// wire.RemoteWrite, for receiving, or both. The relays do it alone: this process may be
// stopped, or do other things.
func (l *Listener) Offer(ctx context.Context, m *Memory, offset, n uint64, access uint32) (*Offer, error) {
	return l.session.offer(ctx, &wire.Offer{Memory: m.number, Offset: offset, Length: n, Access: access, Listener: l.number})
}

// Offer is Listener.Offer to the other side of one connection, which was accepted here.
func (c *Connection) Offer(ctx context.Context, m *Memory, offset, n uint64, access uint32) (*Offer, error) {
	return c.session.offer(ctx, &wire.Offer{Memory: m.number, Offset: offset, Length: n, Access: access, Connection: c.number})
}

func (s *Session) offer(ctx context.Context, m *wire.Offer) (*Offer, error) {
	offered, err := ask[*wire.Offered](ctx, s, m)
	if err != nil {
		return nil, err
	}
	return &Offer{session: s, number: offered.Offer, key: wire.NewRemoteKey(offered.Key, m.Length, m.Access)}, nil
}

// Key is what the other side needs, by whatever way the two have: a message, say. Whoever
// has it, at the other side of a connection that the offer is for, may do what it allows.
func (o *Offer) Key() wire.RemoteKey { return o.key }

// Withdraw ends the offer, and returns when no operation touches the memory on its behalf
// any more. Those that have begun go on to their end; closing their connection ends them.
// Unexport withdraws all offers of a memory.
func (o *Offer) Withdraw(ctx context.Context) error {
	_, err := ask[*wire.Done](ctx, o.session, &wire.Withdraw{Offer: o.number})
	return err
}

// Write writes n bytes of a memory of this process to byte `at` of what the other side has
// offered. It needs a connection that was made here, and nothing of the process at the other
// side. It has ended when the bytes are there; one of 0 bytes looks whether it might.
//
// Like sends, writes and reads begin in the order in which they are posted, and end in any:
// what is to come after one waits for its end, or for a Flush. It ends with
// wire.StatusBadKey where nothing is offered under this key to this connection,
// wire.StatusOutOfRange beyond the offer's bounds, wire.StatusNotPermitted where it is not
// for writing.
func (c *Connection) Write(m *Memory, offset, n uint64, to wire.RemoteKey, at uint64, options ...Option) (*Operation, error) {
	return c.oneSided(wire.OpWrite, m, offset, n, to, at, options)
}

// Read reads n bytes from byte `at` of what the other side has offered into a memory of
// this process; the rest is as with Write. The first read of a connection opens another
// one, the other way, which counts among both sides' connections. Where the relays cannot
// open it, reads end with wire.StatusNoReverseConnection, the connection stays up, and the relays' logs
// have the reason; reads of the next second end so too, a later one tries again.
func (c *Connection) Read(m *Memory, offset, n uint64, from wire.RemoteKey, at uint64, options ...Option) (*Operation, error) {
	return c.oneSided(wire.OpRead, m, offset, n, from, at, options)
}

func (c *Connection) oneSided(kind uint32, m *Memory, offset, n uint64, key wire.RemoteKey, at uint64, options []Option) (*Operation, error) {
	k, ok := key.Layout()
	if !ok {
		return nil, wire.Errorf(wire.StatusBadKey, "these %d bytes are not the key of an offer", len(key))
	}
	return c.post(kind, m, offset, n, append([]Option{func(d *wire.Descriptor) { d.Key, d.RemoteOffset = k.Key, at }}, options...))
}

// Flush posts an operation that ends when all that were posted on the connection before it
// have ended: what was sent and written is then in the memory of the other side. Where one
// of them failed, since the last flush, it ends with the status of the first that did.
func (c *Connection) Flush(options ...Option) (*Operation, error) {
	return c.post(wire.OpFlush, &Memory{}, 0, 0, options)
}
