package network

import (
	"crypto/hmac"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// String is the peer's name, never the secret.
func (s Session) String() string { return "session with " + s.Peer }

// Format prints String, whatever the verb.
func (s Session) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }

// secretBytes is a secret of both sides and of this session alone.
func (s *Session) secretBytes() [32]byte { return s.secret() }

// derive makes the session's secret of a key.
func (s *Session) derive(key Key, salt []byte, label string) {
	var secret [32]byte
	copy(secret[:], key.derive(salt, label, len(secret)))
	s.secret = func() [32]byte { return secret }
}

// key is the session's secret in a key's place.
func (s *Session) key() Key { return keyOf(s.secretBytes(), time.Time{}) }

// joinKey seals the hellos of further streams of the session.
func (s *Session) joinKey() Key {
	var secret [keyBytes]byte
	copy(secret[:], s.key().derive(nil, "join", len(secret)))
	return keyOf(secret, time.Time{})
}

// joins are sessions that expect streams. The zero value is none.
type joins struct {
	mu       sync.Mutex
	expected map[KeyID]join
}

type join struct {
	key     Key
	session *Session
}

func (j *joins) find(id KeyID) (Key, *Session) {
	j.mu.Lock()
	defer j.mu.Unlock()
	found := j.expected[id]
	return found.key, found.session
}

// Expect permits the initiator of a session to add streams until the call of forget, also while the
// session lives. Which numbers are free, and how many there may be, is admit's to say.
//
// A stream that comes before Expect is refused without a word, as a stranger is: an initiator joins
// after this side's message that it expects the stream.
func (l *Local) Expect(s *Session) (forget func()) {
	key := s.joinKey()
	l.joins.mu.Lock()
	defer l.joins.mu.Unlock()
	if l.joins.expected == nil {
		l.joins.expected = map[KeyID]join{}
	}
	l.joins.expected[key.ID] = join{key, s}
	return func() {
		l.joins.mu.Lock()
		defer l.joins.mu.Unlock()
		delete(l.joins.expected, key.ID)
	}
}

// Certificates are the parameters of TLS, in PEM: this host's certificate chain and key, and the
// authorities of both sides' certificates.
type Certificates struct{ Certificate, Key, Authority []byte }

// LoadTLS makes the configuration of TLS 1.3 for both sides. Any certificate of one of the
// authorities is valid, regardless of the name: handles have addresses, not names, so the authority
// has to be the cluster's own.
func LoadTLS(c Certificates) (*tls.Config, error) {
	pair, err := tls.X509KeyPair(c.Certificate, c.Key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errCertificate, err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(c.Authority) {
		return nil, errNoAuthority
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities,
		// Verified below, but for the name.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			return verify(state.PeerCertificates, authorities)
		},
		SessionTicketsDisabled: true,
	}, nil
}

func verify(chain []*x509.Certificate, authorities *x509.CertPool) error {
	if len(chain) == 0 {
		return errors.New("the other side showed no certificate")
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	// A relay is client and server.
	for _, use := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if _, err := chain[0].Verify(x509.VerifyOptions{Roots: authorities, Intermediates: between,
			KeyUsages: []x509.ExtKeyUsage{use}}); err != nil {
			return &subjectError{tame(chain[0].Subject.String()), err}
		}
	}
	return nil
}

// Labels of the proofs within TLS.
const (
	exporterLabel = "EXPORTER-peerlane-network-1"
	byInitiator   = "tls initiator"
	byListener    = "tls listener"
)

// secure puts TLS around the session's connection, and binds the session's secret to it.
func (s *Session) secure(conn *tls.Conn, initiator bool) error {
	if err := conn.Handshake(); err != nil {
		return unless(err, "TLS")
	}
	state := conn.ConnectionState()
	if state.Version != tls.VersionTLS13 {
		return fmt.Errorf("handshake with another host's relay: TLS of version %#x", state.Version)
	}
	exported, err := state.ExportKeyingMaterial(exporterLabel, nil, 32)
	if err != nil {
		return unless(err, "TLS")
	}
	s.derive(s.key(), exported, "tls session")
	ours, theirs := byInitiator, byListener
	if !initiator {
		ours, theirs = theirs, ours
	}
	// In sequence, so that no connection has to hold both at once.
	say := func() error {
		_, err := conn.Write(s.key().derive(nil, ours, 32))
		return err
	}
	hear := func() error {
		proof := make([]byte, 32)
		if _, err := io.ReadFull(conn, proof); err != nil {
			return err
		}
		if !hmac.Equal(proof, s.key().derive(nil, theirs, len(proof))) {
			return errBetween
		}
		return nil
	}
	steps := []func() error{say, hear}
	if !initiator {
		steps = []func() error{hear, say}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return unless(err, "TLS's proof")
		}
	}
	s.Conn = conn
	if name := state.PeerCertificates[0].Subject.CommonName; name != "" {
		s.Peer += ", certificate of " + tame(name)
	}
	return nil
}

// tame is a certificate's name as a relay's is told: no more of it, and no terminal's codes.
func tame(name string) string {
	var field [nameBytes]byte
	wire.SetText(field[:], name)
	return wire.Text(field[:])
}
