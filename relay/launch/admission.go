package launch

// Claim is what a relay asks of its supervisor before it takes memory on a
// server GPU: the memory is admitted to all relays of a host together, and a
// relay can open nothing in which they could share an account. It goes over
// descriptor 5 like a Status; "claim" tells the two apart. Each is answered with
// an Admission, in any order.
type Claim struct {
	// Claim numbers the relay's claims from 1.
	Claim uint64 `json:"claim"`
	// GPU is a server GPU of the relay's lanes, as a PCI address, or HostMemory.
	GPU string `json:"gpu"`
	// Bytes is what the relay will have on the GPU in all, if it is admitted: less
	// than before gives the rest back.
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
	// Error says why it is not admitted: the limit, the sum, and who holds it.
	Error string `json:"error,omitempty"`
	// Free is how much would be, bytes.
	Free uint64 `json:"free,omitempty"`
}
