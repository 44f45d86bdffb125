package launch

// Claim is a relay's request to the supervisor before an allocation on a server GPU: supervisors
// admit the memory of every relay of a host under a common account, which relays cannot open. It
// goes over descriptor 5 like a Status; "claim" tells the two apart. Each is answered with an
// Admission, in any order.
type Claim struct {
	// Claim numbers the relay's claims from 1.
	Claim uint64 `json:"claim"`
	// GPU is a server GPU of the relay's lanes, as a PCI address, or HostMemory.
	GPU string `json:"gpu"`
	// Bytes is the relay's total on the GPU after the allocation: less than before gives the rest
	// back.
	Bytes uint64 `json:"bytes"`
	// Memory is the whole GPU's, bytes: the limit can be a part of it.
	Memory uint64 `json:"memory"`
}

// HostMemory stands for the host's memory in a Claim.
const HostMemory = "host"

// Admission is the answer to a Claim.
type Admission struct {
	Claim uint64 `json:"claim"` // its number
	OK    bool   `json:"ok"`
	// Error is the reason of a refusal: the limit, the sum, and the holders.
	Error string `json:"error,omitempty"`
	// Free is how much would be, bytes.
	Free uint64 `json:"free,omitempty"`
}
