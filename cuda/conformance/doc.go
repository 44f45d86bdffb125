// Package conformance holds the tests of what Peerlane relies on in CUDA. They
// run on the simulator (package cuda/sim) by default, and on the driver with
//
//	PEERLANE_TEST_CUDA=driver
//
// The test binary (go test -c) needs nothing else then: no repository, no
// compiler. Tests that need two GPUs skip where there is one.
package conformance
