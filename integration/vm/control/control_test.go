package control

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"strings"
	"testing"
	"time"
)

func agent(t *testing.T) *Client {
	t.Helper()
	host, guest := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(guest, Ready{Kernel: "6.12"}) }()
	c := NewClient(host)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
	})
	ready, err := c.Ready(t.Context())
	if err != nil || ready.Kernel != "6.12" {
		t.Fatalf("%+v, %v", ready, err)
	}
	return c
}

func TestProcessHasInputAndOutputs(t *testing.T) {
	c := agent(t)
	var out, errs bytes.Buffer
	input := strings.Repeat("0123456789abcdef", 50_000)
	err := c.Run(t.Context(), Command{
		Argv: []string{"sh", "-c", `cat; echo "$WORD in $PWD" >&2; exit 3`}, Env: []string{"WORD=word"}, Dir: "/",
	}, strings.NewReader(input), &out, &errs)
	var status *ExitError
	if !errors.As(err, &status) || status.Status != 3 {
		t.Errorf("ended with %v", err)
	}
	if out.String() != input || errs.String() != "word in /\n" {
		t.Errorf("%d bytes out of %d, and %q", out.Len(), len(input), errs.String())
	}
}

func TestProcessesRunAtOnce(t *testing.T) {
	c := agent(t)
	limit := errors.New("time limit reached")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 200*time.Millisecond, limit)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, Command{Argv: []string{"sh", "-c", "sleep 100 & wait"}}, nil, nil, nil) }()
	if err := c.Run(t.Context(), Command{Argv: []string{"true"}}, nil, nil, nil); err != nil {
		t.Error(err)
	}
	if err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, limit) {
		t.Errorf("a process without end: %v", err)
	}
}

func TestFailedStartReturnsCause(t *testing.T) {
	c := agent(t)
	err := c.Run(t.Context(), Command{Argv: []string{"/no/such/program"}}, nil, nil, nil)
	e, ok := errors.AsType[*startError](err)
	if !ok || e.argv[0] != "/no/such/program" || !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := c.Run(t.Context(), Command{}, nil, nil, nil); err == nil {
		t.Error("a command without a program runs")
	}
}

func TestTerminalHasSizeAndSession(t *testing.T) {
	c := agent(t)
	var out bytes.Buffer
	err := c.Run(t.Context(), Command{Argv: []string{"sh", "-c", "test -t 0 && stty size"},
		Terminal: &Size{Rows: 33, Cols: 99}}, nil, &out, nil)
	if err != nil || !strings.Contains(out.String(), "33 99") {
		t.Errorf("%q, %v", out.String(), err)
	}
}

func TestLostGuestIsError(t *testing.T) {
	host, guest := net.Pipe()
	c := NewClient(host)
	guest.Close()
	if _, err := c.Ready(t.Context()); err == nil {
		t.Error("the agent is ready")
	}
	if err := c.Run(t.Context(), Command{Argv: []string{"true"}}, nil, nil, nil); err == nil {
		t.Error("a process ran")
	}
}

// never is an input or output that blocks forever.
type never struct{ t *testing.T }

func (n never) Write([]byte) (int, error) {
	<-n.t.Context().Done()
	return 0, n.t.Context().Err()
}

func TestInputThatNobodyReadsHoldsUpNothing(t *testing.T) {
	c := agent(t)
	limit := errors.New("time limit reached")
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, limit)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- c.Run(ctx, Command{Argv: []string{"sleep", "100"}}, strings.NewReader(strings.Repeat("x", 10<<20)), nil, nil)
	}()
	time.Sleep(300 * time.Millisecond) // let the input arrive
	if err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, limit) {
		t.Error(err)
	}
}

func TestOutputThatNobodyReadsIsNoHang(t *testing.T) {
	c := agent(t)
	go func() { _ = c.Run(t.Context(), Command{Argv: []string{"yes"}}, nil, never{t}, nil) }()
	time.Sleep(300 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := c.Ping(ctx); err != nil {
		t.Error(err)
	}
}
