package verbs

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// mustGoBy demands that the queue pairs of b0 use a GID, on both sides.
func (w *two) mustGoBy(t *testing.T, index int, address string) {
	t.Helper()
	is := func(g verbs.GID) bool { return g.Address() == netip.MustParseAddr(address) }
	w.b.until("queue pairs by another GID", func(s *QPGroup) bool {
		return s.phase == running && len(s.queues) == 1 && is(s.queues[0].nic.gid) && s.queues[0].nic.gid.Index == index
	})
	w.a.until("the way to another GID", func(s *QPGroup) bool {
		return s.phase == running && is(verbs.GID{GID: s.theirs[0].GID})
	})
	made, err := w.rdma.Calls("ibv_modify_qp")
	if err != nil {
		t.Fatal(err)
	}
	last := ""
	for _, c := range made {
		if c.Arguments["device"] == "b0" && c.Arguments["state"] == "2" {
			last = c.Arguments["gid"]
		}
	}
	if last != strconv.Itoa(index) {
		t.Errorf("the last queue pair goes by GID %s, not %d", last, index)
	}
}

// TestChangedGIDReplacesQueuePairs demands that a changed or moved GID replaces the queue pairs
// with queue pairs of the current GID, and that the fault names device, port and GIDs.
func TestChangedGIDReplacesQueuePairs(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*softdevice.Device)
		index   int
		address string
	}{
		"address":             {func(b *softdevice.Device) { b.Address = "10.0.0.9" }, 3, "10.0.0.9"},
		"index":               {func(b *softdevice.Device) { b.Moved = true }, 5, "10.0.0.2"},
		"none but the link's": {func(b *softdevice.Device) { b.Address = "" }, 1, "fe80::2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := connected(t)
			s := newStream(w)
			s.begin()
			if err := devices(func(_, b *softdevice.Device) { c.change(b) })(w); err != nil {
				t.Fatal(err)
			}
			w.mustGoBy(t, c.index, c.address)
			s.mustEnd(t)
			w.b.loop.Call(func() { // the peer may have a fault of its own by then
				for _, words := range []string{"by b0 of host ", "(port 1)", "GID 3 (10.0.0.2, RoCE v2) is no longer an address",
					strconv.Itoa(c.index) + " (" + c.address} {
					if said := w.b.set.lastFault; !strings.Contains(said, words) {
						t.Errorf("the fault says nothing of %q: %s", words, said)
					}
				}
			})
		})
	}
}

// TestGIDChangeDuringReconnectIsDetected demands that the group detects a change of the address
// during the connection of queue pairs.
func TestGIDChangeDuringReconnectIsDetected(t *testing.T) {
	w := connected(t)
	w.script(t, "ibv_create_qp hold=1 device=b0")
	w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
	w.held(t)
	if err := devices(func(_, b *softdevice.Device) { b.Address = "10.0.0.9" })(w); err != nil {
		t.Fatal(err)
	}
	w.b.until("the event", func(s *QPGroup) bool { return s.working && s.fabric.nics[0].changes.Load() == 1 })
	w.script(t)
	w.mustGoBy(t, 3, "10.0.0.9")
	s := newStream(w)
	s.begin()
	s.mustEnd(t)
}

// TestMissingConfiguredGIDEndsPeer demands that the Peer ends with device, port and GIDs in the
// error if the configured GID is gone.
func TestMissingConfiguredGIDEndsPeer(t *testing.T) {
	t.Parallel()
	w := connected(t, func(_ string, c *Config) { c.GIDIndex = 3 })
	s := newStream(w)
	s.begin()
	s.mustEnd(t)
	if err := devices(func(_, b *softdevice.Device) { b.Address = "" })(w); err != nil {
		t.Fatal(err)
	}
	words := []string{"b0 of host", "GID 3 (10.0.0.2, RoCE v2) is no longer an address", "b0 port 1",
		"GID index 3 is empty", "GID 1 (fe80::2, RoCE v2)"}
	w.b.until("the reason", func(s *QPGroup) bool { return strings.Contains(s.lastFault, "GID index 3") })
	w.b.endReconnects()
	demand(t, receive(t, w.b.down, "the Peer's end"), words)
}
