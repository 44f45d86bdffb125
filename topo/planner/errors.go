package planner

import (
	"errors"
	"fmt"
)

// keyError is the error of a key of the configuration that does not fit the host.
type keyError struct {
	Key string // such as "plan.exclude.gpus"
	Err error
}

func (e *keyError) Error() string { return e.Key + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *keyError) Unwrap() error { return e.Err }

// Causes of a keyError.
var (
	errPairForm    = errors.New("a pair must be the names of a GPU and a NIC, or of two GPUs")
	errSameGPU     = errors.New("both names are the same GPU")
	errEmptyGroup  = errors.New("a group needs a GPU")
	errNoMember    = errors.New("servers or nics are required")
	errServesSelf  = errors.New("a GPU cannot serve itself: a copy within a GPU waits for the programs that run on it")
	errNICName     = errors.New("the name is empty or named twice")
	errNoActiveNIC = errors.New(`nics is missing, and this host has no RDMA NIC with an active port; for a software device ` +
		`set nics = ["software0"]`)
)

// valueError is the cause of an impossible value.
type valueError struct {
	value any
	must  string
}

func (e *valueError) Error() string {
	if text, ok := e.value.(string); ok {
		return fmt.Sprintf("%q: %s", text, e.must)
	}
	return fmt.Sprintf("%v: %s", e.value, e.must)
}

// twiceError is the cause of a GPU that a list names twice, or that has an assignment already.
type twiceError struct {
	gpu      int // index
	assigned bool
}

func (e *twiceError) Error() string {
	if e.assigned {
		return fmt.Sprintf("GPU %d already has an assignment", e.gpu)
	}
	return fmt.Sprintf("GPU %d is named twice", e.gpu)
}

// RefusedError is the cause of a GPU or a NIC that cannot have or serve a lane.
type RefusedError struct {
	Device string // such as "GPU 1", or the name of a NIC
	Reason string
}

func (e *RefusedError) Error() string { return e.Device + ": " + e.Reason }

// unknownNICError is the cause of a name without a NIC on the host.
type unknownNICError struct {
	name, known string
	gpu         error // of the GPU with this name; nil if only a NIC is possible
}

func (e *unknownNICError) Error() string {
	if e.gpu != nil {
		return fmt.Sprintf("%q is not a NIC of this host (%s), and %v", e.name, e.known, e.gpu)
	}
	return fmt.Sprintf("no NIC %q; known are %s", e.name, e.known)
}

func (e *unknownNICError) Unwrap() error { return e.gpu }

// noServerError is the cause of a staged lane without servers.
type noServerError struct{ nic string }

func (e *noServerError) Error() string {
	return fmt.Sprintf("no GPU near %s can serve it; name servers", e.nic)
}

// Causes of a plan file that is refused.

// versionError is the cause of a plan of another version.
type versionError struct{ version int }

func (e *versionError) Error() string {
	return fmt.Sprintf("it has version %d, and this program supports versions %d and %d", e.version, oldestPlanVersion,
		Version)
}

// unlistedError is the cause of a lane with a GPU that the plan does not list.
type unlistedError struct{ lane, gpu string } // PCI addresses

func (e *unlistedError) Error() string {
	return fmt.Sprintf("the lane of %s names GPU %s, which the plan does not list", e.lane, e.gpu)
}

// contradictionError is the cause of a lane with contradictory fields.
type contradictionError struct {
	lane    string // PCI address
	relay   bool
	servers int    // number
	kind    string // empty if relay and servers are the contradiction
}

func (e *contradictionError) Error() string {
	if e.kind != "" {
		return fmt.Sprintf("the lane of %s is contradictory: relay is %t and kind is %s", e.lane, e.relay, e.kind)
	}
	return fmt.Sprintf("the lane of %s is contradictory: relay is %t with %d servers", e.lane, e.relay, e.servers)
}
