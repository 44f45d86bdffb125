package launch

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
)

// A triple is tested before a lane's data goes by a NIC through a GPU's memory: the NIC writes into
// memory that is allocated and registered as slots are, and the client's GPU copies it out; the
// client's GPU copies into the memory, and the NIC reads the memory. `peerlane-relay rdma-test`
// tests triples, in a sandbox as a relay's.

// TripleName is a client's GPU, the GPU that has the memory, which may be the same one, and a
// NIC that reads and writes the memory.
type TripleName struct {
	PairName
	NIC string `json:"nic"`
}

func (n TripleName) String() string {
	if sameGPU(n.GPU, n.Server) {
		return fmt.Sprintf("GPU %d (%s) and %s", n.GPU.Index, n.GPU.BusID, n.NIC)
	}
	return fmt.Sprintf("%v and %s", n.PairName, n.NIC)
}

func (n TripleName) sameTriple(o TripleName) bool { return n.NIC == o.NIC && n.same(o.PairName) }

// Triple is the result of a triple's test.
type Triple struct {
	TripleName
	// Verdict is VerdictGood, VerdictWrong or VerdictUntested.
	Verdict string `json:"verdict"`
	Reason  string `json:"reason,omitempty"` // unless it is good
	// Memory is how the NIC knows the memory, one of Memory*.
	Memory string `json:"memory,omitempty"`
	// Flushed: the NIC flushed writes before every copy, as NICs of relays do for this memory.
	Flushed bool `json:"flushed,omitempty"`
	// Rounds is the number of round trips, Bytes the number of compared bytes.
	Rounds int    `json:"rounds"`
	Bytes  uint64 `json:"bytes"`
	// Setting identifies firmware of the NIC, routing of peer-to-peer requests (ACS) and the
	// configuration at the time of the test; another one invalidates the result.
	Setting string `json:"setting,omitempty"`
	// Milliseconds is the test's duration, and At its time, Unix seconds.
	Milliseconds int64 `json:"milliseconds"`
	At           int64 `json:"at"`
}

// Age returns the time since the test.
func (t *Triple) Age() time.Duration { return time.Since(time.Unix(t.At, 0)) }

// Check returns an error for values that no test can have found.
func (t Triple) Check() error {
	if err := (Pair{PairName: t.PairName, Verdict: VerdictGood, Bytes: t.Bytes, Milliseconds: t.Milliseconds,
		At: t.At}).Check(); err != nil {
		return err
	}
	if t.NIC == "" || len(t.NIC) > maxNICName ||
		strings.ContainsFunc(t.NIC, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) {
		return &ValueError{"NIC", t.NIC, ""}
	}
	if !slices.Contains([]string{VerdictGood, VerdictWrong, VerdictUntested}, t.Verdict) {
		return &ValueError{"verdict", t.Verdict, ""}
	}
	for _, text := range []string{t.Reason, t.Setting} {
		if len(text) > maxReason || strings.ContainsFunc(text, unicode.IsControl) {
			return &ValueError{"reason or setting", text, textForm}
		}
	}
	if (t.Reason == "") != (t.Verdict == VerdictGood) {
		return &ValueError{"reason of verdict " + t.Verdict, t.Reason, ""}
	}
	if !slices.Contains([]string{"", MemoryDMABuf, MemoryPeermem}, t.Memory) {
		return &ValueError{"memory", t.Memory, ""}
	}
	if t.Rounds < 0 || t.Rounds > 1<<30 {
		return &ValueError{"rounds", t.Rounds, ""}
	}
	return nil
}

// maxNICName is the longest name of an RDMA device (IB_DEVICE_NAME_MAX of the kernel).
const maxNICName = 64

// FindTriple returns the entry of a triple in a list, nil for none.
func FindTriple(list []Triple, name TripleName) *Triple {
	if i := slices.IndexFunc(list, func(t Triple) bool { return t.sameTriple(name) }); i >= 0 {
		return &list[i]
	}
	return nil
}

// ContainsTriple reports whether a list has a triple.
func ContainsTriple(list []TripleName, name TripleName) bool {
	return slices.ContainsFunc(list, name.sameTriple)
}

// StagingTriples returns the triples by which data of a container's lanes can go: every server of a
// staged lane, and the GPU of a near lane, with the NICs of the lane, then with the NICs of the
// remaining lanes; then spares with the NICs of the lane and of the remaining lanes.
func StagingTriples(lanes []Lane) []TripleName {
	var list []TripleName
	add := func(gpu, server GPU, nics []string) {
		for _, nic := range nics {
			n := TripleName{PairName{gpu, server}, nic}
			if !ContainsTriple(list, n) {
				list = append(list, n)
			}
		}
	}
	addLane := func(l Lane, nics []string) {
		if l.Relay {
			for _, server := range l.Servers {
				add(l.GPU, server, nics)
			}
		}
		if l.Direct {
			add(l.GPU, l.GPU, nics)
		}
	}
	for _, l := range lanes {
		addLane(l, l.NICs)
	}
	// Another relay picks the NIC by which data comes.
	for _, l := range lanes {
		for _, other := range lanes {
			addLane(l, other.NICs)
		}
	}
	for _, l := range lanes {
		if !l.Relay {
			continue
		}
		for _, spare := range l.Spares {
			add(l.GPU, spare.GPU, l.NICs)
			for _, other := range lanes {
				add(l.GPU, spare.GPU, other.NICs)
			}
		}
	}
	return list
}
