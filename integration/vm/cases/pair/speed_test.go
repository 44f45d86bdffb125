//go:build vm

package pair_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// Rates of relays beside perftest on the same devices: `make bench-verbs`.

// inFlight is the number of messages of a stream in flight.
const inFlight = 16

// oneNIC makes a relay use the resources of perftest: one NIC, with the given number of queue
// pairs, and the slots of a host.
func oneNIC(pairs int) func(*launch.Config) {
	return func(c *launch.Config) {
		c.Lanes[0].NICs, c.Verbs.QueuePairs = []string{"mlx5_0"}, pairs
		c.Network.Slots, c.Network.SlotBytes, c.Network.Memory = 8, 4<<20, 256<<20
	}
}

// talk is a relay's client, connected with the second guest's client in both directions.
type talk struct {
	*side
	sending, receiving *client.Connection
	memory             *client.Memory // host memory, inFlight messages
	room               uint64         // per direction
}

// meet connects a side with the side of the second guest.
func (s *side) meet(ctx context.Context, to wire.Handle, room uint64) (*talk, error) {
	t := &talk{side: s, room: room}
	var err error
	if t.sending, err = s.client.Connect(ctx, s.gpu, to); err == nil {
		t.receiving, err = s.listener.Accept(ctx)
	}
	if err == nil {
		t.memory, err = s.client.HostMemory(ctx, client.HostMemory{Bytes: inFlight * room, GPU: s.gpu})
	}
	return t, err
}

// stream sends or receives messages of the given size, inFlight at a time. It calls begun after
// posting the first.
func (t *talk) stream(ctx context.Context, sends bool, messages int, bytes uint64, begun func()) error {
	post := t.receiving.Receive
	if sends {
		post = t.sending.Send
	}
	var under []*client.Operation
	for i := range messages + inFlight {
		if i >= inFlight && i-inFlight < messages {
			if n, err := under[0].Wait(ctx); err != nil || n != bytes {
				return fmt.Errorf("message %d: %d bytes, want %d: %v", i-inFlight, n, bytes, err)
			}
			under = under[1:]
		}
		if i < messages {
			op, err := post(t.memory, uint64(i%inFlight)*t.room, bytes)
			if err != nil {
				return err
			}
			under = append(under, op)
		}
		if i == min(messages, inFlight)-1 {
			begun()
		}
	}
	return nil
}

// rounds exchanges a message in each direction per round, first sending or first receiving, and
// returns the duration of each round; half of the duration is one direction.
func (t *talk) rounds(ctx context.Context, first bool, rounds int, bytes uint64, begun func()) (took []time.Duration,
	err error) {
	receive, err := t.receiving.Receive(t.memory, 0, t.room)
	if err != nil {
		return nil, err
	}
	begun()
	send := func() error {
		op, err := t.sending.Send(t.memory, t.room, bytes)
		if err == nil {
			_, err = op.Wait(ctx)
		}
		return err
	}
	for i := range rounds {
		start := time.Now()
		if first {
			if err := send(); err != nil {
				return nil, err
			}
		}
		if _, err := receive.Wait(ctx); err != nil {
			return nil, err
		}
		if i < rounds-1 {
			if receive, err = t.receiving.Receive(t.memory, 0, t.room); err != nil {
				return nil, err
			}
		}
		if !first {
			if err := send(); err != nil {
				return nil, err
			}
		}
		took = append(took, time.Since(start))
	}
	return took, nil
}

