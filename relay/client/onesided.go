package client

import (
	"context"

	"github.com/peerlane/peerlane/relay/wire"
)

// Region is a range of this process's memory that remote sides of connections read or write. The
// relays move the bytes; this process does nothing.
type Region struct {
	session *Session
	number  uint32
	key     wire.RemoteKey
}

// Expose permits the remote sides of the listener's present and later connections to read or write
// [offset, offset+n) bytes of m by the key of the region. This process need not accept the
// connections, and may be stopped. m is memory of the listener's GPU. access is wire.RemoteRead,
// which needs memory exported for sending, wire.RemoteWrite, which needs memory exported for
// receiving, or both.
func (l *Listener) Expose(ctx context.Context, m *Memory, offset, n uint64, access uint32) (*Region, error) {
	return l.session.expose(
		ctx,
		&wire.Expose{Memory: m.number, Offset: offset, Length: n, Access: access, Listener: l.number},
	)
}

// Expose is Listener.Expose for the remote side of a single accepted connection.
func (c *Connection) Expose(ctx context.Context, m *Memory, offset, n uint64, access uint32) (*Region, error) {
	return c.session.expose(
		ctx,
		&wire.Expose{Memory: m.number, Offset: offset, Length: n, Access: access, Connection: c.number},
	)
}

func (s *Session) expose(ctx context.Context, m *wire.Expose) (*Region, error) {
	exposed, err := ask[*wire.Exposed](ctx, s, m)
	if err != nil {
		return nil, err
	}
	return &Region{session: s, number: exposed.Region, key: wire.NewRemoteKey(exposed.Key, m.Length, m.Access)}, nil
}

// Key returns the key of the region, for the remote program. A program with the key has the access
// of the region, on the connections of the region.
func (r *Region) Key() wire.RemoteKey { return r.key }

// Revoke ends the access, and returns when no operation on the region touches the memory. Started
// operations continue to the end; closing the connection ends started operations. Unexport revokes
// the regions of a memory.
func (r *Region) Revoke(ctx context.Context) error {
	_, err := ask[*wire.Done](ctx, r.session, &wire.Revoke{Region: r.number})
	return err
}

// Write writes n bytes of a memory of this process to byte `at` of a region of the remote side.
// This process made the connection; the remote process does nothing. The operation ends when the
// bytes are in the remote memory; an operation of 0 bytes checks the access.
//
// Sends, writes and reads start in the order of the posts, and end in any order: wait for the end
// of an operation, or for a Flush, before a dependent operation. The result is
// wire.StatusBadKey if the key names no region of this connection, wire.StatusOutOfRange beyond
// the bounds of the region, wire.StatusNotPermitted if the region is read-only.
//
// After failed queue pairs the relays repeat a write from the first byte: a program at the remote side
// that polls the memory can read bytes of a write a second time, also after a change of the bytes.
func (c *Connection) Write(
	m *Memory,
	offset, n uint64,
	to wire.RemoteKey,
	at uint64,
	options ...Option,
) (*Operation, error) {
	return c.oneSided(wire.OpWrite, m, offset, n, to, at, options)
}

// Read reads n bytes from byte `at` of a region of the remote side into a memory of this process;
// the rest is as with Write. The first read of a connection opens a reverse connection, which
// counts among the connections of both sides. If the relays cannot open the reverse connection,
// reads end with wire.StatusNoReverseConnection, the connection stays up, and the relays' logs have
// the cause; reads fail the same way for a second, and a later read tries again.
func (c *Connection) Read(
	m *Memory,
	offset, n uint64,
	from wire.RemoteKey,
	at uint64,
	options ...Option,
) (*Operation, error) {
	return c.oneSided(wire.OpRead, m, offset, n, from, at, options)
}

func (c *Connection) oneSided(
	kind uint32,
	m *Memory,
	offset, n uint64,
	key wire.RemoteKey,
	at uint64,
	options []Option,
) (*Operation, error) {
	k, ok := key.Layout()
	if !ok {
		return nil, wire.Errorf(wire.StatusBadKey, "these %d bytes are not the key of a region", len(key))
	}
	return c.post(
		kind,
		m,
		offset,
		n,
		append([]Option{func(d *wire.Descriptor) { d.Key, d.RemoteOffset = k.Key, at }}, options...),
	)
}

// Flush posts an operation that ends after the connection's earlier operations: sent and written
// bytes are then in the remote memory. If an operation failed since the last flush, the flush ends
// with the status of the first failure.
func (c *Connection) Flush(options ...Option) (*Operation, error) {
	return c.post(wire.OpFlush, &Memory{}, 0, 0, options)
}
