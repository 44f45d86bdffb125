package demo

import (
	"encoding/binary"
	"fmt"
)

// pattern is a stream of bytes that depends only on a seed and the position: word i of message m
// is a mix (splitmix64) of both.
type pattern struct{ seed uint64 }

// patternOf returns the pattern of a message in a direction.
func patternOf(seed uint64, direction string, message int) pattern {
	for _, b := range []byte(direction) {
		seed = mix(seed ^ uint64(b))
	}
	return pattern{mix(seed + uint64(message))}
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (p pattern) fill(b []byte) {
	word := uint64(0)
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, mix(p.seed+word))
		word++
	}
	if len(b) > 0 {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], mix(p.seed+word))
		copy(b, last[:])
	}
}

// check compares every byte.
func (p pattern) check(b []byte) error {
	whole := b
	word := uint64(0)
	for ; len(b) >= 8; b = b[8:] {
		if got, want := binary.LittleEndian.Uint64(b), mix(p.seed+word); got != want {
			return fmt.Errorf("at byte %d of %d: %#016x instead of %#016x", len(whole)-len(b), len(whole), got, want)
		}
		word++
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], mix(p.seed+word))
	for i, got := range b {
		if got != last[i] {
			return fmt.Errorf("at byte %d of %d: %#02x instead of %#02x", len(whole)-len(b)+i, len(whole), got, last[i])
		}
	}
	return nil
}
