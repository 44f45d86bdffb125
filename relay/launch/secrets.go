package launch

import "fmt"

// Secrets are what a relay has to be told for the network and nobody else may hear. They
// are apart from Config, which lies in the generation's state and which `peerlane relay
// inspect` prints. A relay has a uid of its own and reads no file of root's, so its
// supervisor reads them for it.
type Secrets struct {
	// ClusterKey is the text of the key file; relays of other hosts are neither listened
	// for nor connected to where it is empty.
	ClusterKey Secret `json:"clusterKey,omitempty"`
	// The files of network.tls_certificate, tls_key and tls_authority; all or none.
	Certificate    Secret `json:"certificate,omitempty"`
	CertificateKey Secret `json:"certificateKey,omitempty"`
	Authority      Secret `json:"authority,omitempty"`
}

// Secret is bytes that are marshalled, and not printed.
type Secret []byte

// Format prints how many bytes it has, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "%d secret bytes", len(s)) }
