package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
)

// The C example, linked with the flags of pkg-config, runs in two containers whose images have no
// file of Peerlane: the loader finds the mounted library, and the library finds the relay. The
// receiver checks every byte.
func TestCProgramsInContainersExchange(t *testing.T) {
	beside(t)
	compiler, err := exec.LookPath("cc")
	programs.MustHave(t, err)
	b := newBed(t, "runc", asItIs)
	b.nics()

	// As in a package: the library is at the path in the specifications.
	places := libpeerlane.Installed()
	places.DestDir = t.TempDir()
	if err := libpeerlane.Install(places); err != nil {
		t.Fatal(err)
	}
	installed := filepath.Join(places.DestDir, places.Library)
	library, err := os.ReadFile(filepath.Join(installed, libpeerlane.Name))
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(b.Layout.Libraries(), libpeerlane.Name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(filepath.Dir(at), 0o755), os.WriteFile(at, library, 0o755),
		os.Chmod(at, 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := b.Configure(func(c *config.Config) {
		c.Relay.Route, c.Relay.Slots, c.Relay.SlotSize = launch.RouteStaged, 4, 1<<20
	}); err != nil {
		t.Fatal(err)
	}

	program := filepath.Join(t.TempDir(), "transfer")
	out, err := exec.Command(compiler, "-o", program, "../relay/libpeerlane/examples/transfer.c",
		"-I"+filepath.Join(places.DestDir, places.Include), "-L"+installed, "-l:"+libpeerlane.Name, "-ldl").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	var stderr [2]bytes.Buffer
	begin := func(side int, name string, arguments ...string) (*exec.Cmd, *bufio.Reader) {
		t.Helper()
		built := bundle.New(filepath.Join(b.Root, "bundles", name),
			append([]string{"/usr/bin/transfer", "-", "-"}, arguments...)...)
		root := filepath.Join(built.Dir, "rootfs")
		if err := os.MkdirAll(root, 0o755); err != nil {
			t.Fatal(err)
		}
		// The image has the program, and the C library with its separate parts.
		i := newImage(t, root)
		i.asHere()
		for _, name := range []string{"libdl.so.2", "libpthread.so.0"} {
			i.copy(filepath.Join(filepath.Dir(i.libc), name), filepath.Join(filepath.Dir(i.libc), name))
		}
		i.copy(program, "/usr/bin/transfer")
		if err := built.Inject(b.CDIDir(), testbed.Devices(b.gpu(b.lanes[side]))...); err != nil {
			t.Fatal(err)
		}
		if err := built.Write(); err != nil {
			t.Fatal(err)
		}
		c := b.runtime.Run(ctx, built, b.ContainerID(name))
		c.Stderr = &stderr[side]
		stdout, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		return c, bufio.NewReader(stdout)
	}
	end := func(side int, c *exec.Cmd, from *bufio.Reader, want string) {
		t.Helper()
		line, _ := from.ReadString('\n')
		if err := c.Wait(); err != nil || line != want {
			t.Errorf("the program says %q (%v), want %q: %s", line, err, want, &stderr[side])
		}
	}
	receives, received := begin(1, "c-receives", "receive", "3000001", "4", "11")
	handle, err := received.ReadString('\n')
	if err != nil {
		cancel()
		t.Fatalf("no handle: %v, %v: %s", err, receives.Wait(), &stderr[1])
	}
	sends, sent := begin(0, "c-sends", "send", strings.TrimSpace(handle), "3000001", "4", "11")
	end(0, sends, sent, "sent 4 messages of 3000001 bytes\n")
	end(1, receives, received, "received 4 messages of 3000001 bytes\n")
}
