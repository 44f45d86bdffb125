package network

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/flynn/noise"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

// recorded is a handshake between two relays as a third party on the network sees it.
func recorded(t *testing.T, a, b *Local) (messages [][]byte, s *Session) {
	t.Helper()
	i, l := between(a, b, func(_ int, message []byte) []byte {
		messages = append(messages, slices.Clone(message))
		return message
	})
	s, _ = agreed(t, i, l)
	return messages, s
}

// A thief of the cluster key has all messages of a handshake that is over. Neither side's
// computation with these messages and this key leads to the session's secret, nor to any
// text that was sealed: host names, the listener's token, outcomes.
func TestHandshakeRecordedThenKeyStolenRevealsNothing(t *testing.T) {
	for _, keys := range []Keys{newKeys(), rotated(t, newKeys())} {
		a, b := relays(keys)
		messages, s := recorded(t, a, b)
		hello, answer, request, welcomed := messages[0], messages[1], messages[2], messages[3]
		for _, text := range [][]byte{toB.Token[:4], []byte("relay A"), []byte("relay B"), hostA[:4], hostB[:4]} {
			for n, message := range messages {
				if bytes.Contains(message, text) {
					t.Errorf("message %d shows %q", n, text)
				}
			}
		}
		for _, key := range keys.all() {
			// The hello is readable with the key, and says its version and zeros.
			for _, slot := range slots(hello) {
				text, _, _, err := key.noise(
					false,
					rand.Reader,
				).ReadMessage(
					nil,
					slices.Concat(hello[:ephemeralBytes], slot.sealed),
				)
				if err == nil && (text[0] != handshakeVersion || !bytes.Equal(text[1:], make([]byte, helloBytes-1))) {
					t.Errorf("a hello says %x", text)
				}
				if known := slot.id == key.ID; (err == nil) != known {
					t.Errorf("a hello with %v, opened with %v: %v", slot.id, key.ID, err)
				}
			}
			// As the listener, with another ephemeral key than the listener had: its
			// private half is in no message.
			state, _, err := b.openHello(hello)
			if err != nil {
				t.Fatal(err)
			}
			again, c, err := newAnswer(state, hello)
			if err != nil {
				t.Fatal(err)
			}
			c.conversation = [][]byte{hello, answer} // as it was
			if bytes.Equal(again, answer) {
				t.Error("two answers to a hello are equal")
			}
			if text, err := c.open(request); err == nil {
				t.Errorf("the request is revealed: %x", text)
			}
			c.conversation = [][]byte{hello, answer, request, welcomed}
			if c.session(nil).secretBytes() == s.secretBytes() {
				t.Error("the session's secret is revealed")
			}
			// As the initiator, with another ephemeral key than the initiator had.
			_, states := newHello([]Key{key}, rand.Reader)
			if _, err := openAnswer(states, hello, answer); err == nil {
				t.Error("the answer opens with another ephemeral key")
			}
		}
	}
}

