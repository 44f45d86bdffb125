package selftest

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
)

// rdmaTestTimeout limits the test of one NIC and memory, including the creation of a context on a
// GPU and the first completion on a failing network.
const rdmaTestTimeout = time.Minute

// RDMA runs `peerlane-relay rdma-test` for NICs of this host, as the calling user, and reports the
// result for every NIC and memory. The process has no sandbox, because an unused uid may not be
// able to open a NIC.
func (t *Tester) RDMA(ctx context.Context, job launch.RDMAJob, report func(launch.RDMAResult)) error {
	limit := testerTimeout
	for _, n := range job.NICs {
		limit += rdmaTestTimeout * time.Duration(1+2*len(n.GPUs))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("the RDMA test takes too long"))
	defer cancel()
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	return t.relayProgram(ctx, "rdma-test", "the RDMA test", nil, text,
		func(out io.Reader) error { return launch.ReadRDMA(out, job, report) })
}
