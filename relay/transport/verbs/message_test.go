package verbs

import (
	"encoding/binary"
	"errors"
	"reflect"
	"testing"

	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

func text[A [64]byte | [1020]byte](s string) (a A) {
	for i := range s {
		switch p := any(&a).(type) {
		case *[64]byte:
			p[i] = s[i]
		case *[1020]byte:
			p[i] = s[i]
		}
	}
	return a
}

func somePort() portInfo {
	return portInfo{Name: text[[64]byte]("mlx5_0"), GID: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}, Layer: layerEthernet,
		MTU: 5}
}

// examples returns one message of each kind.
func examples() []any {
	cards := [maxCards]portInfo{somePort(), somePort()}
	return []any{
		&offer{Kind: kindOffer, Cards: 2, Pairs: 4, Card: cards},
		&answer{Kind: kindAnswer, Cards: 2, Links: 2, Pairs: 1, Card: cards, Link: [maxLinks]pairing{{0, 0}, {1, 1}},
			Page: page{1 << 46, [maxCards]uint32{5, 6}}, End: [maxPairs]end{{Number: 17, PSN: 5},
				{Number: 1<<24 - 1, PSN: 1<<24 - 1, ECE: verbs.ECE{Vendor: 1, Options: 2}}}},
		&connect{Kind: kindConnect, Ends: 1, Page: page{1 << 46, [maxCards]uint32{7}},
			End: [maxPairs]end{{Number: 17, PSN: 5}}},
		&short{Kind: kindReady}, &short{Kind: kindUse}, &short{Kind: kindNext},
		&refusal{Kind: kindRefuse, Reason: text[[1020]byte]("no NIC")},
		&path{Kind: kindPath, Links: 2, Most: 4 << 20, Link: [maxLinks]uint8{1, 0}},
		&regionKeys{Kind: kindRegion, Region: 7, Address: 1 << 46, Bytes: 1 << 24, Keys: [maxCards]uint32{5, 6},
			Weights: [maxCards]uint16{3, 1}},
		&ticketed{Kind: kindTicket, Ticket: 1 << 31, Grant: 1<<63 | 5},
		&arrived{Kind: kindArrived, Ticket: 1 << 31},
		&reset{Kind: kindReset, Epoch: 3, Reason: [1012]byte{'x'}},
		&resetAck{Kind: kindResetAck, Epoch: 3, Arrived: 1 << 40},
		&step{Kind: kindResume, Epoch: 4},
		&step{Kind: kindGranted, Epoch: 4},
	}
}

func TestMessagesRoundTripUnchanged(t *testing.T) {
	for _, m := range examples() {
		b := encode(m)
		if len(b) > tcp.MaxExtension {
			t.Errorf("a %T has %d bytes", m, len(b))
		}
		if got, err := decode(b); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%T: %+v, %v", m, got, err)
		}
		if _, err := decode(b[:len(b)-1]); err == nil {
			t.Errorf("a %T without its last byte is understood", m)
		}
		if _, err := decode(append(b, 0)); err == nil {
			t.Errorf("a %T with another byte is understood", m)
		}
	}
}

// TestInvalidMessagesAreRejected demands an error for each invalid message.
func TestInvalidMessagesAreRejected(t *testing.T) {
	cards := [maxCards]portInfo{somePort()}
	odd := func(change func(*portInfo)) [maxCards]portInfo {
		c := cards
		change(&c[0])
		return c
	}
	ends := [maxPairs]end{{Number: 17, PSN: 5}}
	for _, tt := range []struct {
		m     any
		field string
		value any
	}{
		{&short{Kind: 99}, "kind", uint32(99)},
		{&offer{Kind: kindOffer, Pairs: 1}, "number of NICs", uint32(0)},
		{&offer{Kind: kindOffer, Cards: maxCards + 1, Pairs: 1, Card: cards}, "number of NICs", uint32(9)},
		{&offer{Kind: kindOffer, Cards: 1, Card: cards}, "number of queue pairs", uint32(0)},
		{&offer{Kind: kindOffer, Cards: 1, Pairs: 1, Card: odd(func(c *portInfo) { c.Name[0] = 0 })}, "name of NIC", 0},
		{&offer{Kind: kindOffer, Cards: 1, Pairs: 1, Card: odd(func(c *portInfo) { c.MTU = 6 })}, "MTU", uint8(6)},
		{&offer{Kind: kindOffer, Cards: 1, Pairs: 1, Card: odd(func(c *portInfo) { c.Layer = 0 })}, "link layer", uint8(0)},
		{&answer{Kind: kindAnswer, Cards: 1, Links: 1, Pairs: maxPairs + 1, Card: cards, End: ends},
			"number of queue pairs", uint32(65)},
		{&answer{Kind: kindAnswer, Cards: 1, Links: 2, Pairs: 1 << 31, Card: cards, End: ends}, "number of queue pairs",
			uint32(1 << 31)},
		{&answer{Kind: kindAnswer, Cards: 1, Links: 1, Pairs: 1, Card: cards, Link: [maxLinks]pairing{{0, 1}}, End: ends},
			"link", pairing{0, 1}},
		{&answer{Kind: kindAnswer, Cards: 1, Links: 1, Pairs: 2, Card: cards, End: ends}, "number of queue pair", uint32(0)},
		{&connect{Kind: kindConnect, Ends: 1, End: [maxPairs]end{{Number: 1 << 24}}}, "number of queue pair",
			uint32(1 << 24)},
		{&connect{Kind: kindConnect, Ends: maxPairs + 1}, "number of queue pairs", uint32(65)},
		{&path{Kind: kindPath, Links: 1}, "length of writes", uint64(0)},
		{&path{Kind: kindPath, Links: 2, Most: 1}, "link", uint8(0)},
		{&regionKeys{Kind: kindRegion, Address: 1<<64 - 1, Bytes: 2}, "length", uint64(2)},
	} {
		_, err := decode(encode(tt.m))
		var invalid *fieldError
		if !errors.As(err, &invalid) || invalid.Field != tt.field || invalid.Value != tt.value ||
			wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("%+v: %v; want %s %v", tt.m, err, tt.field, tt.value)
		}
	}
}

// FuzzMessage decodes bytes of a peer: an accepted message is within its limits and encodes to the
// same bytes.
func FuzzMessage(f *testing.F) {
	for _, m := range examples() {
		f.Add(encode(m))
	}
	f.Add([]byte{kindAnswer})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b)
		if err != nil {
			return
		}
		again, err := decode(encode(m))
		if err != nil || !reflect.DeepEqual(m, again) || binary.Size(m) != len(b) {
			t.Fatalf("%+v becomes %+v, %v", m, again, err)
		}
		switch m := m.(type) {
		case *offer:
			_ = m.Card[:m.Cards]
		case *answer:
			_, _ = m.End[:m.Links*m.Pairs], m.Link[:m.Links]
		case *connect:
			_ = m.End[:m.Ends]
		case *path:
			_ = m.Link[:m.Links]
		}
	})
}