// The sides' ephemeral private keys are all that keeps a recorded handshake: with the same
// one the same secret results, so that the test above tests the right computation.
func TestHandshakeSecretNeedsEphemeralKey(t *testing.T) {
	key := NewKey(someDay)
	b := &Local{Keys: func() Keys { return Keys{Current: key} }}
	seed := bytes.Repeat([]byte{7}, helloSize+ephemeralBytes)
	hello, states := newHello([]Key{key}, bytes.NewReader(seed))
	again, thief := newHello([]Key{key}, bytes.NewReader(seed))
	if !bytes.Equal(hello, again) {
		t.Fatal("a hello of the same ephemeral key is another")
	}
	state, _, err := b.openHello(hello)
	if err != nil {
		t.Fatal(err)
	}
	answer, listener, err := newAnswer(state, hello)
	if err != nil {
		t.Fatal(err)
	}
	secret := listener.session(nil).secretBytes()
	for name, states := range map[string]*channel{"the initiator": must(openAnswer(states, hello, answer)),
		"who has its ephemeral key": must(openAnswer(thief, hello, answer))} {
		if states.session(nil).secretBytes() != secret {
			t.Errorf("%s has another secret", name)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// lowOrder makes the public key 0.
type lowOrder struct{ noise.DHFunc }

func (d lowOrder) GenerateKeypair(random io.Reader) (noise.DHKey, error) {
	k, err := d.DHFunc.GenerateKeypair(random)
	k.Public = make([]byte, len(k.Public))
	return k, err
}

// A listener does not go on with an ephemeral key that makes the shared secret a constant.
func TestHandshakeLowOrderKeyIsRefused(t *testing.T) {
	key := NewKey(someDay)
	_, b := relays(Keys{Current: key})
	// A hello for the ephemeral key 0, sealed with the cluster key.
	state, err := noise.NewHandshakeState(noise.Config{
		CipherSuite: noise.NewCipherSuite(
			lowOrder{noise.DH25519},
			noise.CipherChaChaPoly,
			noise.HashSHA256,
		), Pattern: noise.HandshakeNN, Initiator: true,
		Prologue: append([]byte("peerlane network 2 "), key.ID[:]...), PresharedKey: key.derive(nil, "noise psk", 32),
	})
	if err != nil {
		t.Fatal(err)
	}
	message, _, _, err := state.WriteMessage(nil, append([]byte{handshakeVersion}, make([]byte, helloBytes-1)...))
	if err != nil {
		t.Fatal(err)
	}
	hello := slices.Concat(message[:ephemeralBytes], key.ID[:], message[ephemeralBytes:], make([]byte, slotBytes))
	if _, _, err := b.openHello(hello); err != nil {
		t.Fatalf("the hello does not prove the key: %v", err)
	}
	conn := prepared(hello)
	if s, err := b.Respond(conn, admitB); s != nil || !errors.Is(err, ErrStranger) || conn.written != 0 {
		t.Errorf("%v, %v after %d bytes", s, err, conn.written)
	}
}

// version1Hello is the hello of a relay that speaks version 1 of the handshake.
func version1Hello(key Key, g *Greeting) []byte {
	hello := make([]byte, ephemeralBytes, helloSize)
	_, _ = rand.Read(hello)
	nonce := hello[:ephemeralBytes:ephemeralBytes]
	hello = append(hello, key.ID[:]...)
	hello = seal(key, "hello", g.bytes(), hello, nonce, key.ID[:])
	_, _ = rand.Read(hello[len(hello):helloSize])
	return hello[:helloSize]
}

// Both sides say which versions the two speak, where one is of a release before.
func TestHandshakeVersion1IsNamed(t *testing.T) {
	keys := newKeys()
	_, b := relays(keys)
	b.Oldest, b.Newest = 3, 3
	ours, theirs := net.Pipe()
	defer ours.Close()
	told := make(chan *welcome, 1)
	go func() {
		hello := version1Hello(
			keys.Current,
			&Greeting{host: hostA, Name: "relay A", Target: toB, purpose: purposeConnect, oldest: 1, newest: 2},
		)
		answer := make([]byte, ephemeralBytes+welcomeSize)
		_, err := ours.Write(hello)
		if err == nil {
			_, err = io.ReadFull(ours, answer)
		}
		if err != nil {
			t.Error(err)
		}
		text, err := open(keys.Current, "welcome", answer[ephemeralBytes:], hello, answer[:ephemeralBytes])
		if err != nil {
			t.Error(err)
		}
		w, err := parseWelcome(text)
		if err != nil {
			t.Error(err)
		}
		told <- w
	}()
	s, err := b.Respond(theirs, func(Greeting) error { t.Error("it was admitted"); return nil })
	want := &versionsError{"relay A", [2]uint32{1, 2}, [2]uint32{3, 3}, 1}
	if s != nil || wire.StatusOf(err) != wire.StatusVersion || !testutil.HasError(err, want) {
		t.Errorf("%v, %v", s, err)
	}
	if w := <-told; w == nil || w.outcome != outcomeVersion || w.oldest != 3 || w.newest != 3 || w.name != "relay B" {
		t.Errorf("a relay of version 1 is told %+v", w)
	}
	// Without the key it is told nothing.
	conn := prepared(version1Hello(NewKey(time.Now()), &Greeting{purpose: purposeConnect}))
	if s, err := b.Respond(conn, admitB); s != nil || !errors.Is(err, ErrStranger) || conn.written != 0 {
		t.Errorf("%v, %v after %d bytes", s, err, conn.written)
	}
}
