package measure

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// ringTimes posts consecutive operations and polls for their completion, while another thread
// takes and completes them like a busy relay: the cost of rings between two processors, without a
// copy.
func ringTimes(j Job) (*Times, error) {
	relay, err := ring.NewRelay()
	if err != nil {
		return nil, err
	}
	client, err := ring.OpenClient(relay.FDs())
	if err != nil {
		return nil, errors.Join(err, relay.Close())
	}
	var over atomic.Bool
	served := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for !over.Load() {
			d, ok, err := relay.Take()
			if err != nil {
				served <- err
				return
			}
			if ok {
				relay.Complete(wire.Completion{Cookie: d.Cookie})
			}
		}
		served <- nil
	}()
	const patience = 10 * time.Second
	result, err := j.times(func() error {
		if _, err := client.Post(wire.Descriptor{Operation: wire.OpSend}); err != nil {
			return err
		}
		for start, n := time.Now(), 0; ; n++ {
			if _, ok := client.Next(); ok {
				return nil
			}
			if n%1024 == 1023 {
				// On one processor, let the second thread run.
				runtime.Gosched()
				if time.Since(start) > patience {
					return errors.New("an operation was not completed")
				}
			}
		}
	})
	over.Store(true)
	return result, errors.Join(err, <-served, client.Close(), relay.Close())
}
