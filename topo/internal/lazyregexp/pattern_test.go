package lazyregexp

import (
	"math/rand/v2"
	"testing"
)

func TestPatternsMatchAsTheirExpressions(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	seeds := []string{"pci0000:00", "pci10000:e0", "0000:17:00.0", "10000:e1:1f.7", "pci000:00", "0000:17:00.8", "", "pci",
		":", "0000:17:00", "pcipci0000:00", "PCI0000:00", "0000:17:00.0\n", "pci0000:0"}
	const letters = "0123456789abcdefABgpi:.\n"
	for _, p := range []*Regexp{HostBridgePattern, DevicePattern} {
		for range 20_000 {
			s := []byte(seeds[r.IntN(len(seeds))])
			for range r.IntN(3) {
				switch at := r.IntN(len(s) + 1); r.IntN(3) {
				case 0:
					s = append(s[:at:at], append([]byte{letters[r.IntN(len(letters))]}, s[at:]...)...)
				case 1:
					if at < len(s) {
						s[at] = letters[r.IntN(len(letters))]
					}
				case 2:
					if at < len(s) {
						s = append(s[:at:at], s[at+1:]...)
					}
				}
			}
			if got, want := p.MatchString(string(s)), p.compile().MatchString(string(s)); got != want {
				t.Fatalf("%q: %v, and the expression says %v", s, got, want)
			}
		}
	}
}
