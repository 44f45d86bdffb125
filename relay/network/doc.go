// Package network is how relays of different hosts come to trust each other: the
// cluster key, the handshake that proves its possession, what listens for it, and the
// address in a listener's handle. Package address says which addresses those are.
//
// # Handshake
//
// Four messages, each of a fixed size, of which the initiator sends the first. A
// listener writes nothing before it has read a proof, so that a stranger sees a
// connection that closes, and no byte of it.
//
//	hello    ephemeral key 32 │ key id 8, sealed 152 │ key id 8, sealed 152   initiator → listener
//	answer   ephemeral key 32 │ sealed 16                                     listener → initiator
//	request  sealed 152                                                       initiator → listener
//	welcome  sealed 112                                                       listener → initiator
//
// Hello and answer are the messages of Noise_NNpsk0_25519_ChaChaPoly_SHA256
// (https://noiseprotocol.org, revision 34; github.com/flynn/noise), with a pre-shared key
// that HKDF-SHA-256 makes of the cluster key. Hello says nothing but the version of the
// handshake, and answer nothing at all. Request and welcome are sealed by the two cipher
// states of Noise, with all bytes of the conversation before them as associated data.
//
// So there is forward secrecy: whoever records a handshake and learns the cluster key later
// can tell that the hello is of that key, and has neither side's ephemeral private key, which
// each side forgets at the end of the handshake. The thief reads no host name, no token of a
// listener and no outcome, and cannot compute the session's secret. An attacker that has the
// cluster key during the handshake and is between the two can answer in the place of either.
//
// A hello is sealed twice, with the current cluster key and with the previous one while a
// rotation is under way (random bytes stand for a second one), so that hosts meet in
// whatever order they are told of a new key, by one connection. Both have one ephemeral key.
// A listener finds a key by its id: it tries none, and takes as long for an id that it does
// not know.
//
// A request says which host and listener it is for, from whom, which versions its sender
// speaks, and whether TLS follows; the welcome says the listener's versions and the one
// that is taken. So no one in between can send either to another place, reflect it, or
// have an older version or no TLS taken. A hello that is recorded and sent again is
// answered with an ephemeral key, and the handshake ends there: the request depends on that
// key. The listener asks nobody whether the target is there before that.
//
// Version 1 of the handshake had three messages and no forward secrecy. A listener knows
// its hello, and tells its sender which versions the two speak (version1.go).
//
// With certificates on both sides TLS 1.3 follows on the same connection, within what was
// proven: a stranger does not see a certificate either. Both sides then prove the
// session's secret bound to that TLS channel (RFC 5705, RFC 8446 section 7.5).
//
// A further connection of a session, a stream of data, say, comes by the same handshake,
// with a key that is made of the session's secret in place of the cluster's.
//
// # What is not protected
//
// What crosses a connection after the handshake is neither encrypted nor authenticated by
// this package, unless TLS is. Every relay of a cluster has the same key: it tells the cluster from strangers,
// not one of its hosts from another.
package network
