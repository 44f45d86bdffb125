// Package network authenticates relays of different hosts: the cluster key, the handshake that
// proves possession of the key, the listener, and the address in a listener's handle. Package
// address says which addresses those are.
//
// # Handshake
//
// Four messages, each of a fixed size, of which the initiator sends the first. A listener writes no
// byte before a proof, so a stranger sees only a closing connection.
//
//	hello    ephemeral key 32 │ key id 8, sealed 152 │ key id 8, sealed 152   initiator → listener
//	answer   ephemeral key 32 │ sealed 16                                     listener → initiator
//	request  sealed 152                                                       initiator → listener
//	welcome  sealed 112                                                       listener → initiator
//
// Hello and answer are the messages of Noise_NNpsk0_25519_ChaChaPoly_SHA256
// (https://noiseprotocol.org, revision 34; github.com/flynn/noise), with a pre-shared key that
// HKDF-SHA-256 makes of the cluster key. Hello has only the version of the handshake, and answer
// has no content. The two cipher states of Noise seal request and welcome, with the preceding bytes
// of the conversation as associated data.
//
// So there is forward secrecy: an attacker who records a handshake and later learns the cluster key
// can identify the hello's key, and has no ephemeral private key, which both sides forget at the
// end of the handshake. The thief reads no host name, no token of a listener and no outcome, and
// cannot compute the session's secret. An attacker that has the cluster key during the handshake
// and is between the two can answer in the place of either.
//
// A hello is sealed twice, with the current cluster key and, during a rotation, with the previous
// key (else with random bytes), so that hosts connect with a single connection, regardless of the
// order of key updates. Both have one ephemeral key. A listener finds a key by its id: the listener
// tries no key, and takes the same time for an unknown id.
//
// A request names the target host and listener, the sender, the sender's versions, and whether TLS
// follows; the welcome says the listener's versions and the one that is taken. So an attacker in
// between can neither redirect nor reflect a message, nor force an older version or no TLS. A hello
// that is recorded and sent again is answered with an ephemeral key, and the handshake ends there:
// the request depends on that key. The listener does not check the target before that.
//
// Version 1 of the handshake had three messages and no forward secrecy. A listener recognises the
// hello of version 1, and reports the versions of both sides (version1.go).
//
// With certificates on both sides TLS 1.3 follows on the same connection, bound to the handshake: a
// stranger does not see a certificate either. Both sides then prove the session's secret bound to
// that TLS channel (RFC 5705, RFC 8446 section 7.5).
//
// A further connection of a session, a stream of data, say, comes by the same handshake,
// with a key that is made of the session's secret in place of the cluster's.
//
// # What is not protected
//
// Without TLS, this package neither encrypts nor authenticates data after the handshake. Every
// relay of a cluster has the same key: the key separates the cluster from strangers, not the hosts
// of the cluster.
package network
