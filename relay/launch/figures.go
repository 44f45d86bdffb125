package launch

import "time"

// Why operations wait.
const (
	StallNoGrant = "no_grant" // the receiver has no receive posted, or no slot free
	StallNoSlot  = "no_slot"  // no staging slot is free here, or the connection has its share
	// the client has as many operations as the ring holds that have not ended, or whose completions
	// it does not read
	StallRingFull = "ring_full"
)

// Figures count operations, since the relay was started or the connection made.
type Figures struct {
	Operations uint64 `json:"operations"` // that have ended
	Bytes      uint64 `json:"bytes"`
	Failed     uint64 `json:"failed,omitempty"`
	// InPlace is the part of Bytes that NICs read or wrote in client memory on a GPU: staging
	// memory, which clients copy to and from, and exported memory on a GPU near the NICs.
	InPlace  uint64 `json:"inPlace,omitempty"`
	InFlight int    `json:"inFlight"`
	// Stalls are waits by cause; several operations wait at a time.
	Stalls []Stall `json:"stalls,omitempty"`
	// Latency is the distribution of durations from the possible start, the shortest first.
	Latency []Bucket `json:"latency,omitempty"`
}

// Stall counts the waits of operations for a cause.
type Stall struct {
	Cause string        `json:"cause"`
	Count uint64        `json:"count"` // waits that are over
	Time  time.Duration `json:"time"`  // nanoseconds, of all of those
	// Waiting is the number of current waits, and Longest the longest current wait, nanoseconds.
	Waiting int           `json:"waiting,omitempty"`
	Longest time.Duration `json:"longest,omitempty"`
}

// Bucket counts operations that took from From to less than To, nanoseconds.
type Bucket struct {
	From  time.Duration `json:"from"`
	To    time.Duration `json:"to"`
	Count uint64        `json:"count"`
}

// LaneFigures are the figures of a lane of the container.
type LaneFigures struct {
	GPU      string  `json:"gpu"` // PCI address
	Sent     Figures `json:"sent"`
	Received Figures `json:"received"`
}

// ConnectionFigures are the figures of one end of a connection.
type ConnectionFigures struct {
	PID     int    `json:"pid"`               // the client's, on the host
	Program string `json:"program,omitempty"` // of the client, one of Program*
	Number  uint32 `json:"number"`
	GPU     string `json:"gpu"` // PCI address
	Peer    string `json:"peer"`
	Route   string `json:"route"`
	// Transport is one of Transport*, and Path the route of a message, with the reason if a better
	// route exists.
	Transport string `json:"transport,omitempty"`
	Path      string `json:"path,omitempty"`
	Sends     bool   `json:"sends"` // or it receives
	// Rails are the pairs of interfaces that it is striped over, between two hosts.
	Rails []RailFigures `json:"rails,omitempty"`
	// Registration names the memory that NICs access, and the method of registration; GDR means
	// memory of a GPU, so no byte bounces through host memory. Of TransportTCP, and of
	// TransportVerbs, where it begins with dmabuf, peermem or bounce.
	Registration string `json:"registration,omitempty"`
	GDR          bool   `json:"gdr,omitempty"`
	// Slots of the lane in use by the connection: a connection that holds slots for long waits for
	// the peer, or for a NIC.
	Slots int `json:"slots,omitempty"`
	Figures
}

// RailFigures are the two ends of some of the TCP connections of a set.
type RailFigures struct {
	Rail      int    `json:"rail"`      // of this host; -1 for none
	Interface string `json:"interface"` // of this host
	PeerRail  int    `json:"peerRail"`
	PeerPlace string `json:"peer"`    // the other host's interface, where it is known, and address
	Streams   int    `json:"streams"` // for data, of this pair
}

// Since are the figures of the time after `before`, which are of the same relay. Operations in
// flight and waits are current values.
func (f Figures) Since(before Figures) Figures {
	d := Figures{
		Operations: f.Operations - before.Operations,
		Bytes:      f.Bytes - before.Bytes,
		Failed:     f.Failed - before.Failed,
		InPlace:    f.InPlace - before.InPlace,
		InFlight:   f.InFlight,
	}
	for _, s := range f.Stalls {
		for _, b := range before.Stalls {
			if b.Cause == s.Cause {
				s.Count -= b.Count
				s.Time -= b.Time
			}
		}
		if s.Count > 0 || s.Waiting > 0 {
			d.Stalls = append(d.Stalls, s)
		}
	}
	for _, n := range f.Latency {
		for _, b := range before.Latency {
			if b.From == n.From {
				n.Count -= b.Count
			}
		}
		if n.Count > 0 {
			d.Latency = append(d.Latency, n)
		}
	}
	return d
}

// Percentile is how long so many of a thousand operations took at most, to within
// a quarter; 0 where none ended.
func (f Figures) Percentile(permille int) time.Duration {
	total := uint64(0)
	for _, b := range f.Latency {
		total += b.Count
	}
	rank := total*uint64(permille)/1000 + 1
	seen := uint64(0)
	for _, b := range f.Latency {
		if seen += b.Count; seen >= min(rank, total) {
			return (b.From + b.To) / 2
		}
	}
	return 0
}
