package sandbox

import (
	"strings"
	"testing"
)

// What older kernels lack is said, as what a kernel without Landlock lacks is.
func TestWhatOlderLandlocksLack(t *testing.T) {
	for abi := 1; abi < 8; abi++ {
		var r Report
		olderLacks(abi, r.lacks)
		if said := strings.Contains(strings.Join(r.Missing, "\n"), "abstract Unix sockets"); said != (abi < 6) {
			t.Errorf("version %d lacks %q", abi, r.Missing)
		}
		if _, network, scopes := handled(abi); (network != 0) != (abi >= 4) || (scopes != 0) != (abi >= 6) {
			t.Errorf("version %d handles %#x of the network and scopes %#x", abi, network, scopes)
		}
	}
}
