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
	"os/exec"
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
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// promised is the limit for an error about an unresponsive relay: 6 s for RDMA (docs/network.md),
// times ten in a guest.
const promised = 10 * 6 * time.Second

// reconnecting is the limit in which the relays wait for a port: more than ten times what a
// recovery takes, and less than the default, for the time of the test.
const reconnecting = 20 * time.Second

// die is the order that kills a bare host, like the death of a relay.
const die = "die"

// beBareHost is `TEST bare GUEST KEY`: a relay and its client without a container. Control uses
// rail 0 and data the NIC of rail 1, with the configuration's defaults except reconnecting.
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
		*c.Verbs = launch.DefaultVerbs
		c.Verbs.ReconnectLimit = int(reconnecting.Seconds())
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
func TestFaultsOverRoCEEndOperationsWithErrors(t *testing.T) {
	p, begin := bareHosts(t, inside.RoCE)
	flow := func(t *testing.T) {
		t.Helper()
		// rxe retransmits after 67 ms without an acknowledgement, and at times wrongly: keep few
		// bytes in flight.
		p.exchange(0, 8<<10)
	}
	learn := func(t *testing.T, guest int, begun time.Time, limit time.Duration) string {
		t.Helper()
		failure := p.mustFail(guest)
		took := time.Since(begun)
		t.Logf("guest %d learnt after %v", guest, took.Round(time.Millisecond))
		if took > limit {
			t.Errorf("guest %d learnt after %v, limit %v", guest, took, limit)
		}
		return failure
	}
	port := func(t *testing.T, state string) {
		t.Helper()
		inside.Eventually(t, "mlx5_1's port is "+state, func() (bool, string) {
			got := inside.Port(t, "mlx5_1", "state")
			return strings.HasSuffix(got, state), got
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
		if failure := p.both[0].errors.String(); !strings.Contains(failure, own+", RoCE v2) is no longer an address") {
			t.Errorf("the relay does not log the change of its address: %s", failure)
		}
	})
	p.run(t, "the cable of the NIC", func(t *testing.T) {
		flow(t)
		begun := time.Now()
		inside.Plug(t, "rail1", false)
		if failure := learn(t, 0, begun, reconnecting+promised) +
			learn(t, 1, begun, reconnecting+promised); !strings.Contains(failure, "RDMA") ||
			!strings.Contains(failure, "mlx5_1") {
			t.Errorf("the failure of mlx5_1 is not logged: %s", failure)
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
	addresses, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(addresses, func(a netlink.Addr) bool { return a.IP.String() == own })
	if i < 0 {
		t.Fatalf("%s has %v, and not %s", card, addresses, own)
	}
	address := func(ip net.IP) *netlink.Addr {
		return &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: addresses[i].Mask}}
	}
	oldAddress := address(addresses[i].IP)
	newAddress := address(slices.Clone(addresses[i].IP.To4()))
	newAddress.IP[3] += 100
	// If the first address of a network is deleted, the kernel deletes the second too. Meanwhile
	// the port has only a link-local GID, which is unreachable.
	change := func(from, to *netlink.Addr) error {
		return errors.Join(netlink.AddrDel(link, from), netlink.AddrAdd(link, to))
	}
	t.Cleanup(func() {
		if err := change(newAddress, oldAddress); err != nil {
			t.Error(err)
		}
	})
	if err := change(oldAddress, newAddress); err != nil {
		t.Fatal(err)
	}
	return newAddress.IP.String()
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

// Packets for a stopped host wait in the card, and queue pairs end nevertheless; the packets leave
// after the end of their queue pair. Without integration/vm/module/destroy.patch each of the four
// queue pairs takes 50 s, and the kernel panics in rxe_skb_tx_dtor as the host goes on.
func TestQueuePairsWithWaitingPacketsEnd(t *testing.T) {
	const port, limit = 18531, 40 * time.Second // measured: 1 to 610 ms
	other := rdma(t, inside.RoCE)
	known(t)
	program := []string{"ib_write_bw", "-d", "mlx5_1", "-x", "1", "-p", strconv.Itoa(port), "-s", "65536", "-q", "4",
		"-t", "16", "-u", "20", "-D", "120", "-F"}
	start(t, other, program...)
	listens(t, other, port)
	client := exec.CommandContext(t.Context(), program[0], append(program[1:], wiring.Address(0, 1))...)
	var output lines
	client.Stdout, client.Stderr = &output, &output
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	inside.Eventually(t, "perftest sends", func() (bool, string) {
		sent, _ := packets(t, "mlx5_1")
		return sent > 1000, fmt.Sprint(sent, " packets; ", output.String())
	})
	goOn := inside.StopOther(t)
	waiting := func() int {
		text, err := os.ReadFile("/sys/class/net/rail1/queues/tx-0/byte_queue_limits/inflight")
		if err != nil {
			t.Fatal(err)
		}
		bytes, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	end := testutil.Begin()
	for last, since := -1, time.Now(); time.Since(since) < time.Second; time.Sleep(20 * time.Millisecond) {
		if count := waiting(); count != last {
			last, since = count, time.Now()
		}
		if end.Over() {
			t.Fatalf("the number of waiting bytes still changes: %d", last)
		}
	}
	if waiting() == 0 {
		t.Fatal("no packet waits in the card")
	}
	begun := time.Now()
	if err := client.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = client.Wait() // killed
	took := time.Since(begun)
	t.Logf("%d bytes wait in the card; the queue pairs ended within %v", waiting(), took.Round(time.Millisecond))
	if took > limit {
		t.Errorf("the queue pairs ended after %v, limit %v", took, limit)
	}
	goOn()
	inside.Eventually(t, "no packet waits in the card", func() (bool, string) {
		count := waiting()
		return count == 0, fmt.Sprint(count, " bytes")
	})
}
