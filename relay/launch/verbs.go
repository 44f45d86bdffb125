package launch

import (
	"encoding/json"
	"fmt"

	"github.com/dustin/go-humanize"
)

// Verbs is how a relay uses RDMA to other hosts. The numbers have the meaning of NCCL_IB_*.
type Verbs struct {
	TrafficClass int `json:"trafficClass"` // 0 to 255
	ServiceLevel int `json:"serviceLevel"` // 0 to 15
	PKey         int `json:"pkey"`         // an index into the port's table
	MTU          int `json:"mtu"`          // bytes, at most; 0 for what both ports have
	Timeout      int `json:"timeout"`      // 4.096 µs times 2 to the power of it, 1 to 31
	Retries      int `json:"retries"`      // 0 to 7
	GIDIndex     int `json:"gidIndex"`     // less than 0 for the one that fits
	QueuePairs   int `json:"queuePairs"`   // of each two NICs, 1 to MaxQueuePairs; 0 for the fabric's default
	// ReconnectLimit is the time for new queue pairs after a fault, in seconds, 1 to 3600.
	ReconnectLimit int `json:"reconnectLimit"`
	// AdaptiveRouting is one of the constants below. ARThreshold is the length in bytes above which
	// a write with adaptive routing is an RDMA write and a write with immediate of 0 bytes.
	AdaptiveRouting string `json:"adaptiveRouting"`
	ARThreshold     int    `json:"arThreshold"`
	// RelaxedOrdering lets NICs write registered memory in any order, DataDirect by their function
	// for GPUs' memory.
	RelaxedOrdering bool `json:"relaxedOrdering"`
	DataDirect      bool `json:"dataDirect"`
}

// Values of Verbs.AdaptiveRouting.
const (
	AdaptiveRoutingAuto = "auto" // on InfiniBand
	AdaptiveRoutingOn   = "on"
	AdaptiveRoutingOff  = "off"
)

// MaxQueuePairs bounds those of two NICs.
const MaxQueuePairs = 8

// DefaultVerbs is the configuration without any key.
var DefaultVerbs = Verbs{
	Timeout: 20, Retries: 7, GIDIndex: -1, ReconnectLimit: 60, AdaptiveRouting: AdaptiveRoutingAuto, ARThreshold: 8192,
	RelaxedOrdering: true, DataDirect: true,
}

// UnmarshalJSON gives keys that are absent the values of DefaultVerbs. After an upgrade the supervisor
// of a running container starts the new relay with the keys that the earlier release knows.
func (v *Verbs) UnmarshalJSON(text []byte) error {
	type plain Verbs
	filled := plain(DefaultVerbs)
	if err := json.Unmarshal(text, &filled); err != nil {
		return err
	}
	*v = Verbs(filled)
	return nil
}

// Check returns an error for an invalid configuration. A nil one is good: there is no RDMA then.
func (v *Verbs) Check() error {
	if v == nil {
		return nil
	}
	for _, n := range []struct {
		what               string
		value, least, most int
	}{
		{"traffic class", v.TrafficClass, 0, 255}, {"service level", v.ServiceLevel, 0, 15}, {"pkey index", v.PKey, 0, 65535},
		{"timeout", v.Timeout, 1, 31}, {"number of retries", v.Retries, 0, 7}, {"GID index", v.GIDIndex, -1, 255},
		{"number of queue pairs", v.QueuePairs, 0, MaxQueuePairs}, {"reconnect limit", v.ReconnectLimit, 1, 3600},
		{"threshold of adaptive routing", v.ARThreshold, 0, 1 << 30},
	} {
		if n.value < n.least || n.value > n.most {
			return &ValueError{n.what + " of RDMA", n.value, fmt.Sprintf("%d to %d", n.least, n.most)}
		}
	}
	switch v.AdaptiveRouting {
	case AdaptiveRoutingAuto, AdaptiveRoutingOn, AdaptiveRoutingOff:
	default:
		return &ValueError{"adaptive routing of RDMA", v.AdaptiveRouting, "auto, on, off"}
	}
	switch v.MTU {
	case 0, 256, 512, 1024, 2048, 4096:
		return nil
	}
	return &ValueError{"MTU of RDMA", v.MTU, "0, 256, 512, 1024, 2048, 4096"}
}

// VerbsReport reports the RDMA state of a relay.
type VerbsReport struct {
	// Error says why there is none.
	Error string `json:"error,omitempty"`
	// NICs are those that are open, with port and GID.
	NICs []string `json:"nics,omitempty"`
	// Resources are the relay's objects per NIC, in the order of NICs.
	Resources []NICResources `json:"resources,omitempty"`
}

// NICResources counts a relay's objects of a NIC, as the kernel does for the process (rdma resource
// show).
type NICResources struct {
	NIC              string `json:"nic"`
	QueuePairs       int    `json:"queuePairs"`
	CompletionQueues int    `json:"completionQueues"`
	Regions          int    `json:"regions"` // of memory, registered
	Bytes            uint64 `json:"bytes"`   // of those
}

func (r NICResources) String() string {
	return fmt.Sprintf(
		"queue pairs: %d, completion queues: %d, memory regions: %d (%s)",
		r.QueuePairs,
		r.CompletionQueues,
		r.Regions,
		humanize.IBytes(r.Bytes),
	)
}
