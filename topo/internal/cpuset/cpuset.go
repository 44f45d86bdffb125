package cpuset

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo/internal/textfile"
)

// maxWords bounds a set, in words of 32 bits.
const maxWords = 512

// Set is a set of processors or NUMA nodes, 32 to a word, the lowest first.
type Set []uint32

func (s Set) Has(n int) bool { return n/32 < len(s) && s[n/32]&(1<<(n%32)) != 0 }

// Parse reads a set in hwloc's notation, "0x0000ffff,0xff000000": the highest word first. Parse
// refuses an infinite set ("0xf...f,").
func Parse(text string) (Set, error) {
	if text == "" {
		return nil, nil
	}
	words := strings.Split(text, ",")
	if len(words) > maxWords {
		return nil, fmt.Errorf("%d words of 32 bits, more than %d", len(words), maxWords)
	}
	set := make(Set, len(words))
	for i, w := range words {
		if w == "" { // hwloc writes an empty word for 0
			continue
		}
		bits, err := strconv.ParseUint(strings.TrimPrefix(w, "0x"), 16, 32)
		if err != nil {
			return nil, fmt.Errorf("%s is not a set of hwloc such as 0x0000ffff,0xff000000", textfile.QuoteStart([]byte(text)))
		}
		set[len(words)-1-i] = uint32(bits)
	}
	return set, nil
}

// String writes "0-11,24-35", as the kernel does.
func (s Set) String() string {
	var parts []string
	for i := 0; i < 32*len(s); i++ {
		if !s.Has(i) {
			continue
		}
		first := i
		for s.Has(i + 1) {
			i++
		}
		part := strconv.Itoa(first)
		if i > first {
			part += "-" + strconv.Itoa(i)
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ",")
}
