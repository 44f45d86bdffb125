package network

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/network/clusterkey"
	"github.com/peerlane/peerlane/relay/wire"
)

// tenants are the keys of a tenant, as a supervisor makes them of a cluster's key file.
func tenants(t *testing.T, cluster Keys, name string) Keys {
	t.Helper()
	text, err := clusterkey.Tenant(cluster.Text(), name)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ParseKeys(text)
	if err != nil {
		t.Fatalf("%v in the file of tenant %s", err, name)
	}
	return keys
}

// Hosts derive the same key from a tenant's name, and a different key for a different name or
// cluster, also during a rotation of the cluster key.
func TestTenantKeysDifferByNameAndCluster(t *testing.T) {
	cluster := rotated(t, Keys{Current: NewKey(someDay)})
	if a := tenants(t, cluster, "a"); !bytes.Equal(a.Text(), tenants(t, cluster, "a").Text()) || a.Previous == nil ||
		!a.Current.Created.Equal(cluster.Current.Created) {
		t.Errorf("tenant a has %v, of %v", a, cluster)
	}
	before := Keys{Current: *cluster.Previous} // of a host that has not been told of the rotation
	if old := tenants(t, before, "a").Current.ID; old != tenants(t, cluster, "a").Previous.ID {
		t.Errorf("the rotation loses key %v of a tenant", old)
	}
	seen := map[KeyID]string{cluster.Current.ID: "the cluster", cluster.Previous.ID: "the cluster"}
	for _, name := range []string{"a", "b", "aa", "a/b", strings.Repeat("n", clusterkey.MaxTenant)} {
		keys := tenants(t, cluster, name)
		for _, key := range keys.all() {
			if other, is := seen[key.ID]; is {
				t.Errorf("%.10s and %s have one key", name, other)
			}
			seen[key.ID] = name
		}
	}
	if tenants(t, Keys{Current: NewKey(someDay)}, "a").Current.ID == tenants(t, cluster, "a").Current.ID {
		t.Error("two clusters give tenant a one key")
	}
}

func TestTenantKeyOfBadFileOrNameFails(t *testing.T) {
	good := Keys{Current: NewKey(someDay)}.Text()
	changed := bytes.Replace(good, []byte("current "), []byte("current 0"), 1)
	for name, text := range map[string][]byte{"": good, "two words": good, "tab\t": good, "e\x1b": good,
		strings.Repeat("n", clusterkey.MaxTenant+1): good,
		"empty": nil, "head": []byte("peerlane cluster key 1\n"), "part": good[:len(good)-9], "changed": changed} {
		if made, err := clusterkey.Tenant(text, name); err == nil {
			t.Errorf("tenant %.20q gets %d bytes", name, len(made))
		} else if secret := bytes.Fields(good)[7]; strings.Contains(err.Error(), string(secret)) {
			t.Error("the error tells the secret")
		}
	}
}

// Relays of two tenants refuse connections: a relay cannot open a foreign tenant's handle, and a
// relay that connects nevertheless is a stranger. Nor is the cluster key a tenant's.
func TestRelaysOfTwoTenantsRefuseEachOther(t *testing.T) {
	cluster := newKeys()
	keys := map[string]Keys{"the cluster": cluster, "a": tenants(t, cluster, "a"), "b": tenants(t, cluster, "b")}
	for from, one := range keys {
		for to, other := range keys {
			a, b := relays(one)
			b.Keys = func() Keys { return other }
			target, generation := Target{Host: b.Host, Token: wire.UUID{1}}, wire.UUID{2}
			if _, err := one.OpenContact(target, generation, other.SealContact(target, generation,
				address.Endpoint{})); errors.Is(
				err,
				ErrOtherKey,
			) != (from != to) {
				t.Errorf("%s opens a handle of %s: %v", from, to, err)
			}
			here, there := net.Pipe()
			refused := make(chan error, 1)
			go func() {
				_, err := b.Respond(there, admitB)
				there.Close()
				refused <- err
			}()
			_, err := a.Initiate(here, toB)
			here.Close()
			theirs := <-refused
			if (err == nil) != (from == to) || errors.Is(theirs, ErrStranger) != (from != to) {
				t.Errorf("%s connects to %s: %v, and there %v", from, to, err, theirs)
			}
		}
	}
}
