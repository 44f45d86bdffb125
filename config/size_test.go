package config

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/dustin/go-humanize"
)

// Size parses and prints like go-humanize.
func TestSizesEqualThoseOfHumanize(t *testing.T) {
	for _, text := range []string{
		"", "0", "8388608", "8MiB", "8 MiB", "8mib", "8M", "8Mi", "8MB", "1.5GiB", "1,024", "1,5k", "1.2.3k", ".", ",", "k",
		"KiB", "i", "ib",
		"1i", "1ib", "1b", "1 B", "1bb", "1kbb", "-1", "+1", "1e3", "0x10", "16EiB", "15EiB", "16E", "18446744073709551615",
		"18446744073709551616", "99999EB",
		"1 k b", "1k ", " 1k", "1\tk", "1TiB", "1PiB", "1PB", "1Ki", "1kI", "1KIB", "1 ZiB", "1٣", "1K", "NaN", "Inf",
		"1_000",
	} {
		want, err := humanize.ParseBytes(text)
		got, ok := parseSize(text)
		if ok != (err == nil) || ok && uint64(got) != want {
			t.Errorf("%q is %d (%t), and %d (%v) to humanize", text, got, ok, want, err)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	sizes := []uint64{
		0,
		9,
		10,
		1023,
		1024,
		1025,
		10239,
		10240,
		64 << 10,
		32 << 20,
		1<<20 - 1,
		1 << 40,
		1 << 60,
		math.MaxUint64,
	}
	for range 10000 {
		sizes = append(sizes, r.Uint64()>>r.IntN(64))
	}
	for _, n := range sizes {
		if got, want := Size(n).String(), humanize.IBytes(n); got != want {
			t.Errorf("%d is %q, and %q to humanize", n, got, want)
		}
	}
}
