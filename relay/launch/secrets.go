package launch

import (
	"encoding/json"
	"fmt"
)

// Secrets are the keys that a relay needs for the network. They are apart from Config, which lies
// in the generation's state and which `peerlane relay inspect` prints. A relay has a separate uid
// and reads no file of root, so the supervisor reads the files.
type Secrets struct {
	// ClusterKey is the text of the key file; with an empty key the relay neither listens for nor
	// connects to relays of remote hosts.
	ClusterKey Secret `json:"clusterKey,omitzero"`
	// The files of network.tls_certificate, tls_key and tls_authority; all or none.
	Certificate    Secret `json:"certificate,omitzero"`
	CertificateKey Secret `json:"certificateKey,omitzero"`
	Authority      Secret `json:"authority,omitzero"`
}

// Secret is a byte string that is marshalled in base64 and never printed, also as a part of another
// value. The zero value has none.
type Secret struct {
	// A function, because fmt does not ask a field that is not exported how it wants to
	// be printed.
	bytes func() []byte
}

// NewSecret returns a secret that keeps the bytes.
func NewSecret(bytes []byte) Secret {
	if len(bytes) == 0 {
		return Secret{}
	}
	return Secret{func() []byte { return bytes }}
}

// Bytes is the secret, nil where there is none.
func (s Secret) Bytes() []byte {
	if s.bytes == nil {
		return nil
	}
	return s.bytes()
}

// IsZero reports whether there is none.
func (s Secret) IsZero() bool { return s.bytes == nil }

// Format prints the number of bytes for every verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "%d secret bytes", len(s.Bytes())) }

// MarshalJSON writes the secret.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.Bytes()) }

// UnmarshalJSON reads the output of MarshalJSON.
func (s *Secret) UnmarshalJSON(text []byte) error {
	var bytes []byte
	if err := json.Unmarshal(text, &bytes); err != nil {
		return err
	}
	*s = NewSecret(bytes)
	return nil
}
