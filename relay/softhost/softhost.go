// Package softhost gives relays of tests software devices as NICs, and the network of a host:
// staged data between two relays goes by transport verbs.
package softhost

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// KeyVariable is the environment variable with the cluster key of the tests' relays.
const KeyVariable = "PEERLANE_TEST_CLUSTER_KEY"

// NewKey returns a new cluster key as text.
func NewKey() string { return string(network.Keys{Current: network.NewKey(time.Now())}.Text()) }

// Secrets returns the secrets of a relay with a cluster key.
func Secrets(key string) launch.Secrets {
	return launch.Secrets{ClusterKey: launch.NewSecret([]byte(key))}
}

// Devices returns a software device with an address per name. With holds, a device delays writes
// into GPU memory until a read of that memory, as a NIC may before a flush.
func Devices(holds bool, names ...string) (list []softdevice.Device) {
	for i, name := range names {
		list = append(list, softdevice.Device{Name: name, GUID: uint64(i + 1), Address: fmt.Sprintf("10.0.0.%d", i+1),
			Holds: holds})
	}
	return list
}

// Use makes a host with software devices in a directory, for this process and child processes.
func Use(dir string, names ...string) error {
	h, err := softdevice.New(dir, Devices(false, names...)...)
	if err != nil {
		return err
	}
	return errors.Join(h.Open(), os.Setenv(verbs.LibraryVariable, h.Library()),
		os.Setenv(verbs.SoftwareVariable, verbs.SoftwareAllowed), os.Setenv(KeyVariable, NewKey()))
}

// Network returns the network of relays on the loopback interface.
func Network() *launch.Network {
	return &launch.Network{
		Addresses: []address.Chosen{{Interface: "lo", Address: netip.MustParseAddr("127.0.0.1")}},
		Ports:     address.Ports{First: 20000, Last: 29999}, Streams: 2,
		Slots: 4, SlotBytes: 256 << 10, Memory: 64 << 20,
	}
}

// Configure enables network and RDMA of a relay.
func Configure(c *launch.Config) {
	v := launch.DefaultVerbs
	v.QueuePairs, v.Timeout = 1, 14 // 0.5 s with 7 retries
	c.Verbs, c.Network = &v, Network()
}

// Join gives a relay the cluster key of the environment, if there is one. Call Join before the
// relay's Configure.
func Join(secrets func(launch.Secrets) error) error {
	key := os.Getenv(KeyVariable)
	if key == "" {
		return nil
	}
	return secrets(Secrets(key))
}
