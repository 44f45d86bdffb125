package launch

import "strings"

// Causes of a relay's end that the relay detects. The supervisor detects further causes: a signal
// that the relay cannot catch, a panic.
const (
	EndContainer = "container ended"
	EndSignal    = "signal"              // one that asks for the end, SIGTERM
	EndRequest   = "request"             // RequestEnd
	EndGPU       = "lost GPU"            // of which no context can be made any more
	EndCUDA      = "sticky CUDA error"   // a context is lost
	EndKept      = "memory not released" // the end of the process frees the memory
	EndPair      = "self-test"           // a pair that it has staged on has failed one since
)

// Ending is a relay's last message to the supervisor, if Config.Endings is set: why it ends.
type Ending struct {
	Cause  string `json:"cause"`
	Reason string `json:"reason"`
}

// maxEnding limits the accepted bytes of an ending: a relay can have been taken over.
const maxEnding = 1 << 10

// Tame returns an ending cut to the length of a log line.
func (e Ending) Tame() Ending {
	return Ending{tame(e.Cause), tame(e.Reason)}
}

func tame(text string) string {
	return Line(strings.ToValidUTF8(text[:min(len(text), maxEnding)], ""))
}

// Line is a relay's text without control characters.
func Line(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}
