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

// rdmaTestTimeout is how long the test of one NIC and memory may take; a context on a GPU and
// the first completion on a network that fails are in it.
const rdmaTestTimeout = time.Minute

// RDMA has `peerlane-relay rdma-test` test NICs of this host, as the user that asks, and
// tells of each NIC and memory that it came to. It is not in a sandbox: a uid that no
// relay has may open no NIC.
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
	cmd.WaitDelay = time.Second // for what others have of its pipes, and where a driver holds it
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("starting the test of RDMA: %w", err)
	}
	if err = launch.ReadRDMA(out, job, tell); err != nil {
		err = errors.Join(err, cmd.Process.Kill()) // it is not what was started, or mad
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
