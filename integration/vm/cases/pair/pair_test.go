//go:build vm

// Package pair_test runs in the first of two guests that are joined by a
// network: two hosts, as far as RDMA and TCP can tell.
package pair_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestMain(m *testing.M) {
	if ok, err := programs(os.Args[1:]); ok {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// receive prints the number of each received datagram.
func receive(address string) error {
	conn, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	fmt.Println("listening")
	buffer := make([]byte, 16)
	for {
		n, _, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if n != 8 {
			return fmt.Errorf("a datagram of %d bytes", n)
		}
		number := binary.BigEndian.Uint64(buffer)
		fmt.Println(number)
		if number == last {
			return nil
		}
	}
}

// last ends the output of receive.
const last = 1<<64 - 1

// rdma creates a device on each rail in both guests, without a PCI function.
func rdma(t *testing.T, kind string) *control.Client {
	t.Helper()
	return rdmaNamed(t, kind, "mlx5_0", "mlx5_1")
}

// rdmaNamed is rdma with other names, a name for each rail.
func rdmaNamed(t *testing.T, kind string, names ...string) *control.Client {
	t.Helper()
	other := inside.Other(t)
	var devices []inside.Device
	for i, name := range names {
		devices = append(devices, inside.Device{Name: name, Kind: kind, Card: wiring.Cards[i]})
	}
	inside.RDMA(t, devices...)
	module := map[string]string{inside.RoCE: "rdma_rxe", inside.IWARP: "siw"}[kind]
	inside.OnOther(t, other, "modprobe", "-a", module, "ib_uverbs", "rdma_ucm")
	for i, name := range names {
		inside.OnOther(t, other, "rdma", "link", "add", name, "type", kind, "netdev", wiring.Cards[i])
		t.Cleanup(func() {
			ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
			defer cancel()
			if err := other.Run(ctx, control.Command{Argv: []string{"rdma", "link", "delete", name}}, nil, nil,
				nil); err != nil {
				t.Error(err)
			}
		})
	}
	return other
}

// started is a program in the second guest.
type started struct {
	out   *lines
	ended chan error
}

// start runs a program in the second guest until the test ends.
func start(t *testing.T, other *control.Client, argv ...string) *started {
	t.Helper()
	s, end := startUntil(context.Background(), other, argv...)
	t.Cleanup(end)
	return s
}

// startUntil runs a program in the second guest until end is called; end waits for the exit.
func startUntil(ctx context.Context, other *control.Client, argv ...string) (s *started, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	s = &started{out: &lines{}, ended: make(chan error, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ended <- other.Run(ctx, control.Command{Argv: argv}, nil, s.out, s.out)
	}()
	return s, func() { cancel(); <-done }
}

// wait waits for the program's end, and requires success.
func (s *started) wait(t *testing.T) string {
	t.Helper()
	select {
	case err := <-s.ended:
		if err != nil {
			t.Fatalf("in the other guest: %v\n%s", err, s.out)
		}
	case <-testutil.After(2 * time.Minute):
		t.Fatalf("the other guest's program does not end:\n%s", s.out)
	}
	return s.out.String()
}

// listens waits until a process in the second guest listens on a TCP port.
func listens(t *testing.T, other *control.Client, port int) {
	t.Helper()
	hex := fmt.Sprintf(":%04X ", port)
	inside.Eventually(t, fmt.Sprintf("the other guest listens on port %d", port), func() (bool, string) {
		tables := inside.OnOther(t, other, "cat", "/proc/net/tcp", "/proc/net/tcp6")
		for line := range strings.Lines(tables) {
			if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1]+" ", hex) && f[3] == "0A" {
				return true, ""
			}
		}
		return false, tables
	})
}

// Third-party programs over rxe and siw in a busy emulated guest hung about once in ten runs, or
// measured no data. The tests therefore repeat such programs, with a limit per try.
const (
	strangersTries = 3
	strangersTime  = 90 * time.Second
)

// tried runs a third-party program until success; try is the number of the run.
func tried(t *testing.T, do func(ctx context.Context, try int) error) {
	t.Helper()
	for try := 1; ; try++ {
		ctx, cancel := context.WithTimeoutCause(t.Context(), strangersTime, fmt.Errorf("not within %v", strangersTime))
		err := do(ctx, try)
		cancel()
		if err == nil {
			return
		}
		if t.Logf("try %d: %v", try, err); try == strangersTries {
			t.Fatal("none of them came to a good end")
		}
	}
}

// both runs a program in the second guest, and then, when that program listens, a program in this
// guest, and returns both outputs.
func both(ctx context.Context, t *testing.T, other *control.Client, port int, remote, here []string) (server,
	client string, err error) {
	t.Helper()
	s, end := startUntil(ctx, other, remote...)
	defer end()
	listens(t, other, port)
	out, err := exec.CommandContext(ctx, here[0], here[1:]...).CombinedOutput()
	if err == nil {
		err = <-s.ended // the program ended, or ctx
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s\noutput in the other guest:\n%s", cmp.Or(context.Cause(ctx), err), out, s.out)
	}
	return s.out.String(), string(out), err
}

func TestPingpongOverRoCESucceeds(t *testing.T) {
	other := rdma(t, inside.RoCE)
	for i, device := range []string{"mlx5_0", "mlx5_1"} {
		t.Run(device, func(t *testing.T) {
			tried(t, func(ctx context.Context, try int) error {
				port := 18515 + try
				// -c verifies the received bytes. GID 1 is that of the IPv4 address.
				program := []string{"ibv_rc_pingpong", "-d", device, "-g", "1", "-p", strconv.Itoa(port), "-s", "65536", "-n",
					"100", "-c"}
				// Over another card than the rail comes only the exchange of addresses.
				server, client, err := both(ctx, t, other, port, program, append(slices.Clone(program), wiring.Address(i, 1)))
				const want = "13107200 bytes in"
				if err == nil && (!strings.Contains(client, want) || !strings.Contains(server, want)) {
					t.Errorf("no %q in\n%s\nor\n%s", want, client, server)
				}
				return err
			})
		})
	}
}

func TestPerftestWriteOverRoCESucceeds(t *testing.T) {
	other := rdma(t, inside.RoCE)
	tried(t, func(ctx context.Context, try int) error {
		port := 18525 + try
		program := []string{"ib_write_bw", "-d", "mlx5_0", "-x", "1", "-p", strconv.Itoa(port), "-s", "65536", "-n", "200",
			"-F"}
		_, out, err := both(ctx, t, other, port, program, append(slices.Clone(program), wiring.Address(0, 1)))
		if err != nil {
			return err
		}
		figures := regexp.MustCompile(`(?m)^\s*65536\s+200\s+\S+\s+(\S+)`).FindStringSubmatch(out)
		if figures == nil {
			return fmt.Errorf("no figure in\n%s", out)
		}
		if rate, err := strconv.ParseFloat(figures[1], 64); err != nil || rate <= 0 {
			return fmt.Errorf("%s MiB/s", figures[1])
		}
		t.Logf("ib_write_bw, 64 KiB, emulated: %s MiB/s", figures[1])
		return nil
	})
}

func TestPingsOverIWARPArrive(t *testing.T) {
	other := rdma(t, inside.IWARP)
	tried(t, func(ctx context.Context, try int) error {
		port := 7174 + try // iWARP runs over TCP
		program := func(side ...string) []string {
			return append([]string{"rping", "-a", wiring.Address(0, 1), "-p", strconv.Itoa(port), "-C", "20", "-V"}, side...)
		}
		_, out, err := both(ctx, t, other, port, program("-s", "-d"), program("-c", "-v"))
		if n := strings.Count(out, "ping data: rdma-ping-"); err == nil && n != 20 {
			t.Errorf("%d of 20 pings came back:\n%s", n, out)
		}
		return err
	})
}

func TestUnpluggedCableLosesLink(t *testing.T) {
	rdma(t, inside.RoCE)
	inside.Plug(t, "rail0", false)
	inside.Eventually(t, "mlx5_0's port is down", func() (bool, string) {
		got := inside.Port(t, "mlx5_0", "state")
		return strings.HasSuffix(got, "DOWN"), got
	})
	if got := inside.Port(t, "mlx5_1", "state"); !strings.HasSuffix(got, "ACTIVE") {
		t.Errorf("state of mlx5_1 with its cable in place: %s", got)
	}
	if reaches(t, wiring.Address(0, 1)) || !reaches(t, wiring.Address(1, 1)) {
		t.Error("the wrong rail is cut")
	}
	inside.Plug(t, "rail0", true)
	inside.Eventually(t, "mlx5_0's port is active", func() (bool, string) {
		got := inside.Port(t, "mlx5_0", "state")
		return strings.HasSuffix(got, "ACTIVE"), got
	})
	known(t)
}

// reaches tries to connect to a TCP port without a listener: a refusal shows that the address is
// reachable.
func reaches(t *testing.T, address string) bool {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address+":1", 2*time.Second)
	if err == nil {
		conn.Close()
		return true
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

func TestDelayIsMeasured(t *testing.T) {
	round := func() time.Duration {
		began := time.Now()
		if !reaches(t, wiring.Address(0, 1)) {
			t.Fatal("the other guest is not reached")
		}
		return time.Since(began)
	}
	known(t)
	inside.Disturb(t, "rail0", netlink.NetemQdiscAttrs{Latency: 300_000})
	if took := round(); took < 300*time.Millisecond {
		t.Errorf("a round trip takes %v with a delay of 300 ms", took)
	}
}

// known resolves the guests' hardware addresses in advance: a lost ARP request would delay or lose
// datagrams.
func known(t *testing.T) {
	t.Helper()
	inside.Eventually(t, "the other guest is reached", func() (bool, string) {
		return reaches(t, wiring.Address(0, 1)),
			"not reached"
	})
}

// send sends numbered datagrams at short intervals, and returns the received numbers in order of
// arrival.
func send(t *testing.T, n int) []uint64 {
	t.Helper()
	other := inside.Other(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	address := wiring.Address(0, 1) + ":9999"
	server := start(t, other, self, "receive", address)
	inside.Eventually(t, "the receiver listens", func() (bool, string) {
		return strings.HasPrefix(server.out.String(), "listening\n"), server.out.String()
	})
	conn, err := net.Dial("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	write := func(number uint64) {
		_, err := conn.Write(binary.BigEndian.AppendUint64(nil, number))
		// The receiver exits after the end marker.
		if err != nil && (number != last || !errors.Is(err, syscall.ECONNREFUSED)) {
			t.Fatal(err)
		}
	}
	for i := range n {
		write(uint64(i))
		time.Sleep(2 * time.Millisecond)
	}
	// The end marker must not overtake a datagram, and may be lost too.
	time.Sleep(500 * time.Millisecond)
	inside.Eventually(t, "the receiver sees the end", func() (bool, string) {
		write(last)
		select {
		case err := <-server.ended:
			if err != nil {
				t.Fatal(err)
			}
			return true, ""
		default:
			return false, server.out.String()
		}
	})
	var numbers []uint64
	for line := range strings.Lines(strings.TrimPrefix(server.out.String(), "listening\n")) {
		number, err := strconv.ParseUint(strings.TrimSpace(line), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if number != last {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

func TestUndisturbedDatagramsArriveInOrder(t *testing.T) {
	known(t)
	const n = 200
	numbers := send(t, n)
	if len(numbers) != n || !inOrder(numbers) {
		t.Errorf("%d of %d datagrams came, in order: %t", len(numbers), n, inOrder(numbers))
	}
}

func TestLossDropsDatagrams(t *testing.T) {
	known(t)
	inside.Disturb(t, "rail0", netlink.NetemQdiscAttrs{Loss: 30})
	const n = 400
	// 30 % of 400 are 120, give or take 9: a deviation of four times 9 is not random.
	if lost := n - len(send(t, n)); lost < 80 || lost > 160 {
		t.Errorf("%d of %d datagrams were lost, of which 30%% should be", lost, n)
	}
}

func TestReorderingChangesOrder(t *testing.T) {
	known(t)
	// Three quarters are delayed; the rest overtakes.
	inside.Disturb(t, "rail0", netlink.NetemQdiscAttrs{Latency: 50_000, ReorderProb: 25, Gap: 1})
	const n = 200
	numbers := send(t, n)
	if len(numbers) != n || inOrder(numbers) {
		t.Errorf("%d of %d datagrams came, in order: %t", len(numbers), n, inOrder(numbers))
	}
}

func inOrder(numbers []uint64) bool {
	for i := 1; i < len(numbers); i++ {
		if numbers[i] < numbers[i-1] {
			return false
		}
	}
	return true
}

// RDMA must survive the faults: RC retransmits lost packets.
func TestPingpongOverLossyRailSucceeds(t *testing.T) {
	other := rdma(t, inside.RoCE)
	inside.Disturb(t, "rail0", netlink.NetemQdiscAttrs{Loss: 2})
	const port = 18517
	arguments := []string{"-d", "mlx5_0", "-g", "1", "-p", strconv.Itoa(port), "-s", "4096", "-n", "100", "-c"}
	server := start(t, other, append([]string{"ibv_rc_pingpong"}, arguments...)...)
	listens(t, other, port)
	out := inside.Command(t, "ibv_rc_pingpong", append(arguments, wiring.Address(0, 1))...)
	if !strings.Contains(out, "819200 bytes in") {
		t.Error(out)
	}
	server.wait(t)
}

func TestOtherGuestIsDistinct(t *testing.T) {
	other := inside.Other(t)
	here, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	if remote := inside.OnOther(t, other, "cat", "/proc/sys/kernel/random/boot_id"); remote == string(here) {
		t.Error("both guests have the boot id", remote)
	}
	err = other.Run(t.Context(), control.Command{Argv: []string{"false"}}, nil, nil, nil)
	var status *control.ExitError
	if !errors.As(err, &status) || status.Status != 1 {
		t.Errorf("false ended with %v", err)
	}
	var out bytes.Buffer
	if err := other.Run(t.Context(), control.Command{Argv: []string{"cat"}}, strings.NewReader("to and fro"), &out,
		nil); err != nil || out.String() != "to and fro" {
		t.Errorf("%q, %v", out.String(), err)
	}
}
