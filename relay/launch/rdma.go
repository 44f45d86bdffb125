package launch

// `peerlane-relay rdma-test` tests NICs of this host by themselves: it reads an RDMAJob
// from standard input and writes an RDMAResult for each memory that each NIC is to reach,
// one JSON document a line, to standard output.

// RDMAJob is what is to be tested.
type RDMAJob struct {
	NICs []RDMANIC `json:"nics"`
}

// RDMANIC is a NIC, and GPUs whose memory it is to reach.
type RDMANIC struct {
	Name string `json:"name"`
	GPUs []GPU  `json:"gpus"`
}

// Memories of an RDMAResult.
const (
	MemoryHost    = "host"
	MemoryDMABuf  = "DMA-BUF"        // a GPU's, registered so
	MemoryPeermem = "nvidia-peermem" // a GPU's, registered by its address
)

// RDMAResult is what came of a NIC and a memory.
type RDMAResult struct {
	NIC string `json:"nic"`
	// GPU is nil for the host's memory.
	GPU    *GPU   `json:"gpu,omitempty"`
	Memory string `json:"memory"`
	// Tried is the last step: "open", "register", "connect", "write", "read"; Failed is
	// why it failed, empty where it did not. Untested says why there was nothing to try.
	Tried    string `json:"tried"`
	Failed   string `json:"failed,omitempty"`
	Untested string `json:"untested,omitempty"`
	// Wrong is how many bytes arrived wrong, of Bytes that were compared.
	Wrong uint64 `json:"wrong,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"`
	// Write and Read are rates between that memory and the host's, GB/s of 1e9 bytes.
	Write float64 `json:"write,omitempty"`
	Read  float64 `json:"read,omitempty"`
}
