package network

import (
	"crypto/rand"

	"github.com/peerlane/peerlane/relay/wire"
)

// Version 1 of the handshake had no forward secrecy. A listener still reads the hello of
// version 1, to tell a relay of such a release which versions the two speak.
//
//	hello    nonce 32 │ key id 8, sealed 152 │ key id 8, sealed 152
//	welcome  nonce 32 │ sealed 112
//
// Sealed is AES-256-GCM under a key that is made of the cluster key, of a label and of all
// bytes before.

// answerVersion1 is the answer to a hello of version 1 that proves the cluster key, and the
// error of the listener; nil for another hello.
func (l *Local) answerVersion1(hello []byte) ([]byte, error) {
	keys := l.Keys()
	nonce := hello[:ephemeralBytes]
	for _, slot := range slots(hello) {
		for _, key := range keys.all() {
			if key.ID != slot.id {
				continue
			}
			text, err := open(key, "hello", slot.sealed, nonce, slot.id[:])
			if err != nil {
				continue
			}
			g, err := parseHello(text)
			if err != nil {
				return nil, err
			}
			w := welcome{outcome: outcomeVersion, oldest: l.Oldest, newest: l.Newest, host: l.Host, name: l.Name}
			answer := make([]byte, ephemeralBytes, ephemeralBytes+welcomeSize)
			_, _ = rand.Read(answer) // never fails
			answer = seal(key, "welcome", w.bytes(), answer, hello, answer)
			return answer, wire.Errorf(wire.StatusVersion, "%w", &versionsError{g.Name, [2]uint32{g.oldest, g.newest},
				[2]uint32{l.Oldest, l.Newest}, 1})
		}
	}
	return nil, nil
}
