package main

import (
	"bytes"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/integration/programs"
)

// The hook limits its memory, and ends with an error, for a state of any size from a runtime.
func TestHookStateOfHundredMegabytesIsRefused(t *testing.T) {
	const limit = 160 << 10 // KiB: the growing text, and its double before a garbage collection
	root := t.TempDir()
	for name, part := range map[string]string{"one value": "x", "many values": `","x":"`, "depth": `{"annotations":`} {
		text := io.MultiReader(strings.NewReader(`{"annotations":{"x":"`), io.LimitReader(&repeated{part: part}, 100<<20))
		if name == "depth" {
			text = io.LimitReader(&repeated{part: part}, 100<<20)
		}
		c := exec.Command(programs.Path(t, programs.Hook), "create", "--root", root, "--lane", "@0000:17:00.0")
		c.Stdin, c.Env = text, []string{"PATH=/nowhere"}
		var out bytes.Buffer
		c.Stdout, c.Stderr = &out, &out
		err := c.Run()
		if c.ProcessState == nil || c.ProcessState.ExitCode() != 1 ||
			!strings.Contains(out.String(), "more than 16777216 bytes") || out.Len() > 1000 {
			t.Errorf("%s: %v: %.1000s", name, err, out.String())
			continue
		}
		if rss := c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss; rss > limit {
			t.Errorf("%s: it took %d KiB; %d are permitted", name, rss, limit)
		} else {
			t.Logf("%s: %d KiB, %v", name, rss, c.ProcessState.UserTime()+c.ProcessState.SystemTime())
		}
	}
}

// repeated is an endless text.
type repeated struct {
	part string
	at   int
}

func (r *repeated) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r.part[r.at%len(r.part)]
		r.at++
	}
	return len(p), nil
}
