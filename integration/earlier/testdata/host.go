// Command host prepares a simulated host and two containers with the code of the earlier commit:
//
//	host DIR BINARIES LIBRARY PROGRAM ROUTE
//
// DIR is the host's root, BINARIES has the earlier peerlane-hook and peerlane-relay, LIBRARY is the
// earlier libpeerlane, PROGRAM the program of the containers. The command starts the NICs, prints one
// JSON object, and ends the NICs when its standard input ends.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/integration/bundle"
	"github.com/peerlane/peerlane/integration/testbed"
	"github.com/peerlane/peerlane/relay/libpeerlane"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(root, binaries, library, program, route string) error {
	h, err := testbed.New(root, binaries, testbed.GPUsSimulated)
	if err != nil {
		return err
	}
	at := filepath.Join(h.Layout.Libraries(), libpeerlane.Name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if err := bundle.CopyFile(library, at); err != nil {
		return err
	}
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Route, c.Relay.Slots, c.Relay.SlotSize = route, 4, 1<<20
	}); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	lanes, err := h.TwoClients()
	if err != nil {
		return err
	}
	var made struct {
		Bundles []string
		Library string
	}
	made.Library = at
	for i, lane := range lanes {
		g, err := h.Plan.GPU(lane.GPU)
		if err != nil {
			return err
		}
		// A program that is linked with libpeerlane gets the library from the mount, not from the image.
		dir := filepath.Join(root, "bundles", fmt.Sprint(i))
		image := filepath.Join(dir, "rootfs")
		if err := bundle.RootFS(image, []bundle.File{{Host: self}}, append(h.Libraries, library)...); err != nil {
			return err
		}
		if err := bundle.CopyFile(program, filepath.Join(image, "usr/bin/transfer")); err != nil {
			return err
		}
		b := bundle.New(dir, "/usr/bin/transfer")
		if err := b.Inject(h.CDIDir(), testbed.Devices(g)...); err != nil {
			return err
		}
		if err := b.Write(); err != nil {
			return err
		}
		made.Bundles = append(made.Bundles, b.Dir)
	}
	stop, err := h.StartNICs(context.Background(), lanes[:]...)
	if err != nil {
		return err
	}
	err = json.NewEncoder(os.Stdout).Encode(made)
	if err == nil {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	return errors.Join(err, stop())
}
