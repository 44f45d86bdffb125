//go:build vm

package pair_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/peerlane/peerlane/integration/across"
	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// longest is ten times the duration of a step, and more than ten times the promise. It also limits
// the time without a message during an exchange.
const longest = 4 * time.Minute

// host is a guest with Peerlane and a container.
type host struct {
	*testing.T
	guest     int
	orders    io.WriteCloser
	lines     chan hostLine
	ended     chan error
	errors    lines
	container string
	listening across.Line
}

// startHost runs the test binary with the arguments in a guest until the end of the test.
func startHost(t *testing.T, guest int, other *control.Client, arguments ...string) *host {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := &host{T: t, guest: guest, lines: make(chan hostLine, 100), ended: make(chan error, 1)}
	argv := append([]string{self}, arguments...)
	in, orders := io.Pipe()
	output, out := io.Pipe()
	h.orders = orders
	go func() {
		var err error
		if guest == 0 {
			c := exec.Command(argv[0], argv[1:]...)
			c.Stdin, c.Stdout, c.Stderr = in, out, &h.errors
			err = c.Run()
		} else {
			err = other.Run(context.Background(), control.Command{Argv: argv}, in, out, &h.errors)
		}
		out.Close()
		in.Close()
		h.ended <- err
	}()
	go func() {
		decoder := json.NewDecoder(output)
		for {
			var l hostLine
			if err := decoder.Decode(&l); err != nil {
				if !errors.Is(err, io.EOF) {
					h.lines <- hostLine{Line: across.Line{Kind: across.Wrong, Error: err.Error()}}
				}
				break
			}
			h.lines <- l
		}
		_, _ = io.Copy(io.Discard, output) // so that the process ends
		close(h.lines)
	}()
	return h
}

// end ends the container, and requires that the host has no remaining object.
func (h *host) end() {
	h.Helper()
	h.orders.Close()
	go func() {
		for range h.lines {
		}
	}()
	select {
	case err := <-h.ended:
		if err != nil {
			h.Errorf("host %d: %v\n%s", h.guest, err, h.errors.String())
		}
	case <-time.After(longest):
		h.Errorf("host %d does not end: %s", h.guest, h.errors.String())
	}
}

func (h *host) order(o across.Order) {
	h.Helper()
	text, err := json.Marshal(o)
	if err == nil {
		_, err = h.orders.Write(append(text, '\n'))
	}
	if err != nil {
		h.Fatalf("host %d: %v", h.guest, err)
	}
}

// next waits for a line of a kind and discards earlier lines, except failures, after which the
// awaited line does not come.
func (h *host) next(kind string) hostLine {
	h.Helper()
	deadline := time.After(longest)
	for {
		select {
		case l, ok := <-h.lines:
			switch {
			case !ok:
				h.Fatalf("host %d ended before %q: %s", h.guest, kind, h.errors.String())
			case l.Kind == kind:
				return l
			case l.Kind == across.Wrong || l.Kind == across.Failed:
				h.Fatalf("host %d, which was to come to %q: %s; %q\n%s", h.guest, kind, l.Error, l.Report.Failures,
					h.errors.String())
			}
		case <-deadline:
			h.Fatalf("host %d does not come to %q: %s", h.guest, kind, h.errors.String())
		}
	}
}

// nextAfterMessages is next for a line after messages: longest limits the time between two
// messages, not the exchange.
func (h *host) nextAfterMessages(kind string) hostLine {
	h.Helper()
	received, since := 0, time.Now()
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case l, ok := <-h.lines:
			switch {
			case !ok:
				h.Fatalf("host %d ended before %q: %s", h.guest, kind, h.errors.String())
			case l.Kind == kind:
				return l
			case l.Kind == across.Counted:
				if l.Report.Received > received {
					received, since = l.Report.Received, time.Now()
				}
			case l.Kind == across.Wrong || l.Kind == across.Failed:
				h.Fatalf("host %d, after %d messages: %s; %q\n%s", h.guest, received, l.Error, l.Report.Failures,
					h.errors.String())
			}
		case <-tick.C:
			if time.Since(since) > longest {
				h.Fatalf("host %d receives no message within %v after %d: %s", h.guest, longest, received,
					h.errors.String())
			}
			h.order(across.Order{Do: across.Count})
		}
	}
}

// hosts has both hosts.
type hosts struct {
	*testing.T
	both  [wiring.Guests]*host
	other *control.Client
	seed  uint64
}

func (p *hosts) exchange(bytes, largest uint64) {
	p.Helper()
	p.seed++
	for i, h := range p.both {
		h.order(across.Order{Do: across.Connect, Handle: p.both[1-i].listening.Handle, Side: i, Seed: p.seed, Bytes: bytes,
			Largest: largest})
	}
	for _, h := range p.both {
		h.next(across.Moving)
	}
}

