// Package doctor looks at a host for what makes lanes fail or slow without a word:
// a port at half its rate, a stale specification, a switch that redirects.
//
// A Check is an entry of All, and each subject has a file. To add one, write a
// function that looks at a Host and returns findings, add its entry to the subject's
// list, and add to the test's table a host that has the fault; docs/doctor.md is
// written from the table. A check changes nothing, works for any user, and where it
// cannot see something says so.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status is what a finding comes to. A greater one is worse.
type Status int

// What a finding can come to. NotApplicable is of a check that has nothing to look at on
// this host; it counts as OK.
const (
	NotApplicable Status = iota - 1
	OK
	Unknown
	Warning
	Failure
)

var words = []string{"n/a", "ok", "could not tell", "warning", "failure"}

func (s Status) String() string { return words[s-NotApplicable] }

// MarshalText writes the status as it is printed.
func (s Status) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (s *Status) UnmarshalText(text []byte) error {
	i := slices.Index(words, string(text))
	if i < 0 {
		return fmt.Errorf("%q is no result of a check; %s are", text, strings.Join(words, ", "))
	}
	*s = Status(i) + NotApplicable
	return nil
}

// Finding is what a check found on one thing.
type Finding struct {
	Check   string `json:"check"`
	Subject string `json:"subject"`
	Status  Status `json:"status"`
	// On is the device, file or program, in words; "host" for the host as a whole.
	On string `json:"on"`
	// LookedAt are the files and calls, Found is what they say.
	LookedAt string `json:"lookedAt"`
	Found    string `json:"found"`
	// Why it matters; empty where the status is OK.
	Why string `json:"why,omitempty"`
	// Remedy is a command where there is one; empty where the status is OK.
	Remedy string `json:"remedy,omitempty"`
	// Lanes are the GPUs, by index, whose lanes it touches; nil for all of the host.
	Lanes []int `json:"lanes"`
}

// Check looks at one thing of a host.
type Check struct {
	// Name is a word for programs, a public interface.
	Name string
	// Subject is what checks are grouped by.
	Subject string
	// LooksAt, Why and Remedy are sentences for every finding that says nothing more
	// exact itself.
	LooksAt, Why, Remedy string
	// Run returns at least one finding. Check, Subject, and what a finding leaves
	// empty are filled in for it.
	Run func(context.Context, *Host) []Finding
}

// All are the checks, in the order in which they are printed.
func All() []Check {
	return slices.Concat(driverChecks, gpuChecks, pcieChecks, nicChecks, cpuChecks, specificationChecks, engineChecks, limitChecks, securityChecks, relayChecks)
}

// timeout is how long a check may take before it counts as one that gives no answer:
// a driver can hold whoever asks it.
const timeout = 20 * time.Second

// Examine runs all checks beside each other, and returns in their order what they
// found. It takes no longer than the slowest of them, and none longer than timeout.
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

// onceOfConfiguration leaves what is wrong with the configuration to the check of that name:
// others that need the configuration refer to it.
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

// Lane is the index of the GPU that a name means on the host: an index, a UUID or a PCI
// address. Like a check it takes no longer than timeout, though a driver hangs.
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
		p, err := h.Plan()
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
		return 0, fmt.Errorf("looking for GPU %s: the host gave no answer within %v; without a GPU to look for, each check tells what it found", name, limit)
	}
}

// within runs a check. One that does not come back is left to itself.
func (c Check) within(ctx context.Context, h *Host, limit time.Duration) []Finding {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan []Finding, 1)
	go func() { done <- c.Run(ctx, h) }()
	var found []Finding
	select {
	case found = <-done:
	case <-ctx.Done():
		found = []Finding{unknown("host", "it gave no answer within %v", limit)}
	}
	for i := range found {
		f := &found[i]
		f.Check, f.Subject = c.Name, c.Subject
		f.LookedAt = or(f.LookedAt, c.LooksAt)
		if f.Status > OK {
			f.Why, f.Remedy = or(f.Why, c.Why), or(f.Remedy, c.Remedy)
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

// Worst is the worst status of some findings; OK for none.
func Worst(list []Finding) Status {
	worst := OK
	for _, f := range list {
		worst = max(worst, f.Status)
	}
	return worst
}

// For are the findings that touch the lane of a GPU.
func For(list []Finding, index int) []Finding {
	return slices.DeleteFunc(slices.Clone(list), func(f Finding) bool { return f.Lanes != nil && !slices.Contains(f.Lanes, index) })
}

func ok(on, format string, args ...any) Finding {
	return Finding{Status: OK, On: on, Found: fmt.Sprintf(format, args...)}
}

// notApplicable is of a check that has nothing to look at.
func notApplicable(format string, args ...any) []Finding {
	return []Finding{{Status: NotApplicable, On: "host", Found: fmt.Sprintf(format, args...)}}
}

func unknown(on, format string, args ...any) Finding {
	return Finding{Status: Unknown, On: on, Found: fmt.Sprintf(format, args...)}
}

// warning is of what is slow, or fails under some condition.
func warning(on, format string, args ...any) Finding {
	return Finding{Status: Warning, On: on, Found: fmt.Sprintf(format, args...)}
}

// failure is of what keeps a lane from working, or gives data or the host away.
func failure(on, format string, args ...any) Finding {
	return Finding{Status: Failure, On: on, Found: fmt.Sprintf(format, args...)}
}

// remedy is the exact one.
func (f Finding) remedy(format string, args ...any) Finding {
	f.Remedy = fmt.Sprintf(format, args...)
	return f
}

// touching narrows a finding to some lanes; nil is all of the host.
func (f Finding) touching(lanes []int) Finding {
	f.Lanes = lanes
	return f
}

// orFine is the list, or where nothing is wrong one finding that says what is right.
func orFine(list []Finding, format string, args ...any) []Finding {
	if len(list) > 0 {
		return list
	}
	return []Finding{ok("host", format, args...)}
}
