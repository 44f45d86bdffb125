package verbs

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// count returns the number of successful calls for a device.
func count(t *testing.T, rdma softdevice.Host, device, call string) (n int) {
	t.Helper()
	calls, err := rdma.Calls(call)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range calls {
		if c.Arguments["device"] == device && c.Arguments["="] == "0" {
			n++
		}
	}
	return n
}

// scripted sets a script before the sides exist.
func scripted(t *testing.T, line string) func(string, *Config) {
	return func(nic string, c *Config) {
		if nic != "b0" {
			return
		}
		if err := (softdevice.Host{Dir: filepath.Dir(c.Library)}).Script(line); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenEarlyLeavesInactiveNICToFirstPeer(t *testing.T) {
	inactive := deviceC
	inactive.Down = true
	rdma, err := softdevice.New(t.TempDir(), deviceA, inactive)
	if err != nil {
		t.Fatal(err)
	}
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	f := New(loop, Config{Verbs: launch.DefaultVerbs, NICs: func() []string { return []string{"a0", "c0"} },
		Library: rdma.Library()})
	ran := make(chan struct{})
	go func() { loop.Run(); close(ran) }()
	t.Cleanup(func() {
		loop.Stop()
		<-ran
		f.Close()
	})
	for range 2 {
		opened, err := f.OpenEarly()
		if err != nil || !slices.Equal(opened.NICNames(), []string{"a0"}) {
			t.Fatalf("%+v, %v", opened, err)
		}
	}
	if n := count(t, rdma, "a0", "ibv_create_cq"); n != 1 {
		t.Errorf("a0 has %d completion queues", n)
	}
	if err := rdma.Set(deviceA, deviceC); err != nil {
		t.Fatal(err)
	}
	if nics, err := f.active(); err != nil || !slices.Equal(namesOf(nics), []string{"a0", "c0"}) {
		t.Errorf("the first peer has %v, %v", namesOf(nics), err)
	}
	if n := count(t, rdma, "a0", "ibv_open_device"); n != 1 {
		t.Errorf("a0 was opened %d times", n)
	}
	if err := rdma.Set(deviceA, inactive); err != nil {
		t.Fatal(err)
	}
	if opened, err := f.OpenEarly(); err != nil || !slices.Equal(opened.NICNames(), []string{"a0"}) {
		t.Errorf("after the port of c0: %+v, %v", opened, err)
	}
}

func TestDialingSideBuildsBeforeAnswer(t *testing.T) {
	w, settled := joining(t, false, nil, scripted(t, "ibv_create_qp hold=1 device=b0"))
	w.held(t)
	testutil.Until(t, "the queue pairs of a0", func() bool { return count(t, w.rdma, "a0", "ibv_create_qp") == 2 })
	w.script(t)
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
	if n := count(t, w.rdma, "a0", "ibv_create_qp"); n != 2 {
		t.Errorf("a0 has created %d queue pairs", n)
	}
}

func TestDialingSideReplacesQueuePairsForAnotherAnswer(t *testing.T) {
	w := connected(t, func(nic string, c *Config) {
		if nic == "a0" {
			c.QueuePairs = 4
		}
	})
	made, ended := count(t, w.rdma, "a0", "ibv_create_qp"), count(t, w.rdma, "a0", "ibv_destroy_qp")
	if made != 6 || ended != 4 {
		t.Errorf("a0 has created %d queue pairs and destroyed %d, want 6 and 4", made, ended)
	}
}

func TestDialingSideTriesFlusherBeforeFirstWritesArrive(t *testing.T) {
	w, settled := joining(t, false, nil, scripted(t, "send hold=1 device=b0"), func(_ string, c *Config) {
		c.Flush, c.Stages = func(*device.Memory) bool { return true }, func() bool { return true }
	})
	w.held(t)
	testutil.Until(t, "the read by the flusher of a0", func() bool { return count(t, w.rdma, "a0", "ibv_post_send") == 1 })
	w.script(t)
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
}
