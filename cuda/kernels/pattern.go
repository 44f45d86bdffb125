package kernels

import "encoding/binary"

// Pattern is an infinite sequence of distinct 64-bit words, so a misplaced word is a difference. In
// memory the words are little-endian.
type Pattern struct {
	Seed  uint64 // different seeds give different patterns
	First uint64 // number of the first word of a range
}

// Word returns word number i of a range.
func (p Pattern) Word(i uint64) uint64 {
	x := (p.First+i)*0x9e3779b97f4a7c15 + p.Seed*0xbf58476d1ce4e5b9
	x = (x ^ x>>29) * 0x94d049bb133111eb
	return x ^ x>>32
}

// Fill writes the pattern to the whole words of b.
func (p Pattern) Fill(b []byte) {
	for i := range len(b) / word {
		binary.LittleEndian.PutUint64(b[i*word:], p.Word(uint64(i)))
	}
}

// Compare compares the whole words of b with the pattern.
func (p Pattern) Compare(b []byte) Difference {
	var d Difference
	for i := range len(b) / word {
		if binary.LittleEndian.Uint64(b[i*word:]) == p.Word(uint64(i)) {
			continue
		}
		if d.Words == 0 {
			d.First = uint64(i) * word
		}
		d.Words++
	}
	return d
}
