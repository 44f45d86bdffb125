package verbs

import (
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/verbs"
)

// TestForgetDuringCloseWaitsForRelease demands that Forget during Close returns after the release
// of the registration, also if Close releases it.
func TestForgetDuringCloseWaitsForRelease(t *testing.T) {
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	f, m, r := New(loop, Config{}), &device.Memory{}, &registration{}
	r.regions.Store(&[]*verbs.Region{})
	f.memories[purpose{m, false}] = r
	r.making.Lock() // a slow NIC
	ended, forgotten := make(chan struct{}), make(chan bool, 1)
	t.Cleanup(func() { loop.Stop(); loop.Run() }) // closes the descriptors of the loop
	go func() { f.Close(); close(ended) }()
	for closed := false; !closed; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		closed = f.closed
		f.mu.Unlock()
	}
	go func() {
		f.Forget(m)
		free := r.making.TryLock()
		forgotten <- free && r.over
	}()
	select {
	case <-forgotten:
		t.Error("it is let go while a NIC still knows it")
		r.making.Unlock()
	case <-time.After(20 * time.Millisecond):
		r.making.Unlock()
		if !<-forgotten {
			t.Error("it is let go before the NIC has forgotten it")
		}
	}
	<-ended
}
