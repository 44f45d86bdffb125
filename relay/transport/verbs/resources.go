package verbs

import "github.com/peerlane/peerlane/relay/launch"

// resources are what this relay has of a NIC, as the kernel counts them for its process
// (rdma resource show). It belongs to the loop; what a goroutine makes or gives back just
// now is not among them.
func (f *Fabric) resources(n *nic) launch.NICResources {
	r := launch.NICResources{NIC: n.name}
	for s := range f.sets {
		if s.working || s.over {
			continue
		}
		for _, p := range s.pairs {
			if p.queue.nic.index == n.index && p.Pair != nil {
				r.QueuePairs++
			}
		}
		for _, q := range s.queues {
			if q.nic.index == n.index {
				r.CompletionQueues++
				if q.flusher != nil {
					r.QueuePairs++
				}
				if q.first != nil {
					r.Regions++
					r.Bytes += pageBytes
				}
				if q.notes != nil {
					r.Regions++
					r.Bytes += uint64(len(s.noted))
				}
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.memories {
		if m.region(n) != nil {
			r.Regions++
			r.Bytes += m.bytes
		}
	}
	return r
}
