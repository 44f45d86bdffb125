package lazyregexp

import (
	"regexp"
	"sync"
)

// Regexp is a regular expression that MatchString and the other methods compile at the first use.
type Regexp struct {
	compile func() *regexp.Regexp
	// matches replaces the expression in MatchString; nil to use the expression.
	matches func(string) bool
}

func New(expression string) *Regexp {
	return &Regexp{compile: sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })}
}

// by sets a function that matches the strings of the expression, and compiles nothing.
func (p *Regexp) by(matches func(string) bool) *Regexp {
	p.matches = matches
	return p
}

func (p *Regexp) MatchString(s string) bool {
	if p.matches != nil {
		return p.matches(s)
	}
	return p.compile().MatchString(s)
}

// hexadecimal reports whether s consists of lower-case hexadecimal digits, and has at least the
// given number of digits.
func hexadecimal(s string, minDigits int) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(s) >= minDigits
}

// isHostBridge matches "pci0000:00".
func isHostBridge(s string) bool {
	const bus = len(":00")
	at := len(s) - bus
	return at >= len("pci0000") && s[:len("pci")] == "pci" && s[at] == ':' && hexadecimal(s[len("pci"):at], 4) &&
		hexadecimal(s[at+1:], 2)
}

// IsDevice matches "0000:00:00.0".
func IsDevice(s string) bool {
	const function = len(":00:00.0")
	at := len(s) - function
	return at >= 4 && s[at] == ':' && s[at+3] == ':' && s[at+6] == '.' && s[at+7] >= '0' && s[at+7] <= '7' &&
		hexadecimal(s[:at], 4) && hexadecimal(s[at+1:at+3], 2) && hexadecimal(s[at+4:at+6], 2)
}
func (p *Regexp) FindString(s string) string           { return p.compile().FindString(s) }
func (p *Regexp) FindStringSubmatch(s string) []string { return p.compile().FindStringSubmatch(s) }
func (p *Regexp) ReplaceAll(text, with []byte) []byte  { return p.compile().ReplaceAll(text, with) }

var (
	HostBridgePattern = New(`^pci[0-9a-f]{4,}:[0-9a-f]{2}$`).by(isHostBridge)
	DevicePattern     = New(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`).by(IsDevice)
)
