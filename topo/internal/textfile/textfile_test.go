package textfile

import (
	"errors"
	"strings"
	"testing"
)

func TestWithoutDashesReplacesOnlyWithinComments(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"no comment", "<a b='-'/>-", "<a b='-'/>-"},
		{"comment without dashes", "<!-- a --><b/>", "<!-- a --><b/>"},
		{"dashes at both ends", "<!---- a ----><b c='-'/>", "<!--.. a ..--><b c='-'/>"},
		{"two comments", "<!-- a-b --><c/><!-- d-e -->", "<!-- a.b --><c/><!-- d.e -->"},
		{"a comment in CDATA", "<![CDATA[<!-- a-b -->]]><!-- a-b -->", "<![CDATA[<!-- a-b -->]]><!-- a.b -->"},
		{"a comment in an instruction", "<?x <!-- a-b --?><!-- a-b -->", "<?x <!-- a-b --?><!-- a.b -->"},
		{"open comment", "<!-- a-b", "<!-- a-b"},
		{"open comment after another", "<!-- a-b --><!-- a-b", "<!-- a.b --><!-- a-b"},
	} {
		text := []byte(c.text)
		if got := string(WithoutDashes(text)); got != c.want || string(text) != c.text {
			t.Errorf("%s: %q, want %q; the argument is %q", c.name, got, c.want, text)
		}
	}
}

func TestQuoteStartCutsLongLines(t *testing.T) {
	for text, want := range map[string]string{
		"":                             `""`,
		" a \nb":                       `"a"`,
		strings.Repeat("a", 40):        `"` + strings.Repeat("a", 40) + `"`,
		strings.Repeat("a", 41):        `"` + strings.Repeat("a", 40) + `" ..`,
		strings.Repeat("a", 39) + "éb": `"` + strings.Repeat("a", 39) + `?" ..`,
		"\x1b[2J":                      `"\x1b[2J"`,
	} {
		if got := QuoteStart([]byte(text)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestPlaceErrorIsPlaceWithoutCause(t *testing.T) {
	cause := errors.New("cause")
	err := error(&PlaceError{Line: 2, Column: 3, Err: cause})
	for _, c := range []struct {
		name   string
		target error
		want   bool
	}{
		{"the place", &PlaceError{Line: 2, Column: 3}, true},
		{"another line", &PlaceError{Line: 1, Column: 3}, false},
		{"another column", &PlaceError{Line: 2, Column: 2}, false},
		{"the place with another cause", &PlaceError{Line: 2, Column: 3, Err: errors.New("other")}, false},
		{"the cause", cause, true},
		{"another error", errors.New("other"), false},
	} {
		if got := errors.Is(err, c.target); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}
