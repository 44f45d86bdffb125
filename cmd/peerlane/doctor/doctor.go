// Package doctor examines a host for causes of failing or slow lanes that no error reports: a port
// at half rate, a stale specification, a switch that redirects peer-to-peer traffic.
//
// A Check is an entry of All, and every subject has a file. To add a check, write a function that
// examines a Host and returns findings, add an entry to the list of the subject, and add a host
// with the fault to the table of the tests. A program generates docs/doctor.md. A check changes
// nothing, works for any user, and reports sources that it cannot read.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status is the severity of a finding; greater is worse.
type Status int

// Severities. NotApplicable means that the host lacks the examined device or feature, and counts
// as OK.
const (
	NotApplicable Status = iota - 1
	OK
	Unknown
	Warning
	Failure
)

var words = []string{"n/a", "ok", "could not tell", "warning", "failure"}

func (s Status) String() string { return words[s-NotApplicable] }

// MarshalText returns the printed form.
func (s Status) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText parses the form of MarshalText.
func (s *Status) UnmarshalText(text []byte) error {
	i := slices.Index(words, string(text))
	if i < 0 {
		return fmt.Errorf("unknown result %q; use one of %s", text, strings.Join(words, ", "))
	}
	*s = Status(i) + NotApplicable
	return nil
}

// Finding is the result of a check for one object.
type Finding struct {
	Check   string `json:"check"`
	Subject string `json:"subject"`
	Status  Status `json:"status"`
	// On is the device, file or program, in words; "host" for the host as a whole.
	On string `json:"on"`
	// LookedAt lists the files and calls, and Found their content.
	LookedAt string `json:"lookedAt"`
	Found    string `json:"found"`
	// Why states the consequence; empty if the status is OK.
	Why string `json:"why,omitempty"`
	// Remedy is a command if possible; empty if the status is OK.
	Remedy string `json:"remedy,omitempty"`
	// Lanes are the affected lanes by GPU index; nil for the whole host.
	Lanes []int `json:"lanes"`
}

// Check examines one aspect of a host.
type Check struct {
	// Name identifies the check for programs: it is a public interface.
	Name string
	// subject groups checks.
	subject string
	// source, why and remedy are the defaults of the fields of a finding.
	source, why, remedy string
	// run returns at least one finding. Examine fills in Check, Subject and empty fields.
	run func(context.Context, *Host) []Finding
}

// All returns the checks in the order of output.
func All() []Check {
	return slices.Concat(driverChecks, gpuChecks, pcieChecks, nicChecks, cpuChecks, specificationChecks, engineChecks,
		limitChecks, securityChecks, relayChecks, ncclChecks)
}

// timeout limits a check, because a driver can block any caller.
const timeout = 20 * time.Second

// Examine runs the checks concurrently and returns the findings in the order of the checks. No
// check takes longer than timeout.
func Examine(ctx context.Context, h *Host, checks []Check) []Finding {
	return examine(ctx, h, checks, timeout)
}

func examine(ctx context.Context, h *Host, checks []Check, limit time.Duration) []Finding {
	each := make([][]Finding, len(checks))
	var group sync.WaitGroup
	for i, c := range checks {
		group.Go(func() { each[i] = c.within(ctx, h, limit) })
	}
	group.Wait()
	return onceOfConfiguration(slices.Concat(each...))
}

// onceOfConfiguration keeps configuration failures in the check "configuration" only: other checks
// that need the configuration refer to that check.
func onceOfConfiguration(list []Finding) []Finding {
	i := slices.IndexFunc(list, func(f Finding) bool { return f.Check == "configuration" && f.Status == Failure })
	if i < 0 {
		return list
	}
	for j := range list {
		if f := &list[j]; j != i && f.Status == Unknown && strings.Contains(f.Found, list[i].Found) {
			f.Found, f.Remedy = "the configuration cannot be read: see the check configuration", list[i].Remedy
		}
	}
	return list
}

// Lane returns the index of the GPU with a name on the host: an index, a UUID or a PCI address. The
// lookup takes at most timeout, even if a driver hangs.
func (h *Host) Lane(ctx context.Context, name string) (int, error) { return h.lane(ctx, name, timeout) }

func (h *Host) lane(ctx context.Context, name string, limit time.Duration) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type answer struct {
		index int
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		p, err := h.readPlan()
		if err != nil {
			done <- answer{0, err}
			return
		}
		g, err := p.GPU(name)
		done <- answer{g.Index, err}
	}()
	select {
	case a := <-done:
		return a.index, a.err
	case <-ctx.Done():
		return 0, &silentError{name, limit}
	}
}

// silentError is the error of a host that did not answer which GPU has a name.
type silentError struct {
	gpu   string
	limit time.Duration
}

func (e *silentError) Error() string {
	return fmt.Sprintf("looking for GPU %s: no answer within %v; omit the GPU to run the checks of the whole host", e.gpu,
		e.limit)
}

// within runs a check with a time limit. It abandons a check that does not return.
func (c Check) within(ctx context.Context, h *Host, limit time.Duration) []Finding {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan []Finding, 1)
	go func() { done <- c.run(ctx, h) }()
	var found []Finding
	select {
	case found = <-done:
	case <-ctx.Done():
		found = []Finding{unknown("host", "it gave no answer within %v", limit)}
	}
	for i := range found {
		f := &found[i]
		f.Check, f.Subject = c.Name, c.subject
		f.LookedAt = or(f.LookedAt, c.source)
		if f.Status > OK {
			f.Why, f.Remedy = or(f.Why, c.why), or(f.Remedy, c.remedy)
		}
	}
	return found
}

func or(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

// Worst returns the worst status of list, or OK if list is empty.
func Worst(list []Finding) Status {
	worst := OK
	for _, f := range list {
		worst = max(worst, f.Status)
	}
	return worst
}

// For returns the findings that affect the lane of a GPU.
func For(list []Finding, index int) []Finding {
	return slices.DeleteFunc(slices.Clone(list), func(f Finding) bool {
		return f.Lanes != nil &&
			!slices.Contains(f.Lanes, index)
	})
}

func ok(on, format string, args ...any) Finding {
	return Finding{Status: OK, On: on, Found: fmt.Sprintf(format, args...)}
}

// notApplicable returns a finding of a check without an object to examine.
func notApplicable(format string, args ...any) []Finding {
	return []Finding{{Status: NotApplicable, On: "host", Found: fmt.Sprintf(format, args...)}}
}

func unknown(on, format string, args ...any) Finding {
	return Finding{Status: Unknown, On: on, Found: fmt.Sprintf(format, args...)}
}

// warning returns a finding of a slow lane, or of a failure under some condition.
func warning(on, format string, args ...any) Finding {
	return Finding{Status: Warning, On: on, Found: fmt.Sprintf(format, args...)}
}

// failure returns a finding that prevents a lane from working, or exposes data or the host.
func failure(on, format string, args ...any) Finding {
	return Finding{Status: Failure, On: on, Found: fmt.Sprintf(format, args...)}
}

// remedy sets the exact remedy.
func (f Finding) remedy(format string, args ...any) Finding {
	f.Remedy = fmt.Sprintf(format, args...)
	return f
}

// touching limits a finding to some lanes; nil means the whole host.
func (f Finding) touching(lanes []int) Finding {
	f.Lanes = lanes
	return f
}

// orFine returns list, or an OK finding if list is empty.
func orFine(list []Finding, format string, args ...any) []Finding {
	if len(list) > 0 {
		return list
	}
	return []Finding{ok("host", format, args...)}
}
