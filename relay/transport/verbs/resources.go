package verbs

import "github.com/peerlane/peerlane/relay/launch"

// resources counts the objects of this relay on a NIC, as rdma resource show does. Call resources
// on the event loop. Objects that a goroutine creates or releases at this moment do not count.
func (f *Fabric) resources(n *nic) launch.NICResources {
	r := launch.NICResources{NIC: n.name}
	for s := range f.sets {
		if s.working || s.closed {
			continue
		}
		for _, p := range s.pairs {
			if p.Pair != nil && p.queue.nic.context == n.context {
				r.QueuePairs++
			}
		}
		for _, q := range s.queues {
			if q.nic.context == n.context {
				if q.flusher != nil {
					r.QueuePairs++
				}
				if q.first != nil {
					r.Regions++
					r.Bytes += pageBytes
				}
				if q.acks != nil {
					r.Regions++
					r.Bytes += uint64(len(s.ackMemory))
				}
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	r.CompletionQueues = len(f.shared[n.context])
	of := []*nic{n}
	for other := range f.renewed {
		if other.context == n.context {
			of = append(of, other)
		}
	}
	for _, m := range f.memories {
		for _, n := range of {
			if m.region(n) != nil {
				r.Regions++
				r.Bytes += m.bytes
			}
		}
	}
	return r
}
