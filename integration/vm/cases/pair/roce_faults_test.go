//go:build vm

package pair_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/integration/across"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/relay/launch"
)

// promised is the limit for an error about an unresponsive relay: 6 s for RDMA (docs/network.md),
// times ten in a guest.
const promised = 10 * 6 * time.Second

// reconnecting is the default of verbs.reconnect_limit, in which relays wait for a port.
const reconnecting = time.Minute

// die is the order that kills a bare host, like the death of a relay.
const die = "die"

// beBareHost is `TEST bare GUEST KEY`: a relay and its client without a container. Control uses
// rail 0 and data the NIC of rail 1, with the configuration's default timeouts.
func beBareHost(guest, key string) error {
	number, err := strconv.Atoi(guest)
	if err != nil {
		return err
	}
	secret, err := os.ReadFile(key)
	if err != nil {
		return err
	}
	s, err := begin(context.Background(), number, string(secret), launch.TransportVerbs, func(c *launch.Config) {
		c.Lanes[0].NICs, c.Verbs = []string{"mlx5_1"}, &launch.Verbs{}
		*c.Verbs = launch.DefaultVerbs // timeout 14, 7 retries
	})
	if err != nil {
		return err
	}
	text, err := json.Marshal(hostLine{Line: across.Line{Kind: running}, Container: fmt.Sprint("guest", guest)})
	if err != nil {
		return err
	}
	fmt.Println(string(text))
	orders, passed := io.Pipe()
	go func() { passed.CloseWithError(passUntilDeath(os.Stdin, passed)) }()
	return errors.Join(across.Serve(orders, os.Stdout, filepath.Join(s.dir, "clients.sock")), s.end())
}

// passUntilDeath forwards orders until the input ends or an order to die.
func passUntilDeath(from io.Reader, to io.Writer) error {
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		var o across.Order
		err := json.Unmarshal(lines.Bytes(), &o)
		if err == nil && o.Do == die {
			err = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		if err == nil {
			_, err = to.Write(append(lines.Bytes(), '\n'))
		}
		if err != nil {
			return err
		}
	}
	return lines.Err()
}

// bareHosts returns relays without containers, over NICs of a kind; begin restarts a relay.
func bareHosts(t *testing.T, kind string) (p *hosts, begin func(guest int)) {
	t.Helper()
	p = &hosts{T: t, other: rdma(t, kind)}
	known(t)
	key := clusterKey(t)
	begin = func(guest int) {
		h := startHost(t, guest, p.other, "bare", fmt.Sprint(guest), key)
		p.both[guest] = h
		h.isUp()
	}
	for guest := range p.both {
		begin(guest)
	}
	t.Cleanup(func() {
		for guest, h := range p.both {
			h.end()
			if t.Failed() {
				t.Logf("guest %d said:\n%s", guest, h.errors.String())
			}
		}
	})
	return p, begin
}

// anew waits until the relay of the first guest has logged the given number of reconnects of queue
// pairs, with words about the NICs or the fault.
func (p *hosts) anew(times int, words string) {
	p.Helper()
	inside.Eventually(p.T, "the queue pairs reconnect", func() (bool, string) {
		text, n := p.both[0].errors.String(), 0
		for line := range strings.Lines(text) {
			if strings.Contains(line, "RDMA has reconnected, ") && strings.Contains(line, words) {
				n++
			}
		}
		return n >= times, text
	})
}

