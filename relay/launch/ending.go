package launch

import "strings"

// Causes of a relay's end that it knows itself. Others, a signal that it cannot catch, a
// panic, its supervisor knows.
const (
	EndContainer = "container ended"
	EndSignal    = "signal"                            // one that asks for the end, SIGTERM
	EndRequest   = "request"                           // RequestEnd
	EndGPU       = "lost GPU"                          // of which no context can be made any more
	EndCUDA      = "sticky CUDA error"                 // a context is lost
	EndKept      = "something could not be given back" // and only the process's end gives it back
	EndPair      = "self-test"                         // a pair that it has staged on has failed one since
)

// Ending is the last that a relay tells its supervisor, where Config.Endings says that it
// is heard: why it ends.
type Ending struct {
	Cause  string `json:"cause"`
	Reason string `json:"reason"`
}

// maxEnding bounds what is believed of an ending, bytes: a relay can have been taken over.
const maxEnding = 1 << 10

// Tame is an ending with no more in it than a line of a log has room for.
func (e Ending) Tame() Ending {
	return Ending{tame(e.Cause), tame(e.Reason)}
}

func tame(text string) string {
	return Line(strings.ToValidUTF8(text[:min(len(text), maxEnding)], ""))
}

// Line is a text of a relay without what would move a terminal.
func Line(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}
