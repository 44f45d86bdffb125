package cpuset

import (
	"strings"
	"testing"
)

func TestParseSetReadsHwlocNotation(t *testing.T) {
	for text, want := range map[string]string{
		"":                      "",
		"0x0":                   "",
		"0x1":                   "0",
		"0xb":                   "0-1,3",
		"0xffffffff":            "0-31",
		"0x0000ffff,0xff000000": "24-47",
		"0x1,,0x80000000":       "31,64",
		"80000000,00000001":     "0,63",
	} {
		set, err := Parse(text)
		if err != nil {
			t.Errorf("%.40q: %v", text, err)
			continue
		}
		if got := set.String(); got != want {
			t.Errorf("%.40q is %q, want %q", text, got, want)
		}
	}
}

func TestParseInvalidSetFails(t *testing.T) {
	for name, text := range map[string]string{
		"infinite":      "0xf...f,",
		"a large word":  "0x100000000",
		"no digits":     "0x",
		"other letters": "0xg",
		"a sign":        "-1",
		"many words":    strings.Repeat("0x1,", maxWords) + "0x1",
	} {
		if set, err := Parse(text); err == nil {
			t.Errorf("%s: %v", name, set)
		}
	}
	if _, err := Parse(strings.Repeat("0x1,", maxWords-1) + "0x1"); err != nil {
		t.Errorf("%d words: %v", maxWords, err)
	}
}

func TestHasOutsideSetIsFalse(t *testing.T) {
	set := Set{1 << 31, 1}
	for n, want := range map[int]bool{0: false, 30: false, 31: true, 32: true, 33: false, 63: false, 64: false} {
		if got := set.Has(n); got != want {
			t.Errorf("%d: %t", n, got)
		}
	}
}
