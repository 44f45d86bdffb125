package integration_test

import (
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/config"
)

// Two hosts with a shared cluster key, whose configuration names an annotation for tenants:
// containers of one tenant connect, containers of two tenants get the error that the keys differ,
// and a container without a tenant has no network.
func TestTenantsOfTwoHostsRefuseEachOther(t *testing.T) {
	const annotation = "example.com/tenant"
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			n := newNetworks(t)
			n.change = func(_ int, c *config.Config) { c.Network.TenantAnnotation = annotation }
			beds := hostsOn(t, n, runtimeName)
			start := func(host int, tenant string, role ...string) *container {
				beds[host].edit = func(b *bundle.Bundle) {
					if b.Spec.Annotations = map[string]string{annotation: tenant}; tenant == "" {
						b.Spec.Annotations = nil
					}
				}
				return beds[host].start(beds[host].lanes[host], role...)
			}
			listener := start(1, "red", "accept")
			handle := listener.next("listening").Handle
			connect := func(tenant string) (connected event) {
				t.Helper()
				c := start(0, tenant, "connects", "1")
				c.next("hello")
				c.send(event{Handle: handle})
				connected = c.next("connected")
				report := beds[0].inspection(c).Report
				if on := report != nil && report.Network != nil && report.Network.Listening != ""; on != (tenant != "") {
					t.Errorf("the relay of tenant %q is on the network: %v", tenant, on)
				}
				c.end()
				return connected
			}
			if c := connect("red"); c.Peer != "1" {
				t.Errorf("a connect within a tenant fails: %s", c.Error)
			}
			if c := connect("blue"); c.Peer != "0" || !strings.Contains(c.Error, `has the key of tenant "blue"`) ||
				!strings.Contains(c.Error, "tenants' keys differ (network.tenant_annotation)") {
				t.Errorf("a connect to another tenant says %q, and %s connections are made", c.Error, c.Peer)
			}
			if c := connect(""); c.Peer != "0" || !strings.Contains(c.Error, "no annotation "+annotation) {
				t.Errorf("a connect without a tenant says %q, and %s connections are made", c.Error, c.Peer)
			}
		})
	}
}
