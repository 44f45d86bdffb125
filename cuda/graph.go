package cuda

/*
#include "driver.h"

#cgo noescape call_cuStreamEndCapture
#cgo nocallback call_cuStreamEndCapture
#cgo noescape call_cuStreamIsCapturing
#cgo nocallback call_cuStreamIsCapturing
#cgo noescape call_cuGraphInstantiate
#cgo nocallback call_cuGraphInstantiate
*/
import "C"

import "fmt"

// Graph is a CUgraph: captured work.
type Graph uintptr

// GraphExec is a CUgraphExec: a graph that can be launched any number of times.
type GraphExec uintptr

// CaptureMode selects the calls that CUDA refuses while a stream is captured (CUstreamCaptureMode).
type CaptureMode int32

// Modes of capture state the threads on which the driver refuses calls that could wait for captured
// work, such as [Driver.MemAlloc].
const (
	CaptureGlobal      CaptureMode = 0 // to every thread
	CaptureThreadLocal CaptureMode = 1 // to the thread that captures
	CaptureRelaxed     CaptureMode = 2 // to no thread; another thread may end the capture
)

// CaptureStatus is CUstreamCaptureStatus.
type CaptureStatus int32

// States of a stream.
const (
	CaptureNone        CaptureStatus = 0
	CaptureActive      CaptureStatus = 1
	CaptureInvalidated CaptureStatus = 2 // a call failed; StreamEndCapture returns the error
)

// StreamBeginCapture makes s record work instead of running it, until [Driver.StreamEndCapture].
// Another stream joins the capture when it waits for an event recorded in a captured stream. Before
// the end s must wait for every joined stream.
func (d *Driver) StreamBeginCapture(s Stream, mode CaptureMode) error {
	return d.result(C.call_cuStreamBeginCapture(d.calls, C.CUstream(s), C.int(mode)), "cuStreamBeginCapture")
}

// StreamEndCapture ends the capture that began on s, even if the result is an error such as
// [ErrStreamCaptureInvalidated], which follows a call that cannot be captured.
func (d *Driver) StreamEndCapture(s Stream) (Graph, error) {
	var g C.CUgraph
	if r := C.call_cuStreamEndCapture(d.calls, C.CUstream(s), &g); r != 0 {
		return 0, d.newCallError(r, "cuStreamEndCapture", "")
	}
	return Graph(g), nil
}

// StreamCaptureStatus returns the capture state of a stream (cuStreamIsCapturing).
func (d *Driver) StreamCaptureStatus(s Stream) (CaptureStatus, error) {
	var status C.int
	if r := C.call_cuStreamIsCapturing(d.calls, C.CUstream(s), &status); r != 0 {
		return 0, d.newCallError(r, "cuStreamIsCapturing", "")
	}
	return CaptureStatus(status), nil
}

// GraphInstantiate makes a graph launchable in the current context. The caller may then destroy the
// graph.
func (d *Driver) GraphInstantiate(g Graph) (GraphExec, error) {
	var e C.CUgraphExec
	if r := C.call_cuGraphInstantiate(d.calls, &e, C.CUgraph(g), 0); r != 0 {
		return 0, d.newCallError(r, "cuGraphInstantiateWithFlags", fmt.Sprintf("graph %#x", g))
	}
	return GraphExec(e), nil
}

// GraphLaunch runs a graph as one item of work of s. Launches of one GraphExec run one after
// another, even on different streams.
func (d *Driver) GraphLaunch(e GraphExec, s Stream) error {
	return d.result(C.call_cuGraphLaunch(d.calls, C.CUgraphExec(e), C.CUstream(s)), "cuGraphLaunch")
}

// GraphExecDestroy destroys a launchable graph; running launches complete.
func (d *Driver) GraphExecDestroy(e GraphExec) error {
	return d.result(C.call_cuGraphExecDestroy(d.calls, C.CUgraphExec(e)), "cuGraphExecDestroy")
}

// GraphDestroy destroys a graph.
func (d *Driver) GraphDestroy(g Graph) error {
	return d.result(C.call_cuGraphDestroy(d.calls, C.CUgraph(g)), "cuGraphDestroy")
}
