package selftest

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/launch"
)

// A test that does not end, and whose output stays open after the kill, delays the caller only to
// the limit.
func TestRDMAHungTestEndsAtLimit(t *testing.T) {
	program := filepath.Join(t.TempDir(), "relay")
	if err := programs.Write(program, []byte("#!/bin/sh\nsleep 20 &\nwait\n")); err != nil {
		t.Fatal(err)
	}
	late := errors.New("it is late")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 200*time.Millisecond, late)
	defer cancel()
	began := time.Now()
	tester := &Tester{relay: generation.Command{Path: program}}
	if err := tester.RDMA(ctx, launch.RDMAJob{}, func(launch.RDMAResult) {}); !errors.Is(err, late) {
		t.Errorf("RDMA returned %v", err)
	}
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("RDMA took %v", took)
	}
}

// waitOr abandons a process that survives SIGKILL, and returns the status of a process that ends.
func TestTesterHeldByDriverIsAbandoned(t *testing.T) {
	reason := errors.New("the self-test takes too long")
	ctx, cancel := context.WithCancelCause(t.Context())
	held := make(chan struct{})
	defer close(held)
	time.AfterFunc(20*time.Millisecond, func() { cancel(reason) })
	if err := waitOr(ctx, func() error { <-held; return nil }); err != reason {
		t.Errorf("waitOr of a process that does not end: %v", err)
	}
	status := errors.New("exit status 1")
	if err := waitOr(t.Context(), func() error { return status }); err != status {
		t.Errorf("waitOr of a process that ends: %v", err)
	}
}
