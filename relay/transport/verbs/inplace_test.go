package verbs

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRefusalEndsWithRegistration demands that Refused returns the error of a NIC until the NIC has
// registered the memory. A reconnect during a registration is no refusal.
func TestRefusalEndsWithRegistration(t *testing.T) {
	w, m := refusingMemory(t)
	if err := w.a.set.Register(m, false); err == nil {
		t.Fatal("it was registered")
	}
	if err := w.a.set.Refused(m, false); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("the refusal is %v", err)
	}
	if err := w.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	if err := w.a.set.Register(m, false); err != nil {
		t.Fatal(err)
	}
	f := w.a.fabric
	f.mu.Lock()
	r := f.memories[purpose{m, false}]
	f.mu.Unlock()
	if why := r.refused.Load(); why != nil {
		t.Errorf("the NIC that knows it is said to refuse it: %v", why.err)
	}
	gone := *w.a.set.nics[0]
	gone.index, gone.life = f.newIndex(), &life{over: true}
	if err := r.fill(f, []*nic{&gone}); !errors.Is(err, errRetired) {
		t.Errorf("a domain that is gone registers memory: %v", err)
	}
	if why := r.refused.Load(); why != nil {
		t.Errorf("a NIC is said to refuse it: %v", why.err)
	}
}
