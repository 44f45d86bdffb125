// Package network is how relays of different hosts come to trust each other: the
// cluster key, the handshake that proves its possession, what listens for it, and the
// address in a listener's handle. Package address says which addresses those are.
//
// # Handshake
//
// Three messages, each of a fixed size, of which the initiator sends the first. A
// listener writes nothing before it has read a proof, so that a stranger sees a
// connection that closes, and no byte of it.
//
//	hello    nonce 32 │ key id 8, sealed 152 │ key id 8, sealed 152     initiator → listener
//	welcome  nonce 32 │ sealed 112                                      listener → initiator
//	confirm  tag 16                                                     initiator → listener
//
// Sealed is AES-256-GCM under a key that HKDF-SHA-256 makes of the cluster key, of all
// bytes of the conversation so far (both nonces among them), and of a label that no other
// message has: it proves the key as an HMAC over the same would, and hides what it
// proves, the listener's token above all. Each such key seals one message.
//
// A hello is sealed twice, with the current cluster key and with the previous one while a
// rotation is under way (noise stands for what there is not), so that hosts meet in
// whatever order they are told of a new key, by one connection. A listener finds a key by
// its id: it tries none, and takes as long for an id that it does not know.
//
// A hello says which host and listener it is for, from whom, which versions its sender
// speaks, and whether TLS follows; the welcome says the listener's versions and the one
// that is taken. So no one in between can send either to another place, reflect it, or
// have an older version or no TLS taken. A hello that is recorded and sent again is
// answered with a welcome, which tells nothing without the key, and ends there: the
// confirm depends on the listener's nonce.
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
// this package, unless TLS is. There is no forward secrecy: who learns the cluster key
// can open handshakes that were recorded, which hold tokens of listeners that are long
// gone. Every relay of a cluster has the same key: it tells the cluster from strangers,
// not one of its hosts from another.
package network