// talkTo runs in the second guest: it reads the key, the handle of this guest's listener, the number
// of queue pairs and the room for a message, prints its own handle, and executes orders.
func talkTo(from io.Reader) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), speedTimeout)
	defer cancel()
	orders := bufio.NewScanner(from)
	var key, handle string
	var pairs int
	var room uint64
	if !orders.Scan() {
		return errors.New("no key")
	}
	if _, err := fmt.Sscan(orders.Text(), &key, &handle, &pairs, &room); err != nil {
		return err
	}
	secret, err := hex.DecodeString(key)
	if err != nil {
		return err
	}
	var to wire.Handle
	if _, err := hex.Decode(to[:], []byte(handle)); err != nil {
		return err
	}
	s, err := begin(ctx, 1, string(secret), launch.TransportVerbs, oneNIC(pairs))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.end()) }()
	own := s.listener.Handle()
	fmt.Printf("handle %x\n", own[:])
	t, err := s.meet(ctx, to, room)
	if err != nil {
		return err
	}
	for number := 1; orders.Scan(); number++ {
		var what string
		var messages int
		var bytes uint64
		if _, err := fmt.Sscan(orders.Text(), &what, &messages, &bytes); err != nil {
			return err
		}
		ready := func() { fmt.Printf("ready %d.\n", number) }
		switch what {
		case "stream":
			err = t.stream(ctx, false, messages, bytes, ready)
		case "rounds":
			_, err = t.rounds(ctx, false, messages, bytes, ready)
		default:
			err = fmt.Errorf("an order to %q", what)
		}
		if err != nil {
			return err
		}
	}
	return orders.Err()
}

// speedTimeout exceeds the time of five rounds in the slowest guest.
const speedTimeout = 20 * time.Minute

// other is the view of this guest on talkTo.
type other struct {
	*testing.T
	orders io.WriteCloser
	number int
	out    lines
	ended  chan error
}

// await waits for a line of the second guest with a prefix, and returns the rest of the line.
func (o *other) await(word string) (rest string) {
	o.Helper()
	deadline := time.Now().Add(exchangeTimeout)
	for ; ; time.Sleep(5 * time.Millisecond) {
		text := o.out.String()
		for line := range strings.Lines(text) {
			if after, ok := strings.CutPrefix(line, word); ok && strings.HasSuffix(line, "\n") {
				return strings.TrimSpace(after)
			}
		}
		select {
		case err := <-o.ended:
			o.Fatalf("in the other guest: %v\n%s", err, text)
		default:
		}
		if time.Now().After(deadline) {
			o.Fatalf("the other guest does not say %q: %s", word, text)
		}
	}
}

// order makes the second guest run an operation, and waits until the operation has begun.
func (o *other) order(what string, messages int, bytes uint64) {
	o.Helper()
	o.number++
	if _, err := fmt.Fprintln(o.orders, what, messages, bytes); err != nil {
		o.Fatal(err)
	}
	o.await(fmt.Sprintf("ready %d.", o.number))
}

// talking starts two relays, one per guest, with a client each.
func talking(t *testing.T, ctx context.Context, agent *control.Client, pairs int, room uint64) (*talk, *other) {
	t.Helper()
	key := network.Keys{Current: network.NewKey(time.Now())}.Text()
	s, err := begin(ctx, 0, string(key), launch.TransportVerbs, oneNIC(pairs))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Error(err)
		}
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, orders := io.Pipe()
	o := &other{T: t, orders: orders, ended: make(chan error, 1)}
	go func() {
		o.ended <- agent.Run(ctx, control.Command{Argv: []string{self, "talk"}}, in, &o.out, &o.out)
	}()
	own := s.listener.Handle()
	if _, err := fmt.Fprintf(orders, "%x %x %d %d\n", key, own[:], pairs, room); err != nil {
		t.Fatal(err)
	}
	var to wire.Handle
	if _, err := hex.Decode(to[:], []byte(o.await("handle "))); err != nil {
		t.Fatal(err)
	}
	talk, err := s.meet(ctx, to, room)
	if err != nil {
		t.Fatal(err)
	}
	return talk, o
}

// over ends both sides, this side first.
func (o *other) over() {
	o.Helper()
	o.orders.Close()
	if err := <-o.ended; err != nil {
		o.Errorf("in the other guest: %v\n%s", err, &o.out)
	}
}

// perftest runs a program of perftest in both guests, and returns a column of its result line.
func perftest(t *testing.T, agent *control.Client, column int, name string, bytes uint64, n int,
	more ...string) float64 {
	t.Helper()
	const port = 18519
	arguments := append([]string{"-d", "mlx5_0", "-x", "1", "-p", strconv.Itoa(port), "-s", fmt.Sprint(bytes), "-n",
		strconv.Itoa(n), "-F"}, more...)
	server := start(t, agent, append([]string{name}, arguments...)...)
	listens(t, agent, port)
	out := inside.Command(t, name, append(arguments, wiring.Address(0, 1))...)
	server.wait(t)
	line := regexp.MustCompile(fmt.Sprintf(`(?m)^\s*%d\s+%d\s.*$`, bytes, n)).FindString(out)
	if f := strings.Fields(line); len(f) > column {
		if figure, err := strconv.ParseFloat(f[column], 64); err == nil && figure > 0 {
			return figure
		}
	}
	t.Fatalf("no figure in\n%s", out)
	return 0
}

