package demo

import (
	"cmp"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// Script is the input of both clients, which derive the same steps from the script.
type Script struct {
	Seed uint64 `json:"seed"`
	// Bytes is the minimum of verified bytes per direction.
	Bytes uint64 `json:"bytes"`
	// Largest is the size of the largest message, and of a client's buffers; 0 for maxMessage.
	Largest uint64 `json:"largest,omitempty"`
	// RateSizes are the message sizes whose rate is measured, RateBytes the bytes to move per
	// size, Depth the messages in flight.
	RateSizes []uint64 `json:"rateSizes"`
	RateBytes uint64   `json:"rateBytes"`
	Depth     int      `json:"depth"`
	// Staging is the staging memory per direction of a client that copies itself, bytes; 0 leaves
	// copies to the relays.
	Staging uint64 `json:"staging,omitempty"`
	// Rounds of the hand-off measurement.
	Rounds int `json:"rounds"`
	// Timeout limits a step.
	Timeout time.Duration `json:"timeout"`
}

// Sizes of the verified messages: every power of two from 8 bytes to the largest,
// twice, and then odd sizes until the bytes are reached.
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

// order is a line from the orchestrator to a client.
type order struct {
	Connect wire.Handle `json:"connect"`
}

// event is a line from a client to the orchestrator.
type event struct {
	Kind       string      `json:"kind"` // injected, listening, connected, progress, done, failed
	Injected   *Injected   `json:"injected,omitempty"`
	Handle     wire.Handle `json:"handle"`
	Connection string      `json:"connection,omitempty"`
	Route      string      `json:"route,omitempty"`
	Bytes      uint64      `json:"bytes,omitempty"`
	Step       string      `json:"step,omitempty"`
	Result     *Client     `json:"result,omitempty"`
	Error      string      `json:"error,omitempty"`
}

// Injected is the content that a container finds in itself.
type Injected struct {
	Devices     []string          `json:"devices"`
	Mounts      []string          `json:"mounts"`
	Environment map[string]string `json:"environment"`
	GPUs        []string          `json:"gpus"` // that CUDA shows
	PIDs        int               `json:"pids"` // processes visible
}

// Client is the result of a client.
type Client struct {
	Sent            uint64        `json:"sent"`
	Received        uint64        `json:"received"`
	Messages        int           `json:"messages"`
	VerifiedBytes   uint64        `json:"verifiedBytes"` // received and compared
	Verified        bool          `json:"verified"`      // every message
	Rates           []Rate        `json:"rates,omitempty"`
	HandOffMedian   time.Duration `json:"handOffMedian,omitempty"`
	HandOff99       time.Duration `json:"handOff99,omitempty"`
	Relay           RelayCounters `json:"relay"`
	FirstAttach     time.Duration `json:"firstAttach"`
	ProtocolVersion uint32        `json:"protocolVersion"`
}

// Rate is how fast messages of a size moved.
type Rate struct {
	Size uint64  `json:"size"` // bytes
	GBs  float64 `json:"gbs"`  // 1e9 bytes a second
}

// RelayCounters are the counters of a container's relay, bytes.
type RelayCounters struct {
	Sent     uint64          `json:"sent"`
	Received uint64          `json:"received"`
	Direct   uint64          `json:"direct"`
	Staged   uint64          `json:"staged"`
	Contexts int             `json:"contexts"`
	Servers  []ServerCounter `json:"servers"`
}

// ServerCounter is the traffic through a server GPU.
type ServerCounter struct {
	GPU string `json:"gpu"`
	In  uint64 `json:"in"`
	Out uint64 `json:"out"`
}
