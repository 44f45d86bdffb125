package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo/planner"
)

// secondCable adds a second link between the hosts, in another network: plrail0 and plrail1,
// 10.212.0.1 and 10.212.0.2.
func (n *networks) secondCable() {
	n.Helper()
	n.must("ip", "link", "add", "plrail0", "netns", n.names[0], "type", "veth", "peer", "name", "plrail1", "netns",
		n.names[1])
	for i := range n.names {
		cable := fmt.Sprintf("plrail%d", i)
		n.in(i, "ip", "address", "add", fmt.Sprintf("10.212.0.%d/24", i+1), "dev", cable)
		n.in(i, "ip", "link", "set", cable, "up")
	}
	n.change = func(host int, c *config.Config) { c.Network.Interfaces += fmt.Sprintf(",plrail%d", host) }
}

// sent returns the bytes sent by an interface of a host, from the kernel's counter.
func (n *networks) sent(host int, name string) uint64 {
	n.Helper()
	var links []struct {
		Stats64 struct {
			TX struct{ Bytes uint64 } `json:"tx"`
		} `json:"stats64"`
	}
	text := n.output("ip", "netns", "exec", n.names[host], "ip", "-s", "-j", "link", "show", "dev", name)
	if err := json.Unmarshal([]byte(text), &links); err != nil || len(links) != 1 {
		n.Fatalf("%s: %v", text, err)
	}
	return links[0].Stats64.TX.Bytes
}

// railed has two hosts with two links, and a container on each host.
type railed struct {
	*networks
	beds           [2]*bed
	verifier, echo *container
	bytes          uint64 // bytes of each verification
}

// newRailed creates hosts whose lanes use only the second cable, or both cables.
func newRailed(t *testing.T, both bool, role ...string) *railed {
	t.Helper()
	r := &railed{networks: newNetworks(t)}
	r.secondCable()
	r.beds = hostsOn(t, r.networks, "runc")
	for i, b := range r.beds {
		lane, configured := b.lanes[i], b.Config
		if err := b.Configure(func(c *config.Config) {
			if *c = configured; both {
				return // this machine has no NIC of the plan
			}
			c.Plan.Lanes = []planner.Assignment{{GPU: lane.GPU, Kind: lane.Kind, Servers: lane.Servers,
				NICs: []string{fmt.Sprintf("plrail%d", i)}}}
		}); err != nil {
			t.Fatal(err)
		}
	}
	r.verifier = r.beds[0].start(r.beds[0].lanes[0], append([]string{"verify"}, role...)...)
	r.echo = r.beds[1].start(r.beds[1].lanes[1], append([]string{"echo"}, role...)...)
	for _, bytes := range echoed {
		r.bytes += bytes
	}
	return r
}

// verify connects the containers, and requires that all data uses the given link of the first host.
func (r *railed) verify(used, other string) {
	r.Helper()
	before, idle := r.sent(0, used), r.sent(0, other)
	one, two := r.verifier.next("listening").Handle, r.echo.next("listening").Handle
	r.verifier.send(event{Handle: two})
	r.echo.send(event{Handle: one})
	r.verifier.next("verified")
	if got := r.sent(0, used) - before; got < r.bytes {
		r.Errorf("%d bytes went by %s of %d", got, used, r.bytes)
	}
	if got := r.sent(0, other) - idle; got > 64<<10 {
		r.Errorf("%d bytes went by %s", got, other)
	}
}

// rails returns the first host's rails from inspect.
func (r *railed) rails() map[string]launch.NetworkRail {
	r.Helper()
	found := map[string]launch.NetworkRail{}
	for _, rail := range r.beds[0].inspection(r.verifier).Report.Network.Rails {
		found[rail.Interface] = rail
	}
	return found
}

// With two links between two hosts, messages use the link of the lanes. If that link is down, new
// connections use the other link, through the same relays.
func TestRailsOfTwoHostsFollowLanes(t *testing.T) {
	r := newRailed(t, false, once)
	r.verify("plrail0", "plnet0")
	if rails := r.rails(); rails["plrail0"].Sent < r.bytes || rails["plrail0"].Down || rails["plrail0"].Listening == "" ||
		rails["plnet0"].Sent > 64<<10 {
		t.Errorf("inspect shows %+v", rails)
	}
	if table := r.beds[0].mustPeerlane("relay", "inspect", r.verifier.id); !strings.Contains(table,
		"rail 1, listening at 10.212.0.1:") {
		t.Errorf("inspect shows no rail: %s", table)
	}

	for _, c := range []*container{r.verifier, r.echo} {
		c.next("listening") // no operation is under way
	}
	r.in(1, "ip", "link", "set", "plrail1", "down")
	for _, c := range []*container{r.verifier, r.echo} {
		c.send(event{}) // asks for a new handle
	}
	r.verify("plnet0", "plrail0")
}

// Operations on a failing rail end with an error that names the rail, on both hosts, and new
// connections use the other rail. The timeout is long, so `make soak-network` runs this test.
func TestRailUnpluggedMovesConnections(t *testing.T) {
	if os.Getenv("PEERLANE_NETWORK_FAULTS") == "" {
		t.Skip("waits for heartbeats; make soak-network runs it")
	}
	r := newRailed(t, false)
	r.verify("plrail0", "plnet0")
	for _, c := range r.beds[0].inspection(r.verifier).Report.Connections {
		if len(c.Rails) != 1 || c.Rails[0] != (launch.RailFigures{Rail: 1, Interface: "plrail0", PeerRail: 1,
			PeerPlace: "plrail1 (10.212.0.2)", Streams: 4}) || c.GDR || !strings.Contains(c.Registration, "pinned") {
			t.Errorf("inspect shows %+v", c)
		}
		for _, words := range []string{"plrail0, rail 1", "tcp", "plrail1 (10.212.0.2), rail 1"} {
			if !strings.Contains(c.Path, words) {
				t.Errorf("the path %q has no %q", c.Path, words)
			}
		}
	}
	pulled := time.Now()
	r.in(1, "ip", "link", "set", "plrail1", "down")
	r.verifier.mustLearn(pulled, r.echo.id, "10.212.0.2", "by plrail0")
	r.echo.mustLearn(pulled, r.verifier.id, "10.212.0.1", "by plrail1")
	r.verify("plnet0", "plrail0")
	if rails := r.rails(); !rails["plrail0"].Down || rails["plnet0"].Down || rails["plnet0"].Sent < r.bytes {
		t.Errorf("with the cable pulled inspect shows %+v", rails)
	}
}

// As before, with lanes that use both rails: messages are striped over both links, and the control
// connection uses the other link.
func TestOneOfTwoRailsIsPulled(t *testing.T) {
	if os.Getenv("PEERLANE_NETWORK_FAULTS") == "" {
		t.Skip("waits for heartbeats; make soak-network runs it")
	}
	r := newRailed(t, true)
	one, two := r.verifier.next("listening").Handle, r.echo.next("listening").Handle
	r.verifier.send(event{Handle: two})
	r.echo.send(event{Handle: one})
	r.verifier.next("verified")
	if a, b := r.sent(0, "plnet0"), r.sent(0, "plrail0"); a < r.bytes/16 || b < r.bytes/16 {
		t.Errorf("%d and %d bytes went by the two cables", a, b)
	}
	pulled := time.Now()
	r.in(1, "ip", "link", "set", "plrail1", "down")
	r.verifier.mustLearn(pulled, r.echo.id, "10.212.0.2", "rail 1") // the side that reports first
	r.echo.mustLearn(pulled, r.verifier.id, "10.212.0.1", "rail 1")
	r.verify("plnet0", "plrail0")
}
