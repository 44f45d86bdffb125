package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// networks are two network namespaces, joined by a cable: for TCP, two hosts.
type networks struct {
	*testing.T
	names, cables, addresses [2]string
	change                   func(host int, c *config.Config) // nil changes nothing
}

func newNetworks(t *testing.T) *networks {
	t.Helper()
	n := &networks{T: t, addresses: [2]string{"10.211.0.1", "10.211.0.2"}}
	for i := range n.names {
		n.names[i], n.cables[i] = fmt.Sprintf("peerlane-%d-%c", os.Getpid(), 'a'+i), fmt.Sprintf("plnet%d", i)
		n.add(n.names[i])
	}
	n.must("ip", "link", "add", n.cables[0], "netns", n.names[0], "type", "veth", "peer", "name", n.cables[1], "netns",
		n.names[1])
	for i, cable := range n.cables {
		n.in(i, "ip", "address", "add", n.addresses[i]+"/24", "dev", cable)
		n.in(i, "ip", "link", "set", cable, "up")
		n.in(i, "ip", "link", "set", "lo", "up")
	}
	return n
}

// add creates a namespace, and removes namespaces of killed test processes.
func (n *networks) add(name string) {
	n.Helper()
	if os.Geteuid() != 0 {
		n.Skip("needs root: it makes network namespaces")
	}
	sweepNetworks(n.T)
	n.must("ip", "netns", "add", name)
	n.Cleanup(func() { n.must("ip", "netns", "del", name) })
}

var testNetwork = regexp.MustCompile(`^peerlane-([0-9]+)-`)

// sweepNetworks removes the namespaces whose names contain the pid of an ended process.
func sweepNetworks(t *testing.T) {
	t.Helper()
	all, err := filepath.Glob("/run/netns/peerlane-*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		name := filepath.Base(path)
		m := testNetwork.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		if pid, err := strconv.Atoi(m[1]); err != nil || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		// another process may have removed the namespace
		if out, err := exec.Command("ip", "netns", "del", name).CombinedOutput(); err != nil {
			t.Logf("%s, which a process that is gone has left: %v: %s", name, err, out)
		}
	}
}

// The first test of the next process removes the namespaces of a killed test process.
func TestNextProcessRemovesNetworksOfKilledOne(t *testing.T) {
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	n := newNetworks(t)
	left := fmt.Sprintf("peerlane-%d-a", gone.Process.Pid)
	n.must("ip", "netns", "add", left)
	sweepNetworks(t)
	if _, err := os.Stat("/run/netns/" + left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s still exists: %v", left, err)
	}
	for _, name := range n.names {
		if _, err := os.Stat("/run/netns/" + name); err != nil {
			t.Error(err)
		}
	}
}

func (n *networks) must(command ...string) {
	n.Helper()
	n.output(command...)
}

func (n *networks) output(command ...string) string {
	n.Helper()
	out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
	if err != nil {
		n.Fatalf("%v: %v: %s", command, err, out)
	}
	return string(out)
}

// in runs a command on one host.
func (n *networks) in(host int, command ...string) {
	n.Helper()
	n.must(append([]string{"ip", "netns", "exec", n.names[host]}, command...)...)
}

// hostsApart creates two hosts with a shared cluster key in separate network namespaces. The hosts
// use only TCP: on one machine their relays would use shared memory.
func hostsApart(t *testing.T, runtimeName string) (*networks, [2]*bed) {
	t.Helper()
	n := newNetworks(t)
	return n, hostsOn(t, n, runtimeName)
}

