package demo

import (
	"cmp"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// Script is the input of both clients, from which they derive the same steps.
type Script struct {
	Seed uint64 `json:"seed"`
	// Bytes is the minimum of bytes to verify per direction.
	Bytes uint64 `json:"bytes"`
	// Largest is the size of the largest message and of a client's buffers; 0 means maxMessage.
	Largest uint64 `json:"largest,omitempty"`
	// RateSizes are the message sizes to measure rates with, RateBytes the bytes to send per size,
	// and Depth the messages in flight.
	RateSizes []uint64 `json:"rateSizes"`
	RateBytes uint64   `json:"rateBytes"`
	Depth     int      `json:"depth"`
	// Staging is the staging memory of a client that copies itself, in bytes per direction; 0
	// means that the relays copy.
	Staging uint64 `json:"staging,omitempty"`
	// Rounds is the number of iterations of the hand-off measurement.
	Rounds int `json:"rounds"`
	// Timeout limits a step.
	Timeout time.Duration `json:"timeout"`
}

// sizes returns the sizes of the verified messages: every power of two from 8 bytes to the
// largest, twice, and then sizes near a quarter of the largest, until their sum reaches Bytes.
func (s Script) sizes() []uint64 {
	var sizes []uint64
	total := uint64(0)
	add := func(n uint64) {
		sizes = append(sizes, n)
		total += n
	}
	for round := 0; round < 2; round++ {
		for n := uint64(8); n <= s.largest(); n *= 2 {
			add(n)
		}
	}
	for odd := uint64(13); total < s.Bytes; odd = odd*3 + 1 {
		add(s.largest()/4 + odd%4096 - 2048)
	}
	return sizes
}

func (s Script) largest() uint64 { return cmp.Or(s.Largest, maxMessage) }

// maxMessage is the largest message of a demo that is not quick.
const maxMessage = 64 << 20

// order is a message from the orchestrator to a client: one line of JSON.
type order struct {
	Connect wire.Handle `json:"connect"`
}

// event is a message from a client to the orchestrator: one line of JSON.
type event struct {
	// Kind is injected, listening, connected, progress, done or failed.
	Kind       string      `json:"kind"`
	Injected   *Injected   `json:"injected,omitempty"`
	Handle     wire.Handle `json:"handle"`
	Connection string      `json:"connection,omitempty"`
	Route      string      `json:"route,omitempty"`
	Bytes      uint64      `json:"bytes,omitempty"`
	Step       string      `json:"step,omitempty"`
	Result     *Client     `json:"result,omitempty"`
	Error      string      `json:"error,omitempty"`
}

// Injected describes what an engine has added to the container.
type Injected struct {
	Devices     []string          `json:"devices"`
	Mounts      []string          `json:"mounts"`
	Environment map[string]string `json:"environment"`
	// GPUs are the GPUs that CUDA shows, and PIDs is the number of visible processes.
	GPUs []string `json:"gpus"`
	PIDs int      `json:"pids"`
}

// Client is the result of a client.
type Client struct {
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
	Messages int    `json:"messages"`
	// VerifiedBytes were received and compared. Verified reports that every message matched.
	VerifiedBytes   uint64        `json:"verifiedBytes"`
	Verified        bool          `json:"verified"`
	Rates           []Rate        `json:"rates,omitempty"`
	HandOffMedian   time.Duration `json:"handOffMedian,omitempty"`
	HandOff99       time.Duration `json:"handOff99,omitempty"`
	Relay           RelayCounters `json:"relay"`
	FirstAttach     time.Duration `json:"firstAttach"`
	ProtocolVersion uint32        `json:"protocolVersion"`
}

// Rate is the rate of messages of one size.
type Rate struct {
	Size uint64  `json:"size"` // bytes
	GBs  float64 `json:"gbs"`  // 1e9 bytes per second
}

// RelayCounters are the counters of a container's relay in bytes.
type RelayCounters struct {
	Sent     uint64          `json:"sent"`
	Received uint64          `json:"received"`
	Direct   uint64          `json:"direct"`
	Staged   uint64          `json:"staged"`
	Contexts int             `json:"contexts"`
	Servers  []ServerCounter `json:"servers"`
}

// ServerCounter is the traffic through a server GPU in bytes.
type ServerCounter struct {
	GPU string `json:"gpu"`
	In  uint64 `json:"in"`
	Out uint64 `json:"out"`
}
