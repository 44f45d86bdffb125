package picture

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The sums are those of DejaVuSans.ttf 2.37: the advances of table hmtx, rounded to thousandths of the
// size.
func TestTextWidthIsThatOfDejaVuSans(t *testing.T) {
	plain := style{"", 1000, false, false}
	for _, tt := range []struct {
		first, last rune
		want        float64
	}{{' ', '/', 8110}, {'0', '9', 6360}, {':', '@', 4719}, {'A', 'Z', 17490}, {'[', '`', 2955}, {'a', 'z', 14649},
		{'{', '~', 2447}} {
		var text []rune
		for r := tt.first; r <= tt.last; r++ {
			text = append(text, r)
		}
		if got := plain.width(string(text)); math.Abs(got-tt.want) > 0.01 {
			t.Errorf("%s: %g, want %g", string(text), got, tt.want)
		}
	}
	for _, tt := range []struct {
		name string
		s    style
		text string
		want float64
	}{
		{"bold", style{"", 1000, true, false}, "00", 1.14 * 2 * 636},
		{"mono", style{"", 1000, false, true}, "i0W", 3 * 610},
		{"size", style{"", 10, false, false}, "00", 12.72},
		{"a Han character", plain, "一", 1300},
		{"Hangul Jamo, the first wide characters", plain, "\u1100", 1300},
		{"the last other character", plain, "\u10ff", 1000},
		{"a combining accent", plain, "0\u0301", 636},
		{"an accented letter", plain, "é", 1000},
		{"DEL", plain, "\x7f", 1000},
		{"a control character", plain, "\x1f", 1000},
	} {
		if got := tt.s.width(tt.text); math.Abs(got-tt.want) > 0.001 {
			t.Errorf("%s: %g, want %g", tt.name, got, tt.want)
		}
	}
}

func TestTextFitsRoom(t *testing.T) {
	mono := style{"", 100, false, true} // 61 for a character, 130 for the ellipsis
	for _, tt := range []struct {
		text        string
		room        float64
		end, middle string
	}{
		{"abcdef", 366, "abcdef", "abcdef"},
		{"abcdef", 365.995, "abcdef", "abcdef"},
		{"abcdef", 365.9, "abc…", "a…ef"},
		{"abcdef", 313, "abc…", "a…ef"},
		{"abcdef", 305, "ab…", "a…f"},
		{"abcdef", 191, "a…", "…f"},
		{"abcdef", 190, "…", ""},
		{"abcdef", 129, "", ""},
		{"ab, cdef", 305, "ab…", "a…f"},
		{"", 0, "", ""},
	} {
		// A mark of the middle needs a character of the name.
		if got := mono.fit(tt.text, tt.room); got != tt.end {
			t.Errorf("%q in %g: %q, want %q", tt.text, tt.room, got, tt.end)
		}
		if got := mono.fitMiddle(tt.text, tt.room); got != tt.middle {
			t.Errorf("%q in %g, cut in the middle: %q, want %q", tt.text, tt.room, got, tt.middle)
		}
	}
	for _, tt := range []struct {
		text string
		room float64
		want []string
	}{
		{"ab cd ef", 61 * 8, []string{"ab cd ef"}},
		{"ab cd ef", 61*8 - 1, []string{"ab cd", "ef"}},
		{"ab cd ef", 61 * 2, []string{"ab", "cd", "ef"}},
		{"  ab   cd ", 61 * 5, []string{"ab cd"}},
		{"abcdef gh", 61 * 4, []string{"a…", "gh"}},
		{"", 61, nil},
	} {
		if diff := cmp.Diff(tt.want, mono.wrap(tt.text, tt.room)); diff != "" {
			t.Errorf("%q in %g (-want +got):\n%s", tt.text, tt.room, diff)
		}
	}
}

func TestFiguresHaveSignificantDigits(t *testing.T) {
	for b, want := range map[float64]string{0: "0", 0.001: "0.001", 0.0234: "0.02", 0.099: "0.1", 0.1: "0.1", 0.5: "0.5",
		1: "1", 12.34: "12.3", 99.94: "99.9", 99.95: "100", 370.8: "371", 400: "400"} {
		if got := figure(b); got != want {
			t.Errorf("%g: %q, want %q", b, got, want)
		}
	}
	for v, want := range map[float64]string{0: "0", 1.04: "1", 1.05: "1.1", 112: "112", 12.25: "12.3", -1.5: "-1.5"} {
		if got := coordinate(v); got != want {
			t.Errorf("coordinate %g: %q, want %q", v, got, want)
		}
	}
	for part, want := range map[float64]string{0: "0 %", 0.504: "50 %", 1: "100 %"} {
		if got := percent(part); got != want {
			t.Errorf("%g: %q, want %q", part, got, want)
		}
	}
}

func TestWordsAreListed(t *testing.T) {
	for n, want := range map[int]string{0: "0 lanes", 1: "1 lane", 2: "2 lanes"} {
		if got := count(n, "lane"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, words := range map[string][]string{"": nil, "a": {"a"}, "a and b": {"a", "b"},
		"a, b and c": {"a", "b", "c"}} {
		if got := list(words); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for text, want := range map[string]string{"a b": "a b", "a\tb": "a\ufffdb", "\u202ea": "\ufffda",
		"\ue000": "\ufffd", "\xff": "\ufffd"} {
		if got := plain(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
