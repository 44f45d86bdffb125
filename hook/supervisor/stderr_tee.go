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

// stderrTee copies the standard error of a relay into the generation's
// log: remembered are the line that a panic begins with, and the last one.
type stderrTee struct {
	to io.Writer
	// wrap makes an entry of each line that is none: of a log in JSON each line is one,
	// also where Go's runtime, or a library in C, says something. Its fields are own.
	wrap bool
	own  map[string]string

	mu             sync.Mutex
	line           []byte
	panicked, last string
}

// maxLine bounds what is kept of a line, bytes: a relay may never end one.
const maxLine = 16 << 10

// maxWord bounds what a line of the log tells of what a relay has said.
const maxWord = 400

// Write is of one goroutine.
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

// end takes note of a line, or of what there is of one.
func (h *stderrTee) end() error {
	line := string(h.line)
	h.line = h.line[:0]
	if strings.TrimSpace(line) == "" {
		return nil
	}
	said := launch.Line(strings.ToValidUTF8(line[:min(len(line), maxWord)], ""))
	h.mu.Lock()
	h.last = said
	if h.panicked == "" && isPanic(line) {
		h.panicked = said
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

// isPanic reports whether Go's runtime ends the process with what such a line begins.
func isPanic(line string) bool {
	for _, begins := range []string{"panic: ", "fatal error: ", "SIGSEGV: ", "SIGBUS: ", "SIGILL: ", "SIGFPE: ", "SIGABRT: ", "runtime: out of memory"} {
		if strings.HasPrefix(line, begins) {
			return true
		}
	}
	return false
}

// words are the panic's first line, empty where there was none, and the last one of all.
func (h *stderrTee) words() (panicked, last string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.panicked, h.last
}