// mustFinish requires that every message has arrived once.
func (p *hosts) mustFinish() (bytes [wiring.Guests]uint64) {
	p.Helper()
	var reports [wiring.Guests]across.Report
	for i, h := range p.both {
		reports[i] = h.nextAfterMessages(across.Done).Report
		bytes[i] = reports[i].BytesReceived
		h.listening = h.next(across.Listening).Line
	}
	for i := range reports {
		if reports[i].Posted != reports[i].Sent || reports[i].Sent != reports[1-i].Received || reports[i].Sent == 0 {
			p.Errorf("host %d posted %d messages, of which %d ended, and %d have come", i, reports[i].Posted, reports[i].Sent,
				reports[1-i].Received)
		}
	}
	return bytes
}

// run runs a part of the test on the hosts. A failure leaves an undefined state, so the failed part
// is the last.
func (p *hosts) run(t *testing.T, name string, part func(t *testing.T)) {
	t.Helper()
	passed := t.Run(name, func(t *testing.T) {
		outer := p.T
		as := func(t *testing.T) {
			p.T = t
			for _, h := range p.both {
				h.T = t
			}
		}
		as(t)
		defer as(outer)
		part(t)
	})
	if !passed {
		t.FailNow()
	}
}

// startHosts runs a container on each machine.
func startHosts(t *testing.T, transport string) *hosts {
	t.Helper()
	known(t)
	p := &hosts{T: t, other: inside.Other(t)}
	key := clusterKey(t)
	for i, runtimeName := range []string{"runc", "crun"} {
		h := startHost(t, i, p.other, "host", runtimeName, key, transport)
		p.both[i] = h
		t.Cleanup(h.end)
	}
	for _, h := range p.both {
		h.isUp()
	}
	return p
}

// isUp waits for the container and its listener.
func (h *host) isUp() {
	h.Helper()
	h.container = h.next(running).Container
	h.listening = h.next(across.Listening).Line
}

// sizes makes both sides send the amount of bytes in messages of all sizes.
func (p *hosts) sizes(amount uint64) {
	p.Helper()
	p.exchange(amount, 4<<20+3)
	begun := time.Now()
	bytes := p.mustFinish()
	p.Logf("%d and %d bytes in %v, emulated", bytes[0], bytes[1], time.Since(begun).Round(time.Millisecond))
	for i, n := range bytes {
		if n < amount {
			p.Errorf("%d bytes have come to host %d, not %d", n, i, amount)
		}
	}
}

// mustSee requires the values that `peerlane relay inspect` shows for open connections.
func (p *hosts) mustSee(transport, path string) {
	p.Helper()
	p.exchange(0, 64<<10)
	h := p.both[1] // one host: under load an inspection takes ten seconds
	h.order(across.Order{Do: inspect})
	r := h.next(inspected).Inspection.Report
	if r == nil || r.Network == nil || !strings.HasPrefix(r.Network.Listening, wiring.Address(0, 1)+":") ||
		len(r.Network.Peers) != 2 || len(r.Connections) != 2 {
		p.Fatalf("the report is %+v", r)
	}
	for _, c := range r.Connections {
		if c.Transport != transport || !strings.Contains(c.Path, path) {
			p.Errorf("connection: transport %q, path %q", c.Transport, c.Path)
		}
	}
	p.finish()
}

// The same containers over RDMA: the software NICs of both kernels write and read slots of
// sandboxed relays.
func TestContainersOfTwoGuestsOverRoCELoseNoMessage(t *testing.T) {
	all := amount(t)
	if all == usual {
		all /= 4 // over rxe a byte takes up to four times as long as over TCP
	}
	p := startHosts(t, launch.TransportVerbs)
	p.run(t, "messages of all sizes", func(*testing.T) { p.sizes(all) })
	p.run(t, "what the administrators see", func(*testing.T) { p.mustSee(launch.TransportVerbs, "mlx5_0") })
}

// usual is the number of bytes that containers send each other in make test-vm.
const usual = 64 << 20

// amount returns the minimum number of bytes that containers send. Above the usual number, the
// guests' cards have jumbo frames, as in a network of GPUs: the emulated processors spend most time
// on packets.
func amount(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("PEERLANE_VM_BYTES")
	if text == "" {
		return usual
	}
	bytes, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if bytes > usual {
		jumbo(t, inside.Other(t))
	}
	return bytes
}

// jumbo sets the MTU of the first rail of both guests until the end of the test.
func jumbo(t *testing.T, other *control.Client) {
	t.Helper()
	const card, bytes = "rail0", 9000
	link, err := netlink.LinkByName(card)
	if err != nil {
		t.Fatal(err)
	}
	original := link.Attrs().MTU
	set := func(mtu int) error {
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
		defer cancel()
		return errors.Join(netlink.LinkSetMTU(link, mtu), other.Run(ctx, control.Command{
			Argv: []string{"ip", "link", "set", card, "mtu", strconv.Itoa(mtu)}}, nil, nil, nil))
	}
	t.Cleanup(func() {
		if err := set(original); err != nil {
			t.Error(err)
		}
	})
	if err := set(bytes); err != nil {
		t.Fatal(err)
	}
}

