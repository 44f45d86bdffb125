package launch

import (
	"bufio"
	"fmt"
	"io"
	"slices"
)

// `peerlane-relay rdma-test` tests NICs of this host by themselves: the process reads an RDMAJob
// from standard input and writes an RDMAResult per NIC and memory to standard output, a JSON
// document per line.

// RDMAJob is the job of a test.
type RDMAJob struct {
	NICs []RDMANIC `json:"nics"`
	// Triples are GPUs and NICs to test together, before NICs.
	Triples []TripleName `json:"triples,omitempty"`
	// Verbs is the RDMA configuration of relays; nil stands for DefaultVerbs.
	Verbs *Verbs `json:"verbs,omitempty"`
}

// RDMANIC is a NIC, with the GPUs whose memory is tested.
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

// RDMAResult is the result for a NIC and a memory.
type RDMAResult struct {
	NIC string `json:"nic"`
	// Triple is the result of a triple of the job; then the fields except NIC are empty.
	Triple *Triple `json:"triple,omitempty"`
	// GPU is nil for the host's memory.
	GPU    *GPU   `json:"gpu,omitempty"`
	Memory string `json:"memory,omitempty"`
	// Way is the connection method of the queue pairs: port, GID and partition key; empty where it
	// did not come to that.
	Way string `json:"way,omitempty"`
	// Tried is the last step: "open", "register", "connect", "write", "read"; Failed is the cause
	// of a failure, empty on success. Untested says why there was nothing to try.
	Tried    string `json:"tried,omitempty"`
	Failed   string `json:"failed,omitempty"`
	Untested string `json:"untested,omitempty"`
	// Wrong is how many bytes arrived wrong, of Bytes that were compared.
	Wrong uint64 `json:"wrong,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"`
	// Write and Read are rates between that memory and the host's, GB/s of 1e9 bytes.
	Write float64 `json:"write,omitempty"`
	Read  float64 `json:"read,omitempty"`
}

// ReadRDMA reads the output of a test to the end, and calls a function per result. It refuses
// unrequested results; results before an error are valid.
func ReadRDMA(r io.Reader, asked RDMAJob, each func(RDMAResult)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxPairLine)
	for n := 1; lines.Scan(); n++ {
		var result RDMAResult
		err := strictly(lines.Bytes(), &result)
		if err == nil {
			err = result.check(asked)
		}
		if err != nil {
			return &lineError{"the test of RDMA", n, err}
		}
		each(result)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the test of RDMA: %w", err)
	}
	return nil
}

func (r RDMAResult) check(asked RDMAJob) error {
	if t := r.Triple; t != nil {
		if !slices.ContainsFunc(asked.Triples, t.sameTriple) || r.NIC != t.NIC || (RDMAResult{NIC: r.NIC, Triple: t}) != r {
			return fmt.Errorf("%v: %w", t.TripleName, errNotAsked)
		}
		return t.Check()
	}
	i := slices.IndexFunc(asked.NICs, func(n RDMANIC) bool { return n.Name == r.NIC })
	if i < 0 || r.GPU != nil && !slices.Contains(asked.NICs[i].GPUs, *r.GPU) {
		return fmt.Errorf("NIC %.60q, GPU %v: %w", r.NIC, r.GPU, errNotAsked)
	}
	if (r.GPU == nil) != (r.Memory == MemoryHost) ||
		!slices.Contains([]string{MemoryHost, MemoryDMABuf, MemoryPeermem}, r.Memory) {
		return &ValueError{"memory", r.Memory, ""}
	}
	for _, rate := range []float64{r.Write, r.Read} {
		if !(rate >= 0 && rate < 1e6) {
			return &ValueError{"rate in GB/s", rate, ""}
		}
	}
	return nil
}
