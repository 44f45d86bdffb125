package meeting

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
)

// Facts are the properties of a host that its doctor sends to the doctor of another host.
type Facts struct {
	// Host is the name of the host, and Release the version of its Peerlane.
	Host    string `json:"host"`
	Release string `json:"release"`
	// Oldest and Newest are the versions of the protocol between relays that the host supports.
	Oldest uint32 `json:"oldest"`
	Newest uint32 `json:"newest"`
	// Keys are the ids of the cluster's keys, the key in use first.
	Keys []string `json:"keys"`
	// TLS reports that network.tls_certificate is configured.
	TLS bool `json:"tls"`
	// Ports is network.ports.
	Ports string `json:"ports"`
	// Interfaces are the interfaces of relays, best first. Why is the reason if the list is empty.
	Interfaces []Interface `json:"interfaces"`
	Why        string      `json:"why,omitempty"`
	// Rails are the NICs of these interfaces, with the rail numbers of relays.
	Rails []Rail `json:"rails"`
	// Numbered reports that the configuration numbers the rails: network.rails or plan.rails.
	Numbered bool `json:"numbered,omitempty"`
}

// Interface is a network interface that relays use.
type Interface struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	MTU       int      `json:"mtu"`            // bytes
	Mbps      int      `json:"mbps,omitempty"` // 1e6 bit/s; 0 if the kernel reports no speed
}

// Rail is a NIC of relays: an RDMA device, or an interface without an RDMA device.
type Rail struct {
	Rail      int     `json:"rail"`
	NIC       string  `json:"nic"`
	LinkLayer string  `json:"linkLayer"`
	Gbps      float64 `json:"gbps"` // 1e9 bit/s; 0 if the kernel reports no speed
}

// Limits of the facts of another host.
const (
	maxFacts = 256 << 10
	maxList  = 256
	maxText  = 256
)

func (f Facts) text() ([]byte, error) {
	f.Interfaces, f.Rails = f.Interfaces[:min(len(f.Interfaces), maxList)], f.Rails[:min(len(f.Rails), maxList)]
	text, err := json.Marshal(f)
	if err == nil && len(text) > maxFacts {
		err = fmt.Errorf("the facts of this host have %d bytes, more than %d", len(text), maxFacts)
	}
	return text, err
}

// sizeError is the error of facts above maxFacts.
type sizeError struct{ bytes int }

func (e *sizeError) Error() string {
	return fmt.Sprintf("facts of %d bytes exceed the limit of %d", e.bytes, maxFacts)
}

// factsError is the error of facts that no doctor sends.
type factsError struct {
	keys, interfaces, rails int
	// oldest and newest are versions of the protocol.
	oldest, newest uint32
}

func (e *factsError) Error() string {
	return fmt.Sprintf("%d keys, %d interfaces, %d rails, versions %d to %d", e.keys, e.interfaces, e.rails, e.oldest,
		e.newest)
}

// parseFacts reads another host's facts. The host has the cluster key but is not trusted
// otherwise: parseFacts limits lists, and replaces control characters in strings by blanks.
func parseFacts(text []byte) (Facts, error) {
	var f Facts
	if len(text) > maxFacts {
		return f, &sizeError{len(text)}
	}
	if err := json.Unmarshal(text, &f); err != nil {
		return Facts{}, fmt.Errorf("invalid facts from the other host: %w", err)
	}
	if len(f.Keys) > 2 || len(f.Interfaces) > maxList || len(f.Rails) > maxList || f.Oldest > f.Newest {
		return Facts{}, fmt.Errorf("invalid facts from the other host: %w",
			&factsError{len(f.Keys), len(f.Interfaces), len(f.Rails), f.Oldest, f.Newest})
	}
	for _, s := range []*string{&f.Host, &f.Release, &f.Ports, &f.Why} {
		tame(s)
	}
	for i := range f.Keys {
		tame(&f.Keys[i])
	}
	for i := range f.Interfaces {
		n := &f.Interfaces[i]
		tame(&n.Name)
		n.Addresses = n.Addresses[:min(len(n.Addresses), maxList)]
		for j := range n.Addresses {
			tame(&n.Addresses[j])
		}
	}
	for i := range f.Rails {
		tame(&f.Rails[i].NIC)
		tame(&f.Rails[i].LinkLayer)
	}
	return f, nil
}

// tame shortens a string to maxText bytes, and replaces control characters by blanks. C1
// (U+0080 to U+009F) is included: U+009B starts a terminal's control sequence.
func tame(s *string) {
	text := strings.ToValidUTF8((*s)[:min(len(*s), maxText)], "")
	*s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
}
