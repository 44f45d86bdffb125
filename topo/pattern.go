package topo

import (
	"regexp"
	"sync"
)

// pattern is a regular expression that is compiled at its first use: the hook,
// which runs in front of every container, needs hardly one of them.
type pattern struct {
	compile func() *regexp.Regexp
}

func newPattern(expression string) *pattern {
	return &pattern{sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })}
}

func (p *pattern) MatchString(s string) bool            { return p.compile().MatchString(s) }
func (p *pattern) FindString(s string) string           { return p.compile().FindString(s) }
func (p *pattern) FindStringSubmatch(s string) []string { return p.compile().FindStringSubmatch(s) }
func (p *pattern) ReplaceAll(text, with []byte) []byte  { return p.compile().ReplaceAll(text, with) }