// hostsOn creates two hosts on existing networks.
func hostsOn(t *testing.T, n *networks, runtimeName string) [2]*bed {
	t.Helper()
	root := newRoot(t)
	var beds [2]*bed
	for i := range beds {
		dir := filepath.Join(root, string(rune('a'+i)))
		if err := os.Mkdir(dir, 0o711); err != nil {
			t.Fatal(err)
		}
		b := newBedIn(t, dir, runtimeName, func(c *config.Config) {
			c.Relay.Route, c.Relay.Transport = launch.RouteAuto, launch.TransportTCP
			c.Network.Interfaces = "=" + n.cables[i]
			if n.change != nil {
				n.change(i, c)
			}
		})
		b.runtime.Before = []string{"nsenter", "--net=/run/netns/" + n.names[i], b.runtime.Path()}
		b.leavesNothing()
		beds[i] = b
	}
	if err := os.Chmod(root, 0o711); err != nil { // relays traverse the directory
		t.Fatal(err)
	}
	beds[0].mustPeerlane("key", "generate")
	key, err := os.ReadFile(beds[0].Layout.ClusterKey())
	if err == nil {
		err = os.WriteFile(beds[1].Layout.ClusterKey(), key, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return beds
}

// A container on one host sends from host memory to GPU memory of a container on another host, and
// receives the data back, through sandboxed relays. Both containers report the end of the peer.
func TestContainersOfTwoHostsExchange(t *testing.T) {
	_, beds := hostsApart(t, "runc")
	beds[0].edit = func(b *bundle.Bundle) {
		b.Spec.Process.Env = append(b.Spec.Process.Env, "NCCL_SOCKET_IFNAME=eth0")
	}
	verifier := beds[0].start(beds[0].lanes[0], "verify")
	echo := beds[1].start(beds[1].lanes[1], "echo")
	one, other := verifier.next("listening").Handle, echo.next("listening").Handle
	verifier.send(event{Handle: other})
	echo.send(event{Handle: one})
	verifier.next("verified")

	for i, c := range []*container{verifier, echo} {
		found := c.bed.inspection(c)
		if r := found.Report; r == nil || r.Network == nil ||
			!strings.HasPrefix(r.Network.Listening, fmt.Sprintf("10.211.0.%d:", i+1)) || len(r.Network.Peers) != 2 {
			t.Fatalf("host %d's network is %+v", i, found.Report)
		}
		for _, connection := range found.Report.Connections {
			if connection.Transport != launch.TransportTCP || !strings.Contains(connection.Path, "tcp") ||
				!strings.Contains(connection.Path, "plnet") {
				t.Errorf("connection: transport %q, path %q", connection.Transport, connection.Path)
			}
		}
		if _, landlock, missing := found.Sandbox.Relay.Seccomp, found.Sandbox.Landlock, found.Sandbox.Missing; landlock == 0 {
			t.Logf("Landlock is not here: %q", missing)
		}
		// NCCL reads the container's virtual switch beside the socket.
		topology := fmt.Sprintf("/proc/%d/root%s", c.generation().Container.PID,
			filepath.Join(paths.ContainerDir, paths.TopologyName))
		if text, err := os.ReadFile(topology); err != nil || bytes.Count(text, []byte(`<net name="peerlane_`)) != 1 {
			t.Errorf("topology file %q, %v", text, err)
		}
		table := c.bed.mustPeerlane("relay", "inspect", c.id)
		for _, word := range []string{"network", "10.211.0.", "tcp"} {
			if !strings.Contains(table, word) {
				t.Errorf("inspect does not show %q: %s", word, table)
			}
		}
		secret, err := os.ReadFile(c.bed.Layout.ClusterKey())
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(secret), "\n")[1:] {
			if fields := strings.Fields(line); len(fields) == 4 {
				c.bed.nowhere(c, fields[3])
			}
		}
	}
	if ignored := verifier.generation().Ignored; len(ignored) != 1 || !strings.Contains(ignored[0], "network.interfaces") {
		t.Errorf("NCCL_SOCKET_IFNAME: %q", ignored)
	}
	relay := echo.generation().Status.Relay.PID
	verifier.mustLearn(kill(t, relay), echo.id, "10.211.0.2", "plnet0")
}

// nowhere requires that a secret is in no file, argument or environment of a container's
// generation.
func (b *bed) nowhere(c *container, secret string) {
	b.Helper()
	var files []string
	processes := b.inspection(c).Processes
	if len(processes) < 2 {
		b.Fatalf("the generation has the processes %+v", processes)
	}
	for _, p := range processes {
		for _, name := range []string{"cmdline", "environ"} {
			files = append(files, fmt.Sprintf("/proc/%d/%s", p.PID, name))
		}
	}
	err := filepath.WalkDir(b.Root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && path != b.Layout.ClusterKey() && strings.Contains(path, "peerlane/") {
			files = append(files, path)
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(secret)) {
			b.Errorf("%s has the cluster key", file)
		}
	}
}

// echoed lists the message sizes in bytes: inline in a control message, part of a write, a slot,
// and larger.
var echoed = []uint64{1, 8, 4096, 4097, 1 << 20, 5<<20 + 3, streamBytes, 0}

// once is an argument of verify and echo: the role closes the connections after the exchange.
const once = "once"

// verify sends random bytes to an echo on another host and compares the returned bytes. It repeats
// until an exchange fails, and prints the error.
func verify(arguments []string) error {
	return inBothDirections(arguments, func(ctx context.Context, c *gpuClient,
		sending, receiving *client.Connection) error {
		var memories [2]*client.Memory
		for i := range memories {
			m, err := c.session.HostMemory(ctx, client.HostMemory{Bytes: streamBytes, GPU: c.gpu})
			if err != nil {
				return err
			}
			memories[i] = m
		}
		out, in := memories[0], memories[1]
		random := rand.NewChaCha8([32]byte{10})
		for round := 0; ; round++ {
			n := uint64(64 << 10)
			if round < len(echoed) {
				n = echoed[round]
				_, _ = random.Read(out.Data) // never fails
				clear(in.Data)
			}
			receive, err := receiving.Receive(in, 0, n)
			if err != nil {
				return err
			}
			send, err := sending.Send(out, 0, n)
			if err != nil {
				return err
			}
			for _, op := range []*client.Operation{send, receive} {
				if _, err := op.Wait(ctx); err != nil {
					return err
				}
			}
			if !bytes.Equal(in.Data[:n], out.Data[:n]) {
				return fmt.Errorf("message %d of %d bytes came back wrong", round, n)
			}
			if round == len(echoed) {
				emit(event{Kind: "verified"})
				if slices.Contains(arguments, once) {
					return nil
				}
			}
		}
	})
}

// echo returns received messages.
func echo(arguments []string) error {
	return inBothDirections(arguments, func(ctx context.Context, c *gpuClient,
		sending, receiving *client.Connection) error {
		for {
			receive, err := receiving.Receive(c.in, 0, streamBytes)
			if err != nil {
				return err
			}
			n, err := receive.Wait(ctx)
			if err != nil {
				return err
			}
			send, err := sending.Send(c.in, 0, n)
			if err != nil {
				return err
			}
			if _, err := send.Wait(ctx); err != nil {
				return err
			}
		}
	})
}

// inBothDirections connects with a client on another host in both directions, connects again after the end,
// and waits for the end of input.
func inBothDirections(arguments []string, exchange func(context.Context, *gpuClient, *client.Connection,
	*client.Connection) error) error {
	runtime.LockOSThread()
	ctx := context.Background()
	d, device, gpu, err := openGPU()
	if err != nil {
		return err
	}
	c, err := attach(ctx, d, device, gpu)
	if err != nil {
		return err
	}
	for orders := json.NewDecoder(os.Stdin); ; {
		emit(event{Kind: "listening", Handle: c.listener.Handle()})
		var order event
		if err := orders.Decode(&order); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if order.Handle != (wire.Handle{}) { // otherwise the order asks only for another handle
			sending, err := c.session.Connect(ctx, gpu, order.Handle)
			if err != nil {
				return err
			}
			receiving, err := c.listener.Accept(ctx)
			if err != nil {
				return err
			}
			err = exchange(ctx, c, sending, receiving)
			if !slices.Contains(arguments, once) {
				fail(err)
			} else if err != nil && wire.StatusOf(err) != wire.StatusPeerClosed {
				return err
			} else if err := errors.Join(sending.Close(ctx), receiving.Close(ctx)); err != nil {
				return err
			}
		}
		if c.listener, err = c.session.Listen(ctx, gpu); err != nil {
			return err
		}
	}
}
