//go:build vm

package pair_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

// exchangeTimeout exceeds the time for the messages in the slowest guest.
const exchangeTimeout = 4 * time.Minute

// sizes are the sizes of the messages per direction: 0, inline with the announcement, around
// parts and slots, and MiBs.
var sizes = []uint64{0, 1, 127, 4096, 4097, 64 << 10, 256<<10 - 1, 256<<10 + 1, 1 << 20, 3<<20 + 5}

// side is a relay over RDMA without a container, in one guest, with the relay's client.
type side struct {
	dir      string
	relay    *relay.Relay
	ended    chan error
	client   *client.Session
	gpu      wire.UUID
	listener *client.Listener
}

func listenOn(path string) (*net.UnixListener, error) {
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
}

// begin starts the relay of a guest, which listens at the guest's address of rail 0, with a
// transport of the configuration and changes to the configuration.
func begin(ctx context.Context, guest int, key, transport string, changes ...func(*launch.Config)) (s *side,
	err error) {
	s = &side{ended: make(chan error, 1)}
	if s.dir, err = os.MkdirTemp("", "pl"); err != nil {
		return nil, err
	}
	gpus := []sim.Device{{
		Index: 0, UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d",
			guest+1), BusID: "0000:17:00.0", Minor: 0, Memory: 1 << 30, Name: "NVIDIA H100 80GB HBM3",
	}}
	if err := sim.Use(filepath.Join(s.dir, "host"), gpus); err != nil {
		return nil, err
	}
	if s.gpu, err = wire.ParseGPU(gpus[0].UUID); err != nil {
		return nil, err
	}
	generation := strings.Repeat(fmt.Sprint(guest+1), 32)
	clients, err := listenOn(filepath.Join(s.dir, "clients.sock"))
	if err != nil {
		return nil, err
	}
	peers, err := listenOn(filepath.Join(s.dir, generation+".sock"))
	if err != nil {
		return nil, err
	}
	if s.relay, err = relay.New(clients, peers, -1); err != nil {
		return nil, err
	}
	if err := s.relay.Secrets(launch.Secrets{ClusterKey: launch.NewSecret([]byte(key))}); err != nil {
		return nil, err
	}
	v := launch.DefaultVerbs
	v.QueuePairs, v.Timeout = 2, 20 // 4 s: an emulated guest acknowledges late
	config := launch.Config{
		Generation: generation, Container: fmt.Sprintf("guest%d", guest), Route: launch.RouteAuto, Transport: transport,
		Lanes: []launch.Lane{{GPU: launch.GPU{UUID: gpus[0].UUID, BusID: gpus[0].BusID}, Role: "near",
			NICs: []string{"mlx5_0", "mlx5_1"}}},
		Slots: 2, SlotBytes: 64 << 10, Peers: s.dir, Verbs: &v,
		Network: &launch.Network{
			Addresses: []address.Chosen{{Interface: "rail0", Address: netip.MustParseAddr(wiring.Address(0, guest))}},
			Ports:     address.Ports{First: 20000, Last: 20999}, Streams: 1, Slots: 4, SlotBytes: 256 << 10, Memory: 64 << 20,
		},
	}
	for _, change := range changes {
		change(&config)
	}
	if err := s.relay.Configure(config); err != nil {
		return nil, err
	}
	go func() { s.ended <- s.relay.Run() }()
	if s.client, err = client.Dial(ctx, filepath.Join(s.dir, "clients.sock"), s.gpu); err != nil {
		return nil, err
	}
	s.listener, err = s.client.Listen(ctx, s.gpu)
	return s, err
}

// end ends the relay, once.
func (s *side) end() error {
	s.relay.Stop("the test is over")
	err := <-s.ended
	s.ended <- nil
	return errors.Join(err, os.RemoveAll(s.dir))
}

// content returns the content of a message; each side computes the peer's messages too.
func content(from, message int, n uint64) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(from), byte(message)}).Read(b) // never fails
	return b
}

