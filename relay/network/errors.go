package network

import (
	"errors"
	"fmt"
	"net/netip"
)

// versionsError is the cause of a handshake without a common version of the protocol between hosts.
type versionsError struct {
	peer         string
	theirs, ours [2]uint32 // oldest and newest
	handshake    uint32    // the peer's version of the handshake, if not handshakeVersion
}

func (e *versionsError) Error() string {
	if e.handshake != 0 {
		return fmt.Sprintf(
			"%s speaks version %d of the handshake between hosts, and versions %d to %d of the protocol between "+
				"hosts; this host speaks version %d, and %d to %d; install the same release on both",
			e.peer,
			e.handshake,
			e.theirs[0],
			e.theirs[1],
			handshakeVersion,
			e.ours[0],
			e.ours[1],
		)
	}
	return fmt.Sprintf(
		"%s speaks versions %d to %d of the protocol between hosts, and this host %d to %d; install releases "+
			"that are nearer to each other",
		e.peer,
		e.theirs[0],
		e.theirs[1],
		e.ours[0],
		e.ours[1],
	)
}

// addressError is a failed handshake at an address.
type addressError struct {
	address netip.AddrPort
	err     error
}

func (e *addressError) Error() string { return fmt.Sprintf("%v: %v", e.address, e.err) }
func (e *addressError) Unwrap() error { return e.err }

// interfaceError is a failed connection by an interface.
type interfaceError struct {
	name string
	err  error
}

func (e *interfaceError) Error() string { return fmt.Sprintf("by interface %s: %v", e.name, e.err) }
func (e *interfaceError) Unwrap() error { return e.err }

// subjectError is a certificate that no authority of this host has signed.
type subjectError struct {
	subject string // sanitised
	err     error
}

func (e *subjectError) Error() string {
	return fmt.Sprintf("the certificate of %s: %v", e.subject, e.err)
}
func (e *subjectError) Unwrap() error { return e.err }

var (
	errNoAddress = errors.New("the other relay has no address that this host can reach by the addresses and interfaces " +
		"that it uses (network.family, network.interfaces in config.toml)")
	errForeignRails = errors.New("the message about rails is not authentic")
	errBetween      = errors.New("the other side of TLS is not the other side of the connection: someone is in between")
	errCertificate  = errors.New("the certificate and its key")
	errNoAuthority  = errors.New("the authority's file has no certificate in PEM")
)

// certificateError is the cause of a handshake between a host with certificates and a host without.
type certificateError struct{ has, lacks string }

func (e *certificateError) Error() string {
	return fmt.Sprintf("%s has certificates (network.tls_certificate in config.toml) and %s has none; give them to both "+
		"or to neither", e.has, e.lacks)
}
