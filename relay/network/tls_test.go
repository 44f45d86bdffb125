package network

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"
)

// authority makes certificates of hosts.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func certificate(
	t testing.TB,
	name string,
	parent *authority,
	uses ...x509.ExtKeyUsage,
) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: uses,
		IsCA: parent == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	signer, by := key, c
	if parent != nil {
		signer, by = parent.key, parent.cert
	} else {
		c.KeyUsage |= x509.KeyUsageCertSign
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), signer)
	if err == nil {
		c, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t}
	a.cert, a.key, a.pem = certificate(t, "authority", nil)
	return a
}

func (a *authority) files(name string, uses ...x509.ExtKeyUsage) Certificates {
	a.t.Helper()
	if uses == nil {
		uses = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	_, key, text := certificate(a.t, name, a, uses...)
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return Certificates{
		Certificate: text,
		Key:         pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		Authority:   a.pem,
	}
}

func (a *authority) config(name string, uses ...x509.ExtKeyUsage) *tls.Config {
	a.t.Helper()
	c, err := LoadTLS(a.files(name, uses...))
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// lacking returns a function that selects the error of a host without certificates.
func lacking(has, lacks string) func(error) bool {
	return func(err error) bool {
		var e *certificateError
		return errors.As(err, &e) && e.has == has && e.lacks == lacks
	}
}

func unknownAuthority(err error) bool {
	var e x509.UnknownAuthorityError
	return errors.As(err, &e)
}

func incompatibleUsage(err error) bool {
	var e x509.CertificateInvalidError
	return errors.As(err, &e) && e.Reason == x509.IncompatibleUsage
}

func TestHandshakeOverTLSSucceeds(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	hostOne, hostTwo := ours.config("host one"), ours.config("host two")
	for _, c := range []struct {
		name string
		a, b *tls.Config
		says func(error) bool // selects the error of the side that refuses; nil without a refusal
	}{
		{"both have certificates", hostOne, hostTwo, nil},
		{"the initiator alone", hostOne, nil, lacking("relay A", "this host")},
		{"the listener alone", nil, hostTwo, lacking("this host", "relay A")},
		{"an initiator of another authority", others.config("host one"), hostTwo, unknownAuthority},
		{"a listener of another authority", hostOne, others.config("host two"), unknownAuthority},
		{"for servers only", ours.config("host one", x509.ExtKeyUsageServerAuth), hostTwo, incompatibleUsage},
		{"for clients only", hostOne, ours.config("host two", x509.ExtKeyUsageClientAuth), incompatibleUsage},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := relays(newKeys())
			a.TLS, b.TLS = c.a, c.b
			ours, theirs := tcp(t, "tcp4", "127.0.0.1:0")
			i, l := shake(
				func() (*Session, error) { return a.Initiate(ours, toB) },
				func() (*Session, error) { return b.Respond(theirs, admitB) },
				ours,
				theirs,
			)
			if c.says != nil {
				if l.err == nil || i.err == nil || !c.says(i.err) && !c.says(l.err) {
					t.Errorf("initiator %v, listener %v", i.err, l.err)
				}
				return
			}
			sa, sb := agreed(t, i, l)
			if !strings.HasSuffix(sa.Peer, "certificate of host two") || !strings.HasSuffix(sb.Peer, "certificate of host one") {
				t.Errorf("%q and %q", sa.Peer, sb.Peer)
			}
			conn, ok := sa.Conn.(*tls.Conn)
			if !ok || conn.ConnectionState().Version != tls.VersionTLS13 {
				t.Fatalf("the session is on a %T", sa.Conn)
			}
			go func() { _, _ = sb.Conn.Write([]byte("sealed")) }()
			got := make([]byte, 6)
			if _, err := io.ReadFull(sa.Conn, got); err != nil || string(got) != "sealed" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// A certificate's name is somebody else's to choose.
func TestCertificateNamesAreSanitised(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	name := "\x1b[2J" + strings.Repeat("x", 500)
	a, b := relays(newKeys())
	a.TLS, b.TLS = ours.config(name), ours.config("two")
	i, l := meet(a, b)
	_, sb := agreed(t, i, l)
	if strings.Contains(sb.Peer, "\x1b") || len(sb.Peer) > 200 || !strings.Contains(sb.Peer, "certificate of ?[2Jxxx") {
		t.Errorf("%q", sb.Peer)
	}
	b.TLS = others.config(name)
	near, far := tcp(t, "tcp4", "127.0.0.1:0")
	i, _ = shake(
		func() (*Session, error) { return a.Initiate(near, toB) },
		func() (*Session, error) { return b.Respond(far, admitB) },
		near,
		far,
	)
	var of *subjectError
	if !errors.As(i.err, &of) || !strings.Contains(of.subject, "?[2Jxxx") || len(of.subject) > nameBytes ||
		strings.Contains(i.err.Error(), "\x1b") {
		t.Errorf("%q", i.err)
	}
}

// A stream of a session with TLS has no TLS, and needs the session's secret from TLS.
func TestStreamOfTLSSessionAuthenticates(t *testing.T) {
	authority := newAuthority(t)
	a, b := relays(newKeys())
	a.TLS, b.TLS = authority.config("one"), authority.config("two")
	i, l := meet(a, b)
	sa, sb := agreed(t, i, l)
	defer b.Expect(sb)()
	ours, theirs := net.Pipe()
	i, l = shake(
		func() (*Session, error) { return a.join(ours, sa, 1) },
		func() (*Session, error) { return b.Respond(theirs, func(Greeting) error { return nil }) },
		ours,
		theirs,
	)
	if ja, _ := agreed(t, i, l); ja.Conn != ours {
		t.Errorf("a stream is on a %T", ja.Conn)
	}
}

// The attacker in between has a certificate of the authority, and forwards the handshake. He can
// end TLS on both sides; the proofs within are not his to make.
func TestTLSEndedByProxyIsRefused(t *testing.T) {
	authority := newAuthority(t)
	a, b := relays(newKeys())
	a.TLS, b.TLS = authority.config("one"), authority.config("two")
	between := authority.config("in between")
	ours, left := net.Pipe()
	right, theirs := net.Pipe()
	sealed := make(chan error, 2)
	go func() {
		defer left.Close()
		defer right.Close()
		for n, way := range [][2]net.Conn{{left, right}, {right, left}, {left, right}, {right, left}} {
			message := make([]byte, sizes[n])
			_, err := io.ReadFull(way[0], message)
			if err == nil {
				_, err = way[1].Write(message)
			}
			if err != nil {
				sealed <- err
				return
			}
		}
		server, client := tls.Server(left, between), tls.Client(right, between)
		for _, c := range []*tls.Conn{server, client} {
			if err := c.Handshake(); err != nil {
				sealed <- err
				return
			}
		}
		sealed <- nil
		go func() { _, _ = io.Copy(client, server) }()
		_, _ = io.Copy(server, client)
	}()
	i, l := shake(
		func() (*Session, error) { return a.Initiate(ours, toB) },
		func() (*Session, error) { return b.Respond(theirs, admitB) },
		ours,
		theirs,
	)
	if err := <-sealed; err != nil {
		t.Fatalf("nobody came in between: %v", err)
	}
	if i.err == nil || !errors.Is(l.err, errBetween) {
		t.Errorf("initiator %v, listener %v", i.err, l.err)
	}
}

// A listener shows no certificate to a stranger.
func TestStrangerSeesNoCertificate(t *testing.T) {
	_, b := relays(newKeys())
	b.TLS = newAuthority(t).config("secret host")
	client, theirs := net.Pipe()
	conn := &counted{Conn: theirs}
	go func() {
		_ = tls.Client(client, &tls.Config{InsecureSkipVerify: true}).Handshake()
	}()
	_, err := b.Respond(conn, admitB)
	theirs.Close()
	if err == nil || conn.written != 0 {
		t.Errorf("%v after %d bytes", err, conn.written)
	}
}

func TestInvalidCertificatesAreRefused(t *testing.T) {
	good, other := newAuthority(t).files("one"), newAuthority(t).files("two")
	for _, c := range []struct {
		files Certificates
		want  error
	}{
		{Certificates{}, errCertificate},
		{Certificates{good.Certificate, other.Key, good.Authority}, errCertificate},
		{Certificates{good.Certificate, good.Key, good.Key}, errNoAuthority},
	} {
		if _, err := LoadTLS(c.files); !errors.Is(err, c.want) {
			t.Errorf("%v; want %v", err, c.want)
		}
	}
}
