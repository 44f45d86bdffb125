package supervisor

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
)

// stderrTee copies the standard error of a relay to the generation's log, and keeps the first line
// of a panic and the last line.
type stderrTee struct {
	to io.Writer
	// wrap converts a plain line, such as a line of Go's runtime or of a C library, to a JSON
	// entry with the fields own.
	wrap bool
	own  map[string]string

	mu             sync.Mutex
	line           []byte
	panicked, last string
}

// maxLine is the maximum number of bytes to keep of a line, because a relay may never end a line.
const maxLine = 16 << 10

// maxWord is the maximum number of bytes of a relay's line to quote in a log line.
const maxWord = 400

// Write is not safe for concurrent use.
func (h *stderrTee) Write(text []byte) (int, error) {
	if !h.wrap {
		if n, err := h.to.Write(text); err != nil {
			return n, err
		}
	}
	for rest := text; len(rest) > 0; {
		line, more, ended := bytes.Cut(rest, []byte("\n"))
		rest = more
		h.line = append(h.line, line[:min(len(line), maxLine-len(h.line))]...)
		if ended {
			if err := h.end(); err != nil {
				return 0, err
			}
		}
	}
	return len(text), nil
}

// end processes a line, complete or not.
func (h *stderrTee) end() error {
	line := string(h.line)
	h.line = h.line[:0]
	if strings.TrimSpace(line) == "" {
		return nil
	}
	clean := launch.Line(strings.ToValidUTF8(line[:min(len(line), maxWord)], ""))
	h.mu.Lock()
	h.last = clean
	if h.panicked == "" && isPanic(line) {
		h.panicked = clean
	}
	h.mu.Unlock()
	if !h.wrap {
		return nil
	}
	entry := map[string]string{}
	if !json.Valid([]byte(line)) || line[0] != '{' {
		for name, value := range h.own {
			entry[name] = value
		}
		entry["level"], entry["msg"], entry["time"] = "error", strings.ToValidUTF8(line, ""), time.Now().Format(time.RFC3339)
		text, err := json.Marshal(entry)
		if err != nil {
			return err
		}
		line = string(text)
	}
	_, err := io.WriteString(h.to, line+"\n")
	return err
}

// isPanic reports whether a line is the first of a fatal error of Go's runtime.
func isPanic(line string) bool {
	for _, begins := range []string{"panic: ", "fatal error: ", "SIGSEGV: ", "SIGBUS: ", "SIGILL: ", "SIGFPE: ",
		"SIGABRT: ", "runtime: out of memory"} {
		if strings.HasPrefix(line, begins) {
			return true
		}
	}
	return false
}

// words returns the first line of a panic, or "" without one, and the last line.
func (h *stderrTee) words() (panicked, last string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.panicked, h.last
}
