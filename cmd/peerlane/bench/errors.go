package bench

import (
	"errors"
	"fmt"
)

// flagError is the error of an invalid value of a flag.
type flagError struct {
	// flag is the name of the flag, without dashes.
	flag string
	// value is nil if no single value is the cause.
	value any
	must  string
}

func (e *flagError) Error() string {
	if e.value == nil {
		return fmt.Sprintf("--%s %s", e.flag, e.must)
	}
	return fmt.Sprintf("--%s %v: %s", e.flag, e.value, e.must)
}

// lostError is the error of the disconnection of a bench on another host.
type lostError struct {
	// bench is the host of that bench.
	bench string
	// when is a phrase such as "before the end"; possibly empty.
	when string
	err  error
}

func (e *lostError) Error() string {
	when := e.when
	if when != "" {
		when = " " + when
	}
	return fmt.Sprintf("the bench on %s disconnected%s: %v", e.bench, when, e.err)
}

func (e *lostError) Unwrap() error { return e.err }

// remoteError is an error that a bench on another host reported.
type remoteError struct{ bench, reason string }

func (e *remoteError) Error() string { return fmt.Sprintf("on %s: %.1000s", e.bench, e.reason) }

// abortError is the error of a bench that aborted the measurement.
type abortError struct{ bench, reason string }

func (e *abortError) Error() string {
	return fmt.Sprintf("the bench on %s aborted: %.1000s", e.bench, e.reason)
}

// transportError is the error of a direction that changed its transport.
type transportError struct{ from, to, before, after string }

func (e *transportError) Error() string {
	return fmt.Sprintf("%s to %s went over %s at first and over %s at the end: the rows would mix both", e.from, e.to,
		e.before, e.after)
}

// Errors of a result that was read.
var (
	errMixed  = errors.New("the result mixes real and simulated GPUs")
	errNoRows = errors.New("the result has no rows")
)

// versionError is the error of a result of another version.
type versionError struct{ version int }

func (e *versionError) Error() string {
	return fmt.Sprintf("the result has version %d, and this peerlane reads version %d", e.version, version)
}

// baselineError is the error of an invalid baseline.
type baselineError struct {
	name  string
	value float64
	twice bool
}

func (e *baselineError) Error() string {
	if e.twice {
		return fmt.Sprintf("the result has the baseline %q twice, so ratios are ambiguous", e.name)
	}
	return fmt.Sprintf("the baseline %q is %v", e.name, e.value)
}

// rowError is the error of an invalid row.
type rowError struct {
	row   string
	value float64
}

func (e *rowError) Error() string { return fmt.Sprintf("%s is %v", e.row, e.value) }

// ratioError is the error of a row whose ratio to its baseline is unknown.
type ratioError struct {
	row, baseline, unit string
	// baselineUnit is empty if the run did not measure the baseline.
	baselineUnit string
}

func (e *ratioError) Error() string {
	if e.baselineUnit == "" {
		return fmt.Sprintf("%s would be a ratio to %q, which this run did not measure; run peerlane bench with that baseline",
			e.row, e.baseline)
	}
	return fmt.Sprintf("%s is in %s, but its baseline %q is in %s", e.row, e.unit, e.baseline, e.baselineUnit)
}

var errOneHost = errors.New("both benches run on one host, whose relays use the network only with --transport tcp; " +
	"measure within a host without --connect")

// errNoName is the error of a bench that sent no name.
var errNoName = errors.New("it sent no name")

// kindError is the error of two hosts of which only one has real GPUs.
type kindError struct {
	host, other string
	// simulated reports that host has simulated GPUs.
	simulated       bool
	simulatedOthers bool
}

func (e *kindError) Error() string {
	words := map[bool]string{false: "real", true: "simulated"}
	return fmt.Sprintf("the GPUs of this host (%s) are %s, and the GPUs of %s are %s; give --gpus simulated on both "+
		"hosts, or --gpus real", e.host, words[e.simulated], e.other, words[e.simulatedOthers])
}
