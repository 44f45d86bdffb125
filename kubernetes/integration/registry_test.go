//go:build cluster

package integration

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"testing"
	"time"
)

// registry is the address of the cluster's registry of images, on the first node.
const registry = "10.213.0.1:15000"

// startRegistry starts a registry of images with TLS, for pushes and for the engines of all nodes. Its
// certificate is registry.crt.
func (c *cluster) startRegistry() {
	c.Helper()
	host, _, err := net.SplitHostPort(registry)
	if err != nil {
		c.Fatal(err)
	}
	writeCertificate(c.T, c.in("registry.crt"), c.in("registry.key"), net.ParseIP(host))
	configuration := c.expand(`version: 0.1
storage: {filesystem: {rootdirectory: $DIR/registry}}
http: {addr: "` + registry + `", tls: {certificate: $DIR/registry.crt, key: $DIR/registry.key}}
`)
	if err := os.WriteFile(c.in("registry.yaml"), []byte(configuration), 0o644); err != nil {
		c.Fatal(err)
	}
	c.daemon("registry", func() error {
		conn, err := tls.Dial("tcp", registry, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		return conn.Close()
	}, "docker-registry", "serve", c.in("registry.yaml"))
}

// writeCertificate writes a self-signed certificate of an address, and its key.
func writeCertificate(t *testing.T, certificate, key string, address net.IP) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{address}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		os.WriteFile(certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644),
		os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600),
	); err != nil {
		t.Fatal(err)
	}
}
