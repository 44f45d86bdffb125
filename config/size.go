package config

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// Size is a number of bytes, written as "8MiB" or "8388608".
//
// The hook reads sizes before every container, and loading go-humanize takes longer than parsing
// the sizes of a file. A test checks that these functions return the results of go-humanize.
type Size uint64

var units = [...]string{"", "k", "m", "g", "t", "p", "e"}

// UnmarshalText reads a size as humanize.ParseBytes does: MB is 10^6 bytes, MiB 2^20.
func (s *Size) UnmarshalText(text []byte) error {
	n, ok := parseSize(string(text))
	if !ok {
		return fmt.Errorf(`%q is not a size such as "8MiB"`, text)
	}
	*s = n
	return nil
}

func parseSize(text string) (Size, bool) {
	digits := strings.TrimLeft(text, "0123456789.,")
	text = strings.ReplaceAll(text[:len(text)-len(digits)], ",", "")
	number, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return 0, false
	}
	unit, base := strings.ToLower(strings.TrimSpace(digits)), uint64(1000)
	unit = strings.TrimSuffix(unit, "b")
	if of, ok := strings.CutSuffix(unit, "i"); ok && of != "" {
		unit, base = of, 1024
	}
	factor := uint64(1)
	for _, u := range units {
		if u == unit {
			if whole, err := strconv.ParseUint(text, 10, 64); err == nil {
				over, n := bits.Mul64(whole, factor)
				return Size(n), over == 0
			}
			number *= float64(factor)
			return Size(number), number < math.MaxUint64
		}
		factor *= base
	}
	return 0, false
}

// String returns the text of humanize.IBytes: "512 MiB".
func (s Size) String() string {
	value, exponent := float64(s), 0
	for ; value >= 1024; exponent++ {
		value /= 1024
	}
	if s < 10 {
		return fmt.Sprintf("%d B", uint64(s))
	}
	unit := "B"
	if exponent > 0 {
		unit = strings.ToUpper(units[exponent]) + "iB"
	}
	if value < 10 {
		if value = math.Floor(value*10+0.5) / 10; value < 10 {
			return fmt.Sprintf("%.1f %s", value, unit)
		}
	}
	return fmt.Sprintf("%.0f %s", math.Floor(value+0.5), unit)
}
