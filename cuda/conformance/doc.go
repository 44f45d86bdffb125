// Package conformance tests the properties of CUDA that Peerlane relies on. The tests run on the
// simulator (package cuda/sim) by default, and on the driver with
//
//	PEERLANE_TEST_CUDA=driver
//
// With the driver, the test binary (go test -c) needs neither the repository nor a compiler. Tests
// of two GPUs skip on a host with one.
package conformance
