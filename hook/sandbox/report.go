package sandbox

import (
	"encoding/json"
	"io"
	"os"
	"strings"
	"time"

	"github.com/peerlane/peerlane/internal/fault"
)

// confineTimeout limits the time to set up a relay's sandbox and execute the relay, which usually
// takes milliseconds, unless the host is overloaded.
const confineTimeout = 20 * time.Second

// ErrSilent reports that the process was killed during the setup of the sandbox: the next try may
// succeed.
var ErrSilent error = &fault.Error{
	Code:      fault.NoSandbox,
	Operation: "the relay's sandbox ended without a report",
	Remedy:    "read the generation's log",
}

// setupError is the text of a process that could not make the sandbox.
type setupError string

func (e setupError) Error() string { return string(e) }

// ReadReport reads the report, and returns when the relay has been executed.
func ReadReport(from *os.File) (*Report, error) {
	if err := from.SetReadDeadline(time.Now().Add(confineTimeout)); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(from, 64<<10))
	if err != nil {
		return nil, &fault.Error{
			Code:      fault.NoSandbox,
			Operation: "wait for the relay's sandbox for",
			Object:    confineTimeout.String(),
			Cause:     err,
		}
	}
	line, failure, _ := strings.Cut(string(text), "\n")
	r := &Report{}
	if err := json.Unmarshal([]byte(line), r); err != nil {
		failure = string(text) // an error in place of a report
	}
	if failure != "" {
		return nil, &fault.Error{Code: fault.NoSandbox, Operation: "make the relay's sandbox", Cause: setupError(failure)}
	}
	if line == "" {
		return nil, ErrSilent
	}
	return r, nil
}