// exchange sends the messages to the peer's listener, and receives and verifies the peer's
// messages.
func (s *side) exchange(ctx context.Context, guest int, to wire.Handle) error {
	sending, err := s.client.Connect(ctx, s.gpu, to)
	if err != nil {
		return err
	}
	receiving, err := s.listener.Accept(ctx)
	if err != nil {
		return err
	}
	const room = 4 << 20
	out, err := s.client.HostMemory(ctx, client.HostMemory{Bytes: room, GPU: s.gpu})
	if err != nil {
		return err
	}
	in, err := s.client.HostMemory(ctx, client.HostMemory{Bytes: room, GPU: s.gpu})
	if err != nil {
		return err
	}
	for i, n := range sizes {
		copy(out.Data, content(guest, i, n))
		clear(in.Data)
		receive, err := receiving.Receive(in, 0, room)
		if err != nil {
			return err
		}
		send, err := sending.Send(out, 0, n)
		if err != nil {
			return err
		}
		for _, op := range []*client.Operation{send, receive} {
			if moved, err := op.Wait(ctx); err != nil || moved != n {
				return fmt.Errorf("message %d of %d bytes: %d, %v", i, n, moved, err)
			}
		}
		if !bytes.Equal(in.Data[:n], content(1-guest, i, n)) {
			return fmt.Errorf("message %d of %d bytes arrived wrong", i, n)
		}
	}
	// If both sides dialed at the same time there are two groups of queue pairs, and one may be
	// idle.
	var writes, short uint64
	transports := map[string]bool{}
	for _, p := range s.relay.Report().Network.Peers {
		fmt.Printf("data goes over %s: %s\n", p.Transport, p.Way)
		writes, short = writes+p.Writes, short+p.Eager
		transports[p.Transport] = true
	}
	if by := transports[launch.TransportVerbs]; len(transports) != 1 || by != (writes == short) {
		return fmt.Errorf("data went over %v, %d writes over tcp, of which %d were short", transports, writes, short)
	}
	return nil
}

// relayTo runs in a guest, as `TEST relay GUEST TRANSPORT`: it reads the key, prints the handle of
// its listener, and reads the second guest's handle.
func relayTo(from io.Reader, guest, transport string) error {
	ctx, cancel := context.WithTimeout(context.Background(), exchangeTimeout)
	defer cancel()
	number, err := strconv.Atoi(guest)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(from)
	read := func() ([]byte, error) {
		if !lines.Scan() {
			return nil, errors.Join(lines.Err(), errors.New("no key, or no handle"))
		}
		return hex.DecodeString(lines.Text())
	}
	key, err := read()
	if err != nil {
		return err
	}
	s, err := begin(ctx, number, string(key), transport)
	if err != nil {
		return err
	}
	handle := s.listener.Handle()
	fmt.Printf("handle %x\n", handle[:])
	text, err := read()
	if err == nil && len(text) != len(handle) {
		err = fmt.Errorf("a handle of %d bytes", len(text))
	}
	if err == nil {
		err = s.exchange(ctx, number, wire.Handle(text))
	}
	return errors.Join(err, s.end())
}

// handleIn returns the handle that a relay has printed.
func handleIn(text string) (handle string, ok bool) {
	_, after, found := strings.Cut(text, "handle ")
	handle, _, whole := strings.Cut(after, "\n")
	return handle, found && whole
}

// Two relays, one per guest, exchange messages of many sizes over RoCE on two NICs with two queue
// pairs each.
func TestRelaysOverRoCEExchange(t *testing.T) {
	other := rdma(t, inside.RoCE)
	known(t)
	ctx, cancel := context.WithTimeout(t.Context(), exchangeTimeout)
	defer cancel()
	key := network.Keys{Current: network.NewKey(time.Now())}.Text()
	s, err := begin(ctx, 0, string(key), launch.TransportVerbs)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	own := s.listener.Handle()
	out, ended := &lines{}, make(chan error, 1)
	go func() {
		ended <- other.Run(ctx, control.Command{Argv: []string{self, "relay", "1", launch.TransportVerbs}},
			strings.NewReader(fmt.Sprintf("%x\n%x\n", key, own[:])), out, out)
	}()
	var to wire.Handle
	inside.Eventually(t, "the other relay listens", func() (bool, string) {
		text := out.String()
		select {
		case err := <-ended:
			t.Fatalf("in the other guest: %v\n%s", err, text)
		default:
		}
		handle, ok := handleIn(text)
		if !ok {
			return false, text
		}
		_, err := hex.Decode(to[:], []byte(handle))
		return err == nil, text
	})
	began := time.Now()
	failed := s.exchange(ctx, 0, to)
	t.Logf("the messages took %v; the other guest says:\n%s", time.Since(began), out)
	if err := <-ended; failed != nil || err != nil {
		t.Log(inside.Command(t, "sh", "-c",
			"grep -H . /sys/class/infiniband/*/ports/1/hw_counters/* | grep -v ':0$'; dmesg | tail -20"))
		t.Errorf("here %v; in the other guest %v\n%s", failed, err, out)
	}
	if err := s.end(); err != nil {
		t.Error(err)
	}
}
