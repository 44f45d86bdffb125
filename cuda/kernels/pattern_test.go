package kernels

import "testing"

func TestWordsOfAPatternDiffer(t *testing.T) {
	seen := map[uint64]Pattern{}
	for seed := range uint64(64) {
		for i := range uint64(1024) {
			w := Pattern{Seed: seed}.Word(i)
			if other, ok := seen[w]; ok {
				t.Fatalf("word %d of seed %d is that of %+v", i, seed, other)
			}
			seen[w] = Pattern{seed, i}
		}
	}
	if (Pattern{Seed: 3, First: 10}).Word(5) != (Pattern{Seed: 3}).Word(15) {
		t.Error("a range that begins at word 10 has another word 5 than the pattern has 15")
	}
}

func TestCompareFindsTheFirstDifference(t *testing.T) {
	b := make([]byte, 803) // a partial word does not count
	p := Pattern{Seed: 9, First: 1 << 50}
	p.Fill(b)
	if b[800] != 0 || p.Compare(b) != (Difference{}) {
		t.Fatalf("%v in what was filled; the last bytes are %v", p.Compare(b), b[800:])
	}
	b[799]++
	b[160]++
	if got := p.Compare(b); got != (Difference{Words: 2, First: 160}) {
		t.Errorf("%v", got)
	}
}
