package integration_test

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
)

const (
	// escapeFile and escapeNode are names of a file and of a character device that set a terminal's
	// title and clear the screen.
	escapeFile = "/dev/nvidia70\x1b]0;file\x07"
	escapeNode = "/dev/nvidia71\x1b[2J"
	// escapeCommand is the name of the process that has both files open.
	escapeCommand = "a\x1b[31mb"
)

// escape opens files whose names contain terminal escape sequences, and waits for the end of input.
func escape() error {
	name := append([]byte(escapeCommand), 0)
	if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/self/comm", []byte(escapeCommand), 0); err != nil {
		return err
	}
	if err := unix.Mknod(escapeNode, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil { // as /dev/null
		return fmt.Errorf("mknod: %w", err)
	}
	var open []*os.File
	for _, path := range []string{escapeFile, escapeNode} {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		open = append(open, f)
	}
	emit(event{Kind: "escaped"})
	_, err := io.Copy(io.Discard, os.Stdin)
	for _, f := range open {
		f.Close()
	}
	return err
}

// Names of a container's devices and process contain escape sequences: no command prints the
// sequences to the terminal, and only a character device counts as a device.
func TestTerminalEscapesOfAContainerAreNotPrinted(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			b.edit = func(built *bundle.Bundle) {
				capabilities := []string{"CAP_MKNOD"} // capabilities of Docker's default
				built.Spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities,
					Permitted: capabilities}
			}
			c := b.start(b.lanes[0], "escape")
			c.next("escaped")
			for _, command := range [][]string{{"relay", "list"}, {"relay", "inspect", c.id}, {"relay", "drain", c.id}} {
				out, err := b.peerlane(command...)
				if err != nil {
					t.Errorf("peerlane %s: %v: %q", strings.Join(command, " "), err, out)
				}
				if strings.ContainsAny(out, "\x1b\x07\u009b") {
					t.Errorf("peerlane %s prints an escape sequence: %q", strings.Join(command, " "), out)
				}
				if command[1] == "drain" && (!strings.Contains(out, "/dev/nvidia71") || strings.Contains(out, "/dev/nvidia70")) {
					t.Errorf("listed devices differ from the container's character device: %q", out)
				}
			}
		})
	}
}
