// Package inside has helpers for tests in a guest: PCIe tree, RDMA devices on network cards,
// cables, and the other guest.
package inside

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/pcitree"
	"github.com/peerlane/peerlane/integration/vm/wiring"
)

// Kinds of RDMA devices that the kernel makes of network cards.
const (
	RoCE  = "rxe"
	IWARP = "siw"
)

// Binaries is the directory of Peerlane's programs.
const Binaries = "/share/bin"

// longest is the limit of a command; the slowest command, a demo, takes half a minute.
const longest = 5 * time.Minute

// patience is ten times the longest wait in a guest.
const patience = 30 * time.Second

// Command runs a program to its end and returns the output; an exit status other than 0 fails the
// test.
func Command(t testing.TB, name string, arguments ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), longest, fmt.Errorf("not within %v", longest))
	defer cancel()
	c := exec.CommandContext(ctx, name, arguments...)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(arguments, " "), cmp.Or(context.Cause(ctx), err), out, errs.Bytes())
	}
	return string(out)
}

// SystemIsUp waits until systemd has booted the system; the agent starts earlier. A failed unit is
// an error.
func SystemIsUp() error {
	out, err := exec.Command("systemctl", "is-system-running", "--wait").CombinedOutput()
	if err == nil {
		return nil
	}
	failed, listed := exec.Command("systemctl", "--failed", "--no-legend").CombinedOutput()
	return errors.Join(fmt.Errorf("the system is not up (%w), but %s%s", err, out, failed), listed)
}

// Tree loads a table of package pcitree until the test ends.
func Tree(t testing.TB, text string) *pcitree.Tree {
	t.Helper()
	tree, err := pcitree.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := Load(tree); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pcitree.Unload(); err != nil {
			t.Error(err)
		}
	})
	return tree
}

// Load loads a tree; pcitree.Unload removes the tree.
func Load(tree *pcitree.Tree) error {
	if err := modprobe("pcitree"); err != nil {
		return err
	}
	return tree.Load()
}

func modprobe(modules ...string) error {
	if out, err := exec.Command("modprobe", append([]string{"-a"}, modules...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("modprobe %q: %w: %s", modules, err, out)
	}
	return nil
}

// NamedTree loads a tree of package pcitree until the test ends.
func NamedTree(t testing.TB, name string) *pcitree.Tree {
	t.Helper()
	text, err := pcitree.ReadTable(name)
	if err != nil {
		t.Fatal(err)
	}
	return Tree(t, text)
}

// Card creates a dummy network card until the test ends, for more RDMA devices than the guest has
// rails.
func Card(t testing.TB, name string) {
	t.Helper()
	card := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: name}}
	err := netlink.LinkAdd(card)
	if err == nil {
		t.Cleanup(func() {
			if err := netlink.LinkDel(card); err != nil {
				t.Errorf("removing network card %s: %v", name, err)
			}
		})
		err = netlink.LinkSetUp(card)
	}
	if err != nil {
		t.Fatalf("network card %s: %v", name, err)
	}
}

// Device describes an RDMA device.
type Device struct {
	Name string
	Kind string // RoCE or IWARP
	Card string // the network card: rail0, rail1
	// Parent is the PCI function of the device; may be empty.
	Parent string
}

// RDMA makes devices until the test ends.
func RDMA(t testing.TB, devices ...Device) {
	t.Helper()
	remove, err := MakeRDMA(devices...)
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// MakeRDMA creates devices; remove removes the created devices, also after an error.
func MakeRDMA(devices ...Device) (remove func() error, err error) {
	var made, parameters []string
	remove = func() (err error) {
		// Reset the parameter for later devices without a parent: a comma names no device; an empty
		// write has no effect.
		for _, file := range parameters {
			err = errors.Join(err, os.WriteFile(file, []byte(","), 0))
		}
		for _, name := range made {
			// The mount of the namespace's devices may hold the device for a moment.
			if failed := netlink.RdmaLinkDel(name); failed != nil {
				err = errors.Join(err, fmt.Errorf("remove RDMA device %s: %w", name, failed))
			}
		}
		return err
	}
	parents := map[string][]string{}
	for _, d := range devices {
		list := parents[d.Kind]
		if d.Parent != "" {
			list = append(list, d.Name+"="+d.Parent)
		}
		parents[d.Kind] = list
	}
	for kind, list := range parents {
		module := map[string]string{RoCE: "rdma_rxe", IWARP: "siw"}[kind]
		if err := modprobe(module, "ib_uverbs", "rdma_ucm"); err != nil {
			return remove, err
		}
		file := "/sys/module/" + module + "/parameters/parents"
		if err := os.WriteFile(file, []byte(strings.Join(list, ",")+","), 0); err != nil {
			return remove, err
		}
		parameters = append(parameters, file)
	}
	for _, d := range devices {
		if err := netlink.RdmaLinkAdd(d.Name, d.Kind, d.Card); err != nil {
			return remove, fmt.Errorf("an RDMA device %s (%s) on %s: %w", d.Name, d.Kind, d.Card, err)
		}
		made = append(made, d.Name)
	}
	return remove, nil
}

// Port reads an attribute of an RDMA device's port 1 ("state", "rate").
func Port(t testing.TB, device, attribute string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/sys/class/infiniband", device, "ports/1", attribute))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// Eventually waits until so returns ok, and fails the test with the last description at the limit.
func Eventually(t testing.TB, what string, so func() (ok bool, state string)) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		ok, state := so()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v; it is %s", what, patience, state)
		}
	}
}

