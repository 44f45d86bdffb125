package relay

import (
	"errors"
	"fmt"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
)

// Asker asks for memory on a server GPU and waits for the answer. An error means no answer.
type Asker func(launch.Claim) (launch.Admission, error)

// claims are the admitted allocations of this relay on server GPUs, over its lanes. The lock is
// held during the wait for an answer, so that claims are decided in sequence.
type claims struct {
	mu   sync.Mutex
	ask  Asker
	last uint64
	held map[string]uint64 // bytes by PCI address
	// host is the host memory in use, and hostAdmitted the part that the supervisor has admitted.
	// Without hostAdmission the supervisor is of an earlier release and admits no host memory.
	host, hostAdmitted uint64
	hostAdmission      bool
}

// errNotAdmitted: further relays of the host use the permitted memory.
var errNotAdmitted = errors.New("not admitted")

// AskBy sets the function that admits staging. Call AskBy before Configure.
func (r *Relay) AskBy(ask Asker) { r.claims.ask = ask }

// take claims bytes on a GPU with memory bytes, or returns why the claim is not admitted.
func (c *claims) take(gpu string, bytes, memory uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, err := c.claim(gpu, c.held[gpu]+bytes, memory)
	if err != nil {
		return err
	}
	if !a.OK {
		return fmt.Errorf("%w: %s", errNotAdmitted, a.Error)
	}
	c.held[gpu] += bytes
	return nil
}

// release ends a part of a claim.
func (c *claims) release(gpu string, bytes, memory uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held[gpu] -= bytes
	if _, err := c.claim(gpu, c.held[gpu], memory); err != nil {
		logrus.WithError(err).Warn("giving staging back that is not used; it counts until this relay ends")
	}
}

func (c *claims) claim(gpu string, bytes, memory uint64) (launch.Admission, error) {
	if c.ask == nil {
		return launch.Admission{}, errors.New("this relay has nobody to ask for staging")
	}
	c.last++
	return c.ask(launch.Claim{Claim: c.last, GPU: gpu, Bytes: bytes, Memory: memory})
}