// Containers on two machines, with separate kernels, PCIe trees and clocks, with an
// administrator's installation: a far GPU sends to a far GPU. Faults of network, host and clock
// lose no acknowledged message, and duplicate none.
func TestContainersOfTwoGuestsLoseNoMessage(t *testing.T) {
	all := amount(t)
	p := startHosts(t, launch.TransportTCP)
	p.run(t, "messages of all sizes", func(*testing.T) { p.sizes(all) })
	p.run(t, "what the administrators see", func(*testing.T) { p.mustSee(launch.TransportTCP, "rail0") })
	for _, c := range []struct {
		name string
		how  netlink.NetemQdiscAttrs
	}{
		{"loss", netlink.NetemQdiscAttrs{Loss: 2}},
		{"delay", netlink.NetemQdiscAttrs{Latency: 50_000, Jitter: 10_000}},
		{"reordering", netlink.NetemQdiscAttrs{Latency: 20_000, ReorderProb: 25, Gap: 1}},
	} {
		p.run(t, c.name, func(t *testing.T) {
			inside.Disturb(t, "rail0", c.how)
			begun := time.Now()
			p.exchange(1<<20, 256<<10)
			p.mustFinish()
			t.Logf("recovered; 1 MiB each way in %v", time.Since(begun).Round(time.Millisecond))
		})
	}
	p.run(t, "a host that stops", func(t *testing.T) {
		p.exchange(0, 64<<10)
		goOn := inside.StopOther(t)
		begun := time.Now()
		p.mustFail(0)
		t.Logf("learnt after %v", time.Since(begun).Round(time.Millisecond))
		goOn()
		p.mustFail(1)
	})
	p.run(t, "a clock that is an hour ahead", func(t *testing.T) {
		p.both[0].order(across.Order{Do: inspect}) // so that another handshake follows
		if r := p.both[0].next(inspected).Inspection.Report; r == nil || r.Network == nil || len(r.Network.Peers) > 0 {
			t.Fatalf("the report is %+v", r)
		}
		p.skew(t, time.Hour)
		p.exchange(1<<20, 64<<10)
		p.mustFinish()
	})
}

func (p *hosts) finish() {
	p.Helper()
	for _, h := range p.both {
		h.order(across.Order{Do: across.Finish})
	}
	p.mustFinish()
}

// mustFail requires that every operation of a host ends with an error that names container, host
// and interface. It returns the first error.
func (p *hosts) mustFail(i int) string {
	p.Helper()
	h := p.both[i]
	l := h.next(across.Failed)
	h.Logf("host %d: %s", i, l.Error)
	if r := l.Report; len(r.Failures) == 0 || len(r.Failures) > r.Pending || r.Pending > 2*across.AtOnce {
		h.Errorf("of %d pending operations %d failed", r.Pending, len(r.Failures))
	}
	for _, failure := range l.Report.Failures {
		if strings.HasSuffix(failure, "closed the connection") && failure != l.Error {
			continue // the client closed the connection after another error
		}
		for _, word := range []string{"peerlane-vm", p.both[1-i].container, wiring.Address(0, 1-i), "rail0"} {
			if !strings.Contains(failure, word) {
				h.Errorf("the error does not say %q: %s", word, failure)
			}
		}
	}
	h.listening = h.next(across.Listening).Line
	return l.Error
}

// skew shifts the second guest's clock until the test ends.
func (p *hosts) skew(t *testing.T, by time.Duration) {
	t.Helper()
	ahead := func() time.Duration {
		seconds, err := strconv.ParseInt(strings.TrimSpace(inside.OnOther(t, p.other, "date", "+%s")), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Until(time.Unix(seconds, 0))
	}
	set := func(ctx context.Context, to time.Time) error {
		return p.other.Run(ctx, control.Command{Argv: []string{"date", "-s", fmt.Sprintf("@%d", to.Unix())}}, nil, nil, nil)
	}
	before := ahead()
	if err := set(t.Context(), time.Now().Add(before+by)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
		defer cancel()
		if err := set(ctx, time.Now().Add(before)); err != nil {
			t.Error(err)
		}
	})
	if got := ahead(); got < before+by-10*time.Minute {
		t.Fatalf("the other guest's clock is %v ahead, and was %v", got, before)
	}
}

// clusterKey makes a key that both guests can read.
func clusterKey(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if _, err := program("--root", root, "key", "generate"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(root + "/etc/peerlane/cluster.key")
	if err != nil {
		t.Fatal(err)
	}
	const shared = "/share/cluster.key"
	if err := os.WriteFile(shared, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(shared); err != nil {
			t.Error(err)
		}
	})
	return shared
}
