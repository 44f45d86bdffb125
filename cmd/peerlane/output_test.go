package main

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// onTerminal runs a command line with a terminal of so many columns as its
// standard output, and returns what the terminal got.
func onTerminal(t *testing.T, columns uint16, args ...string) string {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine gives no pseudo-terminal: %v", err)
	}
	defer master.Close()
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine gives no pseudo-terminal: %v", err)
	}
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 50, Col: columns}); err != nil {
		t.Fatal(err)
	}
	seen := make(chan string)
	go func() {
		var all bytes.Buffer
		_, _ = all.ReadFrom(master) // EIO: the other end was closed, and all was read
		seen <- all.String()
	}()
	var errOut bytes.Buffer
	code := run(args, slave, &errOut)
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	out := <-seen
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, errOut.String())
	}
	return strings.ReplaceAll(out, "\r\n", "\n")
}

var escape = regexp.MustCompile("\x1b\\[[0-9;]*m")

func TestATerminalGetsColoursAndItsWidth(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	_, host := recordedHost(t)
	args := append([]string{"plan", "--root", t.TempDir()}, host...)
	for _, columns := range []uint16{90, 120, 250} {
		out := onTerminal(t, columns, args...)
		if !escape.MatchString(out) {
			t.Errorf("%d columns: no colours", columns)
		}
		body := out[strings.Index(out, "Lanes"):] // above it there is a path of any length
		for line := range strings.Lines(body) {
			line = strings.TrimRight(escape.ReplaceAllString(line, ""), " \n")
			if len(line) > int(columns) {
				t.Errorf("a line of %d on %d columns: %s", len(line), columns, line)
			}
		}
	}
	t.Setenv("NO_COLOR", "1")
	if out := onTerminal(t, 120, args...); escape.MatchString(out) {
		t.Error("colours in spite of NO_COLOR")
	}
}
