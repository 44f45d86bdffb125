//go:build vm

package pair_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/integration/across"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/pcitree"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/topo/planner"
)

// In each guest the test binary also plays an administrator who installs Peerlane and starts a
// container: `TEST host RUNTIME KEY`. The binary forwards input to the container, whose program is
// `TEST across`, and the container's output.

// hostLine is a line of output: of the container, or an answer to inspect.
type hostLine struct {
	across.Line
	Container  string              `json:"container,omitempty"` // with the kind started
	Inspection *control.Inspection `json:"inspection,omitempty"`
}

const (
	running   = "started"
	inspect   = "inspect"
	inspected = "inspected"
)

// leftTime is the limit for a supervisor to end after the container, in an emulated guest.
const leftTime = time.Minute

func beHost(runtimeName, key, transport string) (err error) {
	ctx := context.Background()
	undo, err := hardware()
	defer func() { err = errors.Join(err, undo()) }()
	if err != nil {
		return err
	}
	root, err := os.MkdirTemp("", "pl") // short, for the length of a socket's path
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	if err := os.Chmod(root, 0o711); err != nil { // relays traverse the directory
		return err
	}
	h, err := install(root, key, transport)
	defer func() { // before the removal of the root
		_, unmounted := paths.New(root).UnmountAnchor()
		err = errors.Join(err, unmounted)
	}()
	if err != nil {
		return err
	}
	r, err := bundle.FindRuntime(runtimeName, h.RuntimeState())
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.State, 0o700); err != nil {
		return err
	}
	before, err := h.Look()
	if err != nil {
		return err
	}
	if err := run(ctx, h, r); err != nil {
		return err
	}
	left, err := h.Left(before, leftTime)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("left on the host: %q", left)
	}
	return err
}

// hardware loads GPUs, switches and NICs into this kernel's PCIe tree.
func hardware() (undo func() error, err error) {
	undo = func() error { return nil }
	text, err := pcitree.ReadTable("two-nics")
	if err != nil {
		return undo, err
	}
	tree, err := pcitree.Parse(text)
	if err != nil {
		return undo, err
	}
	if err := inside.Load(tree); err != nil {
		return undo, err
	}
	remove, err := inside.MakeRDMA(
		inside.Device{Name: "mlx5_0", Kind: inside.RoCE, Card: "rail0", Parent: "0000:1a:00.0"},
		inside.Device{Name: "mlx5_1", Kind: inside.RoCE, Card: "rail1", Parent: "0000:9c:00.0"})
	return func() error { return errors.Join(remove(), pcitree.Unload()) }, err
}

// install makes this guest a host of Peerlane: it writes the configuration and the cluster key, and
// runs the installed program to plan and write specifications for the kernel's PCIe tree.
func install(root, key, transport string) (*testbed.Host, error) {
	h, err := testbed.New(root, inside.Binaries, testbed.GPUsOfKernel)
	if err != nil {
		return nil, err
	}
	if err := h.Configure(func(c *config.Config) {
		c.Network.Interfaces, c.Relay.Transport = "=rail0", transport
		c.Verbs.Timeout = 20 // for rxe in emulation: docs/network.md
	}); err != nil {
		return nil, err
	}
	secret, err := os.ReadFile(key)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(h.Layout.ClusterKey(), secret, 0o600); err != nil {
		return nil, err
	}
	// Keep the GPU vendor's specification; replace Peerlane's.
	own, err := filepath.Glob(filepath.Join(h.CDIDir(), "peerlane*"))
	if err != nil || len(own) == 0 {
		return nil, fmt.Errorf("%d specifications of Peerlane's: %v", len(own), err)
	}
	for _, file := range append(own, h.Layout.PlanFile()) {
		if err := os.Remove(file); err != nil {
			return nil, err
		}
	}
	if _, err := program("--root", root, "cdi", "generate", "--spec-dir", h.CDIDir(), "--hook",
		h.HookBinary()); err != nil {
		return nil, err
	}
	h.Plan, err = planner.Read(h.Layout.PlanFile())
	return h, err
}

func program(arguments ...string) ([]byte, error) {
	out, err := exec.Command(filepath.Join(inside.Binaries, "peerlane"), arguments...).Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		err = fmt.Errorf("peerlane %q: %w: %s", arguments, err, failed.Stderr)
	}
	return out, err
}

// run runs a container with a far GPU and its lane until the input ends.
func run(ctx context.Context, h *testbed.Host, r *bundle.Runtime) error {
	lanes, err := h.TwoClients()
	if err != nil {
		return err
	}
	gpu, err := h.Plan.GPU(lanes[0].GPU)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	built, err := h.Bundle("across", bundle.File{Host: self, Container: "/usr/bin/test"}, testbed.Devices(gpu), "across")
	if err != nil {
		return err
	}
	id := h.ContainerID("across")
	c := r.Run(ctx, built, id)
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		return err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	var mu sync.Mutex // guards the output
	write := func(line []byte) error {
		mu.Lock()
		defer mu.Unlock()
		_, err := os.Stdout.Write(append(line, '\n'))
		return err
	}
	text, err := json.Marshal(hostLine{Line: across.Line{Kind: running}, Container: id})
	if err == nil {
		err = write(text)
	}
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return err
	}
	passed := make(chan error, 1)
	go func() {
		lines := bufio.NewScanner(out)
		var err error
		for lines.Scan() && err == nil {
			err = write(lines.Bytes())
		}
		passed <- errors.Join(err, lines.Err())
	}()
	ordered := take(h, id, in, write)
	return errors.Join(ordered, <-passed, c.Wait(), r.Delete(ctx, id))
}

// take passes orders on until the end of the orders.
func take(h *testbed.Host, id string, to io.WriteCloser, write func([]byte) error) error {
	defer to.Close()
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var o across.Order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return err
		}
		if o.Do != inspect {
			if _, err := to.Write(append(lines.Bytes(), '\n')); err != nil {
				return err
			}
			continue
		}
		out, err := program("--root", h.Root, "relay", "inspect", id, "-o", "json")
		if err != nil {
			return err
		}
		var list []*control.Inspection
		if err := json.Unmarshal(out, &list); err != nil || len(list) != 1 {
			return fmt.Errorf("%d generations, want 1: %v", len(list), err)
		}
		text, err := json.Marshal(hostLine{Line: across.Line{Kind: inspected}, Inspection: list[0]})
		if err == nil {
			err = write(text)
		}
		if err != nil {
			return err
		}
	}
	return lines.Err()
}

// programs runs the further programs of the test binary, for the second guest and for containers.
func programs(arguments []string) (ok bool, err error) {
	switch {
	case len(arguments) == 2 && arguments[0] == "receive":
		return true, receive(arguments[1])
	case len(arguments) == 3 && arguments[0] == "relay":
		return true, relayTo(os.Stdin, arguments[1], arguments[2])
	case len(arguments) == 1 && arguments[0] == "talk":
		return true, talkTo(os.Stdin)
	case len(arguments) == 3 && arguments[0] == "bare":
		return true, beBareHost(arguments[1], arguments[2])
	case len(arguments) == 4 && arguments[0] == "host":
		return true, beHost(arguments[1], arguments[2], arguments[3])
	case strings.Join(arguments, " ") == "across":
		return true, across.Serve(os.Stdin, os.Stdout, client.DefaultSocket)
	}
	return false, nil
}
