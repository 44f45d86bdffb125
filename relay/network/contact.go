package network

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

// ContactBytes is the size of a relay's address in a handle: an address.Endpoint, and two tags of
// 16 bytes.
const ContactBytes = address.EndpointBytes + 2*contactTag

const contactTag = 16

// ErrOtherKey: no relay with these keys has made the handle.
var ErrOtherKey error = &fault.Error{Code: fault.KeyNotProven,
	Operation: "the address in the handle was given out by no relay that has this cluster key",
	Remedy:    "compare `peerlane key show` on both hosts"}

// SealContact says where the relay of a listener is reached, for the listener's handle. Handles go
// through the hands of tenants; tenants could direct a relay without this check into foreign
// networks. So an address in a handle is valid only with a tag of that handle by the cluster key.
// During a rotation there are two tags, so that hosts accept the address at any step of the
// rotation.
func (k Keys) SealContact(of Target, generation wire.UUID, e address.Endpoint) [ContactBytes]byte {
	var c [ContactBytes]byte
	at := e.Encode()
	copy(c[:], at[:])
	tags := c[len(at):]
	_, _ = rand.Read(tags) // for the key that there is not
	for i, key := range k.all() {
		copy(tags[i*contactTag:][:contactTag], key.contact(of, generation, at))
	}
	return c
}

// OpenContact returns the address that SealContact sealed for the same handle with one of the keys.
func (k Keys) OpenContact(of Target, generation wire.UUID, c [ContactBytes]byte) (address.Endpoint, error) {
	at := [address.EndpointBytes]byte(c[:address.EndpointBytes])
	tags := c[len(at):]
	known := false
	for _, key := range k.all() {
		want := key.contact(of, generation, at)
		for i := range 2 {
			known = known || hmac.Equal(want, tags[i*contactTag:][:contactTag])
		}
	}
	if !known {
		return address.Endpoint{}, ErrOtherKey
	}
	return address.DecodeEndpoint(at)
}

func (k Key) contact(of Target, generation wire.UUID, at [address.EndpointBytes]byte) []byte {
	m := hmac.New(sha256.New, k.derive(nil, "contact", 32))
	for _, part := range [][]byte{of.Host[:], of.Token[:], generation[:], at[:]} {
		m.Write(part)
	}
	return m.Sum(nil)[:contactTag]
}
