package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// shape is a transfer of a KV cache: one list with the same blocks of each layer.
type shape struct {
	name           string
	layers, blocks uint64
	// size is the size of a block of one layer in bytes.
	size uint64
	// max is the goal in ms.
	max float64
}

// shapes are two transfers of inference engines.
var shapes = []shape{
	{name: "A", layers: 64, blocks: 626, size: 8 << 10, max: 30},
	{name: "B", layers: 64, blocks: 1750, size: 44 << 10, max: 80},
}

// kv measures reads and writes of the shapes.
func (r *run) kv() error {
	for _, s := range shapes {
		if r.host.Simulated {
			s.blocks /= 128
		}
		for _, route := range r.Routes {
			st, a, b, err := r.pair(route, s.bytes())
			if err == nil {
				err = errors.Join(r.lists(st, a, b, s), st.close())
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (s shape) entries() uint64 { return s.layers * s.blocks }

// bytes returns the size of a client's buffer: whole granules of CUDA.
func (s shape) bytes() uint64 {
	const granule = 2 << 20
	return (s.entries()*s.size + granule - 1) / granule * granule
}

// lists measures a shape over a route: the time of a list, the time of the post, and the processor
// time of the two relays per entry.
func (r *run) lists(st *stage, a, b *worker, s shape) error {
	exposed, err := b.do(order{Do: doExpose})
	if err != nil {
		return err
	}
	var pids []int
	for _, w := range []*worker{a, b} {
		pid, err := r.relayOf(w)
		if err != nil {
			return err
		}
		pids = append(pids, pid)
	}
	rounds := 5
	if r.host.Simulated {
		rounds = 2
	}
	for _, read := range []bool{true, false} {
		what := map[bool]string{true: "READ", false: "WRITE"}[read]
		r.progress("lists of %d entries, %s, route %s", s.entries(), what, st.route)
		var before, after time.Duration
		for _, pid := range pids {
			t, err := processorTime(pid)
			if err != nil {
				return err
			}
			before += t.sum
		}
		found, err := a.do(order{
			Do: doList, Reads: read, Layers: s.layers, Blocks: s.blocks, Size: s.size, Rounds: rounds,
			Keys: exposed.Keys,
		})
		if err != nil {
			return err
		}
		for _, pid := range pids {
			t, err := processorTime(pid)
			if err != nil {
				return err
			}
			after += t.sum
		}
		row := Row{Table: "kv", Route: st.route, Transport: transportOf(st.route), Size: s.size, Depth: int(s.entries())}
		add := func(name string, value float64, unit string, asked *Bound) {
			row.What, row.Value, row.Unit, row.Asked = fmt.Sprintf("%s, %s: %s", s.name, what, name), value, unit, asked
			r.row(row)
		}
		n, list := float64(s.entries()), found.List.Seconds()
		add("a list", list*1e3, milliseconds, atMost(s.max))
		add("post", found.Post.Seconds()*1e3, milliseconds, atMost(2))
		add("entries", n/list, entriesPerSecond, nil)
		add("rate", n*float64(s.size)/list/1e9, GBs, nil)
		each := (after - before).Seconds() * 1e6 / float64(2*(rounds+1)) / n
		add("processor time of each relay for an entry", each, microseconds, atMost(0.7))
	}
	return nil
}

// expose permits the peer to read the outgoing buffer and to write the incoming buffer.
func (s *serving) expose(ctx context.Context) (r reply, err error) {
	for _, x := range []struct {
		memory *client.Memory
		bytes  uint64
		access uint32
	}{
		{s.client.Outgoing.Memory, s.client.Outgoing.Bytes(), wire.RemoteRead},
		{s.client.Incoming.Memory, s.client.Incoming.Bytes(), wire.RemoteWrite},
	} {
		region, err := s.client.Receiving.Expose(ctx, x.memory, 0, x.bytes, x.access)
		if err != nil {
			return r, err
		}
		r.Keys = append(r.Keys, region.Key())
	}
	return r, nil
}

// list posts a list o.Rounds times after an uncounted list, and returns the least time of a list
// and the least time of a post. The two sides list the blocks in different orders.
func (s *serving) list(ctx context.Context, o order) (r reply, err error) {
	if len(o.Keys) != 2 {
		return r, errors.New("the other side exposes nothing")
	}
	c := s.client
	post, memory, key := c.Sending.WriteList, c.Outgoing.Memory, o.Keys[1]
	if o.Reads {
		post, memory, key = c.Sending.ReadList, c.Incoming.Memory, o.Keys[0]
	}
	remote := rand.New(rand.NewPCG(1, 2)).Perm(int(o.Blocks))
	entries := make([]client.ListEntry, 0, o.Layers*o.Blocks)
	for layer := range o.Layers {
		for i := range o.Blocks {
			entries = append(entries, client.ListEntry{
				Memory: memory, Offset: (layer*o.Blocks + i) * o.Size, Length: o.Size,
				Key: key, At: (layer*o.Blocks + uint64(remote[i])) * o.Size,
			})
		}
	}
	for round := range o.Rounds + 1 {
		start := time.Now()
		op, err := post(ctx, entries)
		posted := time.Since(start)
		if err != nil {
			return r, err
		}
		moved, err := op.Wait(ctx)
		took := time.Since(start)
		if err != nil {
			return r, err
		}
		if moved != uint64(len(entries))*o.Size {
			return r, fmt.Errorf("a list of %d entries moved %d bytes", len(entries), moved)
		}
		if round == 1 || round > 1 && took < r.List {
			r.List = took
		}
		if round == 1 || round > 1 && posted < r.Post {
			r.Post = posted
		}
	}
	return r, nil
}
