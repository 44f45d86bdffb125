package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/topo/planner"
)

// softwareDir returns the directory of the software devices, which relays write to.
func (h *Host) softwareDir() string { return filepath.Join(h.Root, "rdma") }

// EnginePID returns the process id of the software devices; 0 before StartNICs.
func (h *Host) EnginePID() int {
	if h.engine == nil || len(h.engine.started) == 0 {
		return 0
	}
	return h.engine.started[0].Process.Pid
}

// Software reports whether the configuration has software devices.
func (h *Host) Software() bool { return h.rdma != nil }

// chooseNICs makes the NICs of the plan software devices if the route of the configuration is
// staged and the configuration names neither another transport nor networks.
func (h *Host) chooseNICs(c *config.Config) error {
	if text, err := os.ReadFile(h.Layout.ClusterKey()); h.rdma != nil && err == nil && bytes.Equal(text, h.key) {
		if err := os.Remove(h.Layout.ClusterKey()); err != nil { // relays without NICs use no network
			return err
		}
	}
	h.rdma = nil
	verbs := c.Relay.Transport == launch.TransportAuto || c.Relay.Transport == launch.TransportVerbs
	if c.Relay.Route != launch.RouteStaged || !verbs || c.Network.Interfaces != "" {
		return nil
	}
	return h.useSoftwareDevices(c)
}

// useSoftwareDevices makes relays find software devices in place of those of rdma-core, and use
// transport verbs between two containers of this host, with a private cluster key. On real GPUs
// the data goes through GPU memory after a test of GPUs and NICs, as on a host with NICs.
func (h *Host) useSoftwareDevices(c *config.Config) error {
	// A relay cannot write the file of the library.
	library := filepath.Join(h.Root, "rdma-library")
	// A process of the previous configuration may still use the files.
	if err := errors.Join(os.RemoveAll(h.softwareDir()), os.RemoveAll(library), os.MkdirAll(library, 0o755)); err != nil {
		return err
	}
	rdma, err := softdevice.New(h.softwareDir())
	if err != nil {
		return err
	}
	environment, err := rdma.Apart(library)
	if err == nil {
		err = rdma.Open()
	}
	if err != nil {
		return err
	}
	h.rdma = &rdma
	h.key = network.Keys{Current: network.NewKey(time.Now())}.Text()
	if err := os.WriteFile(h.Layout.ClusterKey(), h.key, 0o600); err != nil {
		return err
	}
	c.Relay.Environment = append(slices.Clone(c.Relay.Environment), environment...)
	c.Relay.SandboxWrite = append(slices.Clone(c.Relay.SandboxWrite), rdma.Dir)
	c.Relay.Transport = launch.TransportVerbs
	if !h.Simulated {
		c.Relay.SelfTest = launch.SelfTestOnce
	}
	c.Network.Interfaces, c.Network.Family = "=lo", "ipv4"
	return nil
}

// SetPort sets the state of a software device's port.
func (h *Host) SetPort(name string, down bool) error {
	if down {
		h.down = append(slices.Clone(h.down), name)
	} else {
		h.down = slices.DeleteFunc(slices.Clone(h.down), func(n string) bool { return n == name })
	}
	return h.setSoftwareDevices()
}

// setSoftwareDevices configures the NICs of the plan's lanes as software devices.
func (h *Host) setSoftwareDevices() error {
	var names []string
	for _, l := range h.Plan.Lanes {
		names = append(names, l.NICs...)
	}
	slices.Sort(names)
	var devices []softdevice.Device
	for i, name := range slices.Compact(names) {
		devices = append(devices, softdevice.Device{
			Name: name, GUID: uint64(i + 1), Address: fmt.Sprintf("192.0.2.%d", i+1), Peermem: "yes", Rate: uint64(h.Pace * 1e9),
			Down: slices.Contains(h.down, name),
		})
	}
	return h.rdma.Set(devices...)
}

// verify tests the pairs and triples of GPUs and NICs that relays of some lanes can use, like
// supervisors at the start of a relay, and returns the results of the triples. A connection uses
// GPU memory for NICs only if the results exist before.
func (h *Host) verify(ctx context.Context, of []planner.Lane) ([]launch.Triple, error) {
	var names []string
	for _, l := range of {
		if l.Relay {
			names = append(names, "@"+l.GPU)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	planned, err := lanes.Find(h.Plan, names)
	if err != nil {
		return nil, err
	}
	lanes.AddSpares(h.Plan, planned, h.Config.Plan.Exclude.Pairs)
	tester, err := selftest.NewTester(h.Layout, h.Config, h.HookBinary())
	if err != nil {
		return nil, err
	}
	if err := tester.Test(ctx, launch.StagingPairs(planned), false, func(launch.PairHost, launch.Pair) {}); err != nil {
		return nil, err
	}
	// Test the lanes of the relays separately: together they would be lanes of one container.
	var triples []launch.TripleName
	for i := range planned {
		for _, n := range launch.StagingTriples(planned[i : i+1]) {
			if !launch.ContainsTriple(triples, n) {
				triples = append(triples, n)
			}
		}
	}
	var found []launch.Triple
	err = tester.TestTriples(ctx, triples, nil, false, func(t launch.Triple) { found = append(found, t) })
	return found, err
}
