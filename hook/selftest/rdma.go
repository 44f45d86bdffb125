package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/peerlane/peerlane/hook/internal/programs"
	"github.com/peerlane/peerlane/relay/launch"
)

// rdmaTestTimeout limits the test of one NIC and memory, including a context on a GPU and the
// first completion on a failing network.
const rdmaTestTimeout = time.Minute

// RDMA runs `peerlane-relay rdma-test` for NICs of this host, as the calling user, and reports
// the result for every NIC and memory. The process has no sandbox: a uid that no relay has may
// open no NIC.
func (t *Tester) RDMA(ctx context.Context, job launch.RDMAJob, tell func(launch.RDMAResult)) error {
	limit := testerTimeout
	for _, n := range job.NICs {
		limit += rdmaTestTimeout * time.Duration(1+2*len(n.GPUs))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("the test of RDMA takes too long"))
	defer cancel()
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	said := &firstWords{}
	cmd := exec.CommandContext(ctx, t.relay.Path, "rdma-test")
	cmd.Dir, cmd.Env = "/", append([]string{programs.SearchPath}, t.relay.Environment...)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(text), said
	cmd.WaitDelay = time.Second // for other holders of the pipes, and a process that a driver holds
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("starting the test of RDMA: %w", err)
	}
	if err = launch.ReadRDMA(out, job, tell); err != nil {
		err = errors.Join(err, cmd.Process.Kill()) // another program, or a broken tester
	}
	ended := WaitOr(ctx, cmd.Wait)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case ended != nil:
		return fmt.Errorf("the test of RDMA failed: %w: %s", ended, strings.TrimSpace(said.String()))
	}
	return nil
}
