//go:build vm

package pair_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
)

// exchanged runs a relay in each guest, which exchange the messages, and returns the output. Each
// relay has a separate process, because librdmacm keeps a siw device open during the life of a
// process.
func exchanged(t *testing.T, other *control.Client, transport string) (outputs [wiring.Guests]string) {
	t.Helper()
	known(t)
	ctx, cancel := context.WithTimeout(t.Context(), exchangeTimeout)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var orders [wiring.Guests]io.WriteCloser
	var outs [wiring.Guests]*lines
	ended := make(chan error, wiring.Guests)
	for guest := range wiring.Guests {
		in, to := io.Pipe()
		out := &lines{}
		orders[guest], outs[guest] = to, out
		argv := []string{self, "relay", fmt.Sprint(guest), transport}
		go func() {
			var err error
			if guest == 0 {
				c := exec.CommandContext(ctx, argv[0], argv[1:]...)
				c.Stdin, c.Stdout, c.Stderr = in, out, out
				c.WaitDelay = time.Second
				err = c.Run()
			} else {
				err = other.Run(ctx, control.Command{Argv: argv}, in, out, out)
			}
			in.CloseWithError(io.ErrClosedPipe)
			if err != nil {
				err = fmt.Errorf("the relay of guest %d: %w", guest, err)
			}
			ended <- err
		}()
	}
	sendTo := func(guest int, text string) {
		if _, err := fmt.Fprintln(orders[guest], text); err != nil {
			t.Fatalf("the relay of guest %d: %v\n%s\n%s", guest, err, outs[0], outs[1])
		}
	}
	key := network.Keys{Current: network.NewKey(time.Now())}.Text()
	var handles [wiring.Guests]string
	for guest := range wiring.Guests {
		sendTo(guest, fmt.Sprintf("%x", key))
	}
	for guest := range wiring.Guests {
		inside.Eventually(t, "the relays listen", func() (bool, string) {
			text := outs[guest].String()
			handle, ok := handleIn(text)
			handles[guest] = handle
			return ok, text
		})
	}
	began := time.Now()
	for guest := range wiring.Guests {
		sendTo(guest, handles[wiring.Guests-1-guest])
		orders[guest].Close()
	}
	for range wiring.Guests {
		if err := <-ended; err != nil {
			cancel() // end the second guest's wait
			t.Error(err)
		}
	}
	for guest := range wiring.Guests {
		outputs[guest] = outs[guest].String()
		t.Logf("the messages took %v; guest %d says:\n%s", time.Since(began), guest, outputs[guest])
	}
	return outputs
}

// Two relays, one per guest, exchange messages of many sizes over iWARP: the connection manager
// creates two queue pairs on each of two NICs, and a message follows each write.
func TestRelaysOverIWARPExchange(t *testing.T) {
	other := rdma(t, inside.IWARP)
	for guest, out := range exchanged(t, other, launch.TransportVerbs) {
		for i, nic := range []string{"mlx5_0", "mlx5_1"} {
			want := fmt.Sprintf("%s (%s, iWARP by RDMA CM) and %s (%s)", nic, wiring.Address(i, guest), nic,
				wiring.Address(i, wiring.Guests-1-guest))
			if !strings.Contains(out, "data goes over verbs: ") || !strings.Contains(out, want) {
				t.Errorf("guest %d says nothing of %q", guest, want)
			}
		}
	}
}

// After the connection of an iWARP queue pair ends during a transfer, the relays replace every
// queue pair, and each message arrives once.
func TestFaultsOverIWARPLoseNoMessage(t *testing.T) {
	p, _ := bareHosts(t, inside.IWARP)
	for round := range 2 {
		p.run(t, fmt.Sprintf("a connection that ends, %d", round), func(t *testing.T) {
			p.exchange(0, 64<<10)
			begun := time.Now()
			cutOne(t, wiring.Address(1, 0))
			// the error names the connection, or an operation posted meanwhile, depending on the
			// order
			p.anew(round+1, "the last time after a fault")
			t.Logf("recovered after %v", time.Since(begun).Round(time.Millisecond))
			p.finish()
		})
	}
}

// cutOne ends a TCP connection of this guest with a NIC's address (SOCK_DESTROY of sock_diag(7)): a
// connection of siw, because control connections use another network.
func cutOne(t *testing.T, address string) {
	t.Helper()
	all, err := netlink.SocketDiagTCP(unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	const established = 1 // TCP_ESTABLISHED of include/net/tcp_states.h
	for _, s := range all {
		if s.State != established || s.ID.Source.String() != address {
			continue
		}
		from := &net.TCPAddr{IP: s.ID.Source, Port: int(s.ID.SourcePort)}
		to := &net.TCPAddr{IP: s.ID.Destination, Port: int(s.ID.DestinationPort)}
		if err := netlink.SocketDestroy(from, to); err != nil {
			t.Fatalf("ending the connection of %v and %v: %v", from, to, err)
		}
		t.Logf("the connection of %v and %v was ended", from, to)
		return
	}
	t.Fatalf("no connection of %s, of %d", address, len(all))
}

// Two hosts, of which only one has RDMA, transfer data over TCP, and both report the reason in the
// log and to the administrator.
func TestHostWithoutRDMAUsesTCP(t *testing.T) {
	other := inside.Other(t)
	inside.RDMA(t, inside.Device{Name: "mlx5_0", Kind: inside.IWARP, Card: "rail0"},
		inside.Device{Name: "mlx5_1", Kind: inside.IWARP, Card: "rail1"})
	for guest, out := range exchanged(t, other, launch.TransportAuto) {
		for _, words := range []string{"data does not go over RDMA: ", "level=warning", "data goes over tcp: ",
			"no NIC can be used: mlx5_0: "} {
			if !strings.Contains(out, words) {
				t.Errorf("guest %d says nothing of %q", guest, words)
			}
		}
	}
}
