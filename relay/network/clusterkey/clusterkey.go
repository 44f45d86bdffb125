// Package clusterkey derives keys of a cluster key: the uses of its parts, and the key of a tenant.
// It imports nothing of the handshake, because peerlane-hook, which is small, derives the keys of
// tenants.
package clusterkey

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

const (
	// Bytes is the length of a key's secret.
	Bytes = 32
	// IDBytes is the length of a key's id.
	IDBytes = 8
	// MaxTenant bounds a tenant's name, bytes.
	MaxTenant = 253
)

// Derive makes n bytes of a secret with HKDF-SHA256, for the purpose that label names.
func Derive(secret, salt []byte, label string, n int) []byte {
	derived, err := hkdf.Key(sha256.New, secret, salt, "peerlane network 1 "+label, n)
	if err != nil {
		panic(err) // of a length that no hash makes
	}
	return derived
}

// ID derives the id of a key, which does not tell the secret.
func ID(secret []byte) []byte { return Derive(secret, nil, "key id", IDBytes) }

// Tenant returns the text of a key file whose keys belong to one tenant of the cluster: HKDF
// derives the secrets from the cluster's secret and the tenant's name, so the same name gives the
// same keys on every host, and a tenant's keys reveal neither the cluster's keys nor the keys of a
// further tenant. Dates stay. text is as network.Keys.Text writes it; no error quotes a secret.
func Tenant(text []byte, name string) ([]byte, error) {
	if err := CheckTenant(name); err != nil {
		return nil, err
	}
	head, rest, ended := strings.Cut(string(text), "\n")
	if !ended || rest == "" {
		return nil, errors.New("derive a tenant's key: the cluster key's file has no key; copy the file again")
	}
	var derived bytes.Buffer
	derived.WriteString(head + "\n")
	for line := range strings.Lines(rest) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), " ") // name, id, date, secret
		var secret []byte
		err := errors.New("a line has not four words")
		if len(fields) == 4 {
			secret, err = base64.StdEncoding.Strict().DecodeString(fields[3])
		}
		if err != nil || len(secret) != Bytes || hex.EncodeToString(ID(secret)) != fields[1] {
			return nil, errors.New(
				"derive a tenant's key: the cluster key's file was changed or copied in part; copy the file again",
			)
		}
		own := Derive(secret, nil, "tenant "+name, Bytes)
		fmt.Fprintf(&derived, "%s %x %s %s\n", fields[0], ID(own), fields[2], base64.StdEncoding.EncodeToString(own))
	}
	return derived.Bytes(), nil
}

// CheckTenant refuses a name that a message cannot print.
func CheckTenant(name string) error {
	if name == "" || len(name) > MaxTenant ||
		strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf(
			"%.60q is no tenant's name: 1 to %d printable ASCII characters without blanks are possible",
			name,
			MaxTenant,
		)
	}
	return nil
}