// Faults of a NIC, of the control connection, of a relay and of a host during RDMA transfers end
// every operation of both clients with an error that names the fault; after the fault ends, the
// same relays exchange data again.
func TestFaultsOverRoCE(t *testing.T) {
	heavy(t)
	p, begin := bareHosts(t, inside.RoCE)
	flow := func(t *testing.T) {
		t.Helper()
		// rxe retransmits after 67 ms without an acknowledgement, and at times wrongly: keep few
		// bytes in flight.
		p.exchange(0, 8<<10)
	}
	learn := func(t *testing.T, guest int, begun time.Time, limit time.Duration) string {
		t.Helper()
		said := p.mustFail(guest)
		took := time.Since(begun)
		t.Logf("guest %d learnt after %v", guest, took.Round(time.Millisecond))
		if took > limit {
			t.Errorf("guest %d learnt after %v, limit %v", guest, took, limit)
		}
		return said
	}
	port := func(t *testing.T, state string) {
		t.Helper()
		inside.Eventually(t, "mlx5_1's port is "+state, func() (bool, string) {
			is := inside.Port(t, "mlx5_1", "state")
			return strings.HasSuffix(is, state), is
		})
	}
	p.run(t, "the cable of the NIC, soon back", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		inside.Plug(t, "rail1", false)
		port(t, "DOWN")
		inside.Plug(t, "rail1", true)
		p.finish()
		t.Logf("recovered after %v", time.Since(begun).Round(time.Millisecond))
	})
	p.run(t, "another GID", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		own, other := wiring.Address(1, 0), readdress(t, "rail1", wiring.Address(1, 0))
		p.anew(1, other+", RoCE v2)")
		t.Logf("recovered after %v", time.Since(begun).Round(time.Millisecond))
		p.finish()
		if said := p.both[0].errors.String(); !strings.Contains(said, own+", RoCE v2) is no longer an address") {
			t.Errorf("the relay does not log the change of its address: %s", said)
		}
	})
	p.run(t, "the cable of the NIC", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		inside.Plug(t, "rail1", false)
		if said := learn(t, 0, begun, reconnecting+promised) +
			learn(t, 1, begun, reconnecting+promised); !strings.Contains(said, "RDMA") ||
			!strings.Contains(said, "mlx5_1") {
			t.Errorf("the failure of mlx5_1 is not logged: %s", said)
		}
		inside.Plug(t, "rail1", true)
		port(t, "ACTIVE")
	})
	p.run(t, "the cable of what the relays say", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		inside.Plug(t, "rail0", false)
		learn(t, 0, begun, promised)
		learn(t, 1, begun, promised)
		inside.Plug(t, "rail0", true)
		known(t)
	})
	p.run(t, "the host", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		// A switch drops packets for an absent host. Here they would wait in this guest's card, and
		// rxe panics when it destroys a queue pair with waiting packets.
		inside.Disturb(t, "rail1", netlink.NetemQdiscAttrs{Loss: 100})
		goOn := inside.StopOther(t)
		learn(t, 0, begun, promised)
		goOn()
		learn(t, 1, time.Now(), promised)
	})
	p.run(t, "the relay", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		p.both[1].order(across.Order{Do: die})
		learn(t, 0, begun, promised)
		p.both[1].killed()
		begin(1)
	})
	p.run(t, "nothing more", func(t *testing.T) {
		flow(t)
		p.finish()
	})
}

// readdress replaces the address of a card by another address of the network until the test ends.
func readdress(t *testing.T, card, own string) (other string) {
	t.Helper()
	link, err := netlink.LinkByName(card)
	if err != nil {
		t.Fatal(err)
	}
	have, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(have, func(a netlink.Addr) bool { return a.IP.String() == own })
	if i < 0 {
		t.Fatalf("%s has %v, and not %s", card, have, own)
	}
	address := func(ip net.IP) *netlink.Addr { return &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: have[i].Mask}} }
	was := address(have[i].IP)
	is := address(slices.Clone(have[i].IP.To4()))
	is.IP[3] += 100
	// If the first address of a network is deleted, the kernel deletes the second too. Meanwhile
	// the port has only a link-local GID, which is unreachable.
	change := func(from, to *netlink.Addr) error {
		return errors.Join(netlink.AddrDel(link, from), netlink.AddrAdd(link, to))
	}
	t.Cleanup(func() {
		if err := change(is, was); err != nil {
			t.Error(err)
		}
	})
	if err := change(was, is); err != nil {
		t.Fatal(err)
	}
	return is.IP.String()
}

// killed waits for the end of a killed host.
func (h *host) killed() {
	h.Helper()
	go func() {
		for range h.lines {
		}
	}()
	select {
	case err := <-h.ended:
		if err == nil {
			h.Errorf("host %d ended well: %s", h.guest, h.errors.String())
		}
	case <-time.After(longest):
		h.Fatalf("host %d does not die: %s", h.guest, h.errors.String())
	}
}

// heavy skips a test of the long run: such tests have crashed rxe in emulated guests.
func heavy(t *testing.T) {
	t.Helper()
	if os.Getenv("PEERLANE_VM_HEAVY") == "" {
		t.Skip("the emulated guests' rxe may go down under it; make vm-long runs it")
	}
}
