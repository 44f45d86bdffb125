package network

import (
	"net/netip"
	"testing"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

var (
	generation = wire.UUID{0x9e}
	somewhere  = address.Endpoint{Address: netip.MustParseAddr("10.1.0.7"), Port: 20123}
)

// A handle has 128 bytes, of which 72 are unused.
const handleRoom = 72

func TestHandleAddressRoundTrips(t *testing.T) {
	old := newKeys()
	both := rotated(t, old)
	last := finished(t, both)
	if ContactBytes > handleRoom {
		t.Errorf("%d bytes; a handle has room for %d", ContactBytes, handleRoom)
	}
	for _, c := range []struct {
		name        string
		gave, reads Keys
		known       bool
	}{
		{"the same key", old, old, true}, {"given before the reader was told", both, old, true},
		{"given by who was not told", old, both, true},
		{"given by who has finished", last, both, true}, {"read by who has finished", both, last, true},
		{"another key", old, last, false},
	} {
		e, err := c.reads.OpenContact(toB, generation, c.gave.SealContact(toB, generation, somewhere))
		if c.known != (err == nil) || c.known && e != somewhere {
			t.Errorf("%s: %v, %v", c.name, e, err)
		}
	}
}

// Tenants have a relay connect only where a relay of the cluster listens.
func TestTenantAddressOfOtherServiceIsRefused(t *testing.T) {
	keys := newKeys()
	good := keys.SealContact(toB, generation, somewhere)
	open := func(of Target, g wire.UUID, c [ContactBytes]byte) error {
		_, err := keys.OpenContact(of, g, c)
		return err
	}
	if err := open(toB, generation, good); err != nil {
		t.Fatal(err)
	}
	for at := range address.EndpointBytes + contactTag {
		forged := good
		forged[at] ^= 1
		if open(toB, generation, forged) == nil {
			t.Errorf("byte %d can be another", at)
		}
	}
	forged := good
	copy(forged[address.EndpointBytes:], make([]byte, 2*contactTag))
	if open(toB, generation, forged) == nil {
		t.Error("no tags are needed")
	}
	for name, err := range map[string]error{
		"listener":   open(Target{Host: hostB, Token: wire.UUID{1}}, generation, good),
		"host":       open(Target{Host: hostA, Token: toB.Token}, generation, good),
		"generation": open(toB, wire.UUID{1}, good),
	} {
		if err == nil {
			t.Errorf("an address is good for another %s", name)
		}
	}
}

// OpenContact returns an address only from a handle with the cluster's tag.
func FuzzContact(f *testing.F) {
	keys := Keys{Current: keyOf([keyBytes]byte{1}, someDay)}
	good := keys.SealContact(toB, generation, somewhere)
	f.Add(good[:])
	f.Add(make([]byte, ContactBytes))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) != ContactBytes {
			return
		}
		if e, err := keys.OpenContact(toB, generation, [ContactBytes]byte(text)); err == nil && e != somewhere {
			t.Errorf("%v was given out by nobody", e)
		}
	})
}