// Plug plugs or unplugs a card's cable. The end of the test plugs an unplugged cable again.
func Plug(t testing.TB, card string, plugged bool) {
	t.Helper()
	if err := plug(card, plugged); err != nil {
		t.Fatal(err)
	}
	if !plugged {
		t.Cleanup(func() {
			if err := plug(card, true); err != nil {
				t.Error(err)
			}
		})
	}
}

func plug(card string, plugged bool) error {
	return ask(wiring.Request{Card: card, Plugged: plugged})
}

// StopOther stops the other guest's processors, like a dead host, until goOn is called or the test
// ends.
func StopOther(t testing.TB) (goOn func()) {
	t.Helper()
	var once sync.Once
	goOn = func() {
		once.Do(func() {
			if err := ask(wiring.Request{Other: wiring.Continue}); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(goOn)
	if err := ask(wiring.Request{Other: wiring.Stop}); err != nil {
		t.Fatal(err)
	}
	return goOn
}

// ask sends a request to the host.
func ask(r wiring.Request) (err error) {
	port, err := wiring.OpenPort(wiring.HostPort)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, port.Close()) }()
	if err := port.SetDeadline(time.Now().Add(patience)); err != nil && !errors.Is(err, os.ErrNoDeadline) {
		return err
	}
	request, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if _, err := port.Write(append(request, '\n')); err != nil {
		return fmt.Errorf("request from the host %s: %w", request, err)
	}
	line, err := bufio.NewReader(port).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("request from the host %s: %w", request, err)
	}
	var answer wiring.Answer
	if err := json.Unmarshal(line, &answer); err != nil {
		return err
	}
	if answer.Failed != "" {
		return errors.New(answer.Failed)
	}
	return nil
}

// Disturb makes a card lose, delay and reorder sent packets, as netlink.NetemQdiscAttrs specifies
// (times in microseconds, chances in percent), until the next call or the end of the test.
func Disturb(t testing.TB, card string, how netlink.NetemQdiscAttrs) {
	t.Helper()
	link, err := netlink.LinkByName(card)
	if err != nil {
		t.Fatal(err)
	}
	Command(t, "modprobe", "sch_netem")
	qdisc := netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
		Parent: netlink.HANDLE_ROOT}, how)
	if err := netlink.QdiscReplace(qdisc); err != nil {
		t.Fatalf("netem on %s: %v", card, err)
	}
	t.Cleanup(func() {
		if err := netlink.QdiscDel(qdisc); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("netem on %s: %v", card, err)
		}
	})
}

// Other connects to the agent of the other guest.
func Other(t testing.TB) *control.Client {
	t.Helper()
	guest, ok := wiring.Guest()
	if !ok {
		t.Fatal("this guest is alone; the case needs two joined guests")
	}
	dialer := net.Dialer{Timeout: patience}
	conn, err := dialer.DialContext(t.Context(), "tcp", wiring.Agent(wiring.Guests-1-guest))
	if err != nil {
		t.Fatalf("the other guest's agent: %v", err)
	}
	c := control.NewClient(conn)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// OnOther runs a program in the other guest to its end, and returns the output.
func OnOther(t testing.TB, c *control.Client, name string, arguments ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), longest, fmt.Errorf("not within %v", longest))
	defer cancel()
	var out bytes.Buffer
	if err := c.Run(ctx, control.Command{Argv: append([]string{name}, arguments...)}, nil, &out, &out); err != nil {
		t.Fatalf("in the other guest: %v\n%s", err, out.Bytes())
	}
	return out.String()
}
