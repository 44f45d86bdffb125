package picture

import (
	"math"
	"strconv"
	"strings"
	"unicode"
)

// style is a class of text in the style sheet.
type style struct {
	name string
	size float64 // pixels
	bold bool
	mono bool
}

var (
	styleTitle    = style{"title", 22, true, false}
	styleSubtitle = style{"subtitle", 13, false, false}
	styleColumn   = style{"column", 11, false, false}
	styleName     = style{"name", 13, true, false}
	styleText     = style{"text", 11, false, false}
	styleAddress  = style{"address", 11, false, true}
	styleLink     = style{"bandwidth", 10.5, false, false}
	styleLane     = style{"kind", 10.5, true, false}
	styleRate     = style{"rate", 11, true, false}
	styleSmall    = style{"small", 9.5, false, false}
	styleNarrow   = style{"narrow", 27, false, false}

	styles = []style{styleTitle, styleSubtitle, styleColumn, styleName, styleText, styleAddress, styleLink, styleLane,
		styleRate, styleSmall, styleNarrow}
)

// advances are the widths of DejaVu Sans from ' ' to '~', in thousandths of the size. DejaVu
// Sans is the widest sans-serif font of browsers: a text that fits in DejaVu Sans fits in the
// other fonts.
var advances = [...]uint16{
	318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337,
	636, 636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531,
	1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787,
	603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500,
	500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612,
	635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838,
}

const (
	boldFactor  = 1.14 // of DejaVu Sans Bold, over whole words
	monoAdvance = 0.61
)

// width is the room that a text takes at most, pixels.
func (s style) width(text string) float64 {
	sum := 0.0
	for _, r := range text {
		switch at := int(r) - ' '; {
		case r >= 0x1100: // East Asian, symbols
			sum += 1.3
		case s.mono:
			sum += monoAdvance
		case at >= 0 && at < len(advances):
			sum += float64(advances[at]) / 1000
		case unicode.Is(unicode.Mn, r):
		default:
			sum += 1
		}
	}
	if s.bold {
		sum *= boldFactor
	}
	return sum * s.size
}

// fit cuts a text to a width, and appends an ellipsis to a cut text.
func (s style) fit(text string, width float64) string {
	width += 0.01 // rounding: a text of exactly the width fits
	if s.width(text) <= width {
		return text
	}
	runes := []rune(text)
	for len(runes) > 0 {
		runes = runes[:len(runes)-1]
		if cut := strings.TrimRight(string(runes), " ,.") + "…"; s.width(cut) <= width {
			return cut
		}
	}
	return ""
}

// fitMiddle cuts a name to a width in the middle of the name: the names of NICs differ in the
// last characters (rocep139s0f0np0 and rocep139s0f1np1).
func (s style) fitMiddle(name string, width float64) string {
	width += 0.01 // rounding: a name of exactly the width fits
	if s.width(name) <= width {
		return name
	}
	runes := []rune(name)
	for n := len(runes) - 1; n > 0; n-- {
		if cut := string(runes[:n/2]) + "…" + string(runes[len(runes)-(n-n/2):]); s.width(cut) <= width {
			return cut
		}
	}
	return ""
}

// wrap breaks a text into lines of at most the given width, and cuts a wider word.
func (s style) wrap(text string, width float64) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		word = s.fit(word, width)
		if line != "" && s.width(line+" "+word) > width {
			lines = append(lines, line)
			line = ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// plain replaces characters of a name that a picture cannot show: control characters, and
// characters that turn the direction of writing. A name may come from an untrusted file.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Co, r) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}

// figure formats a bandwidth with its significant digits: 0.001, 0.5, 12.3, 400.
func figure(b float64) string {
	switch {
	case b > 0 && b < 0.1:
		return strconv.FormatFloat(b, 'g', 1, 64)
	case b < 99.95:
		return strings.TrimSuffix(strconv.FormatFloat(b, 'f', 1, 64), ".0")
	}
	return strconv.FormatFloat(b, 'f', 0, 64)
}

func gbs(b float64) string { return figure(b) + " GB/s" }

// coordinate formats a coordinate in the picture, in tenths of a pixel.
func coordinate(v float64) string {
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
}

// count returns "1 lane", "2 lanes" or "2 switches".
func count(n int, what string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(what, "ch"):
		what += "es"
	default:
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}

// list joins words: "a, b and c".
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
