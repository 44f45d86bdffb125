package measure

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// ringTimes posts one operation after the other and looks for its completion,
// while another thread takes and completes them as a busy relay does: what rings
// cost between two processors, without any copy.
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
				// With one processor the other thread has to have its turn.
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