// Columns of the figures of perftest.
const (
	averageMiBs   = 3 // of ib_write_bw
	typicalMicros = 4 // of ib_send_lat, one way
)

// busy has the time of a guest's processors so far, in ticks, by the kernel's names.
type busy map[string]float64

func processors(t *testing.T) busy {
	t.Helper()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	b := busy{}
	f := strings.Fields(strings.SplitN(string(text), "\n", 2)[0])
	for i, name := range []string{"user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"} {
		if b[name], err = strconv.ParseFloat(f[i+1], 64); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// since returns the shares of the time since before, in percent.
func (b busy) since(before busy) string {
	total := 0.0
	for name := range b {
		total += b[name] - before[name]
	}
	var list []string
	for _, name := range []string{"user", "system", "softirq", "idle"} {
		list = append(list, fmt.Sprintf("%s %.0f %%", name, 100*(b[name]-before[name])/max(total, 1)))
	}
	return strings.Join(list, ", ")
}

func median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/2]
}

// Compares relays with perftest on the same device, as the median over consecutive runs.
// The test does not judge the ratio: the guests are emulated on a shared machine. `make
// bench-verbs` runs five pairs.
func TestRelaysBesidePerftestReportRatio(t *testing.T) {
	const size, short = 1 << 20, 8
	const messages, rounds = 128, 500
	text := os.Getenv("PEERLANE_VM_PAIRS")
	if text == "" {
		t.Skip("it is a measurement; make bench-verbs runs it")
	}
	pairs, err := strconv.Atoi(text)
	if err != nil || pairs < 1 {
		t.Fatalf("%q pairs", text)
	}
	agent := rdma(t, inside.RoCE)
	known(t)
	ctx, cancel := context.WithTimeout(t.Context(), speedTimeout)
	defer cancel()
	talk, other := talking(t, ctx, agent, 1, size)
	stream := func(messages int) float64 {
		t.Helper()
		other.order("stream", messages, size)
		start := time.Now()
		if err := talk.stream(ctx, true, messages, size, func() {}); err != nil {
			t.Fatal(err)
		}
		return float64(messages) * size / (1 << 20) / time.Since(start).Seconds()
	}
	stream(inFlight) // the NICs learn the memory
	var ofBandwidth, ofTime []float64
	for range pairs {
		before := processors(t)
		raw := perftest(t, agent, averageMiBs, "ib_write_bw", size, messages)
		between := processors(t)
		ours := stream(messages)
		after := processors(t)
		ofBandwidth = append(ofBandwidth, ours/raw)
		t.Logf("1 MiB: relays %.1f MiB/s, ib_write_bw %.1f MiB/s: %.2f of it", ours, raw, ours/raw)
		t.Logf("this guest's processors: ib_write_bw %s; relays %s", between.since(before), after.since(between))

		direct := perftest(t, agent, typicalMicros, "ib_send_lat", short, rounds)
		other.order("rounds", rounds, short)
		took, err := talk.rounds(ctx, true, rounds, short, func() {})
		if err != nil {
			t.Fatal(err)
		}
		half := float64(slices.Sorted(slices.Values(took))[len(took)/2].Microseconds()) / 2
		ofTime = append(ofTime, half/direct)
		t.Logf("8 bytes, half of a round: relays %.0f µs, ib_send_lat %.0f µs: %.1f times as long", half, direct, half/direct)
	}
	for _, p := range talk.relay.Report().Network.Peers {
		if p.Writes != p.Eager {
			t.Errorf("%d writes went over tcp, of which %d were short", p.Writes, p.Eager)
		}
		t.Logf("data went over %s, %s", p.Transport, p.Way)
	}
	t.Logf("the median of %d pairs: 1 MiB %.2f of ib_write_bw, 8 bytes %.1f times ib_send_lat", pairs,
		median(ofBandwidth), median(ofTime))
	other.over()
}
