package launch

import (
	"encoding/json"
	"fmt"
)

// Secrets are what a relay has to be told for the network and nobody else may hear. They
// are apart from Config, which lies in the generation's state and which `peerlane relay
// inspect` prints. A relay has a uid of its own and reads no file of root's, so its
// supervisor reads them for it.
type Secrets struct {
	// ClusterKey is the text of the key file; relays of other hosts are neither listened
	// for nor connected to where it is empty.
	ClusterKey Secret `json:"clusterKey,omitzero"`
	// The files of network.tls_certificate, tls_key and tls_authority; all or none.
	Certificate    Secret `json:"certificate,omitzero"`
	CertificateKey Secret `json:"certificateKey,omitzero"`
	Authority      Secret `json:"authority,omitzero"`
}

// Secret is bytes that are marshalled, in base64, and not printed, whatever has it in it.
// The zero value has none.
type Secret struct {
	// A function, because fmt does not ask a field that is not exported how it wants to
	// be printed.
	bytes func() []byte
}

// NewSecret makes one of bytes, which it keeps.
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

// Format prints how many bytes it has, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "%d secret bytes", len(s.Bytes())) }

// MarshalJSON writes the secret.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.Bytes()) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (s *Secret) UnmarshalJSON(text []byte) error {
	var bytes []byte
	if err := json.Unmarshal(text, &bytes); err != nil {
		return err
	}
	*s = NewSecret(bytes)
	return nil
}
