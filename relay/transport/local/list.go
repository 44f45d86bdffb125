package local

import (
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
)

var _ transport.ListLink = (*Link)(nil)

// WriteList issues all copies.
func (l *Link) WriteList(list []transport.Copy, _ uint64, done func(error)) {
	all := make([]device.Copy, len(list))
	for i, c := range list {
		all[i] = device.Copy{To: l.targets[c.To.Region].At(c.To.Offset), From: c.From, Bytes: c.Bytes}
	}
	l.queue.MoveList(all, done)
}
