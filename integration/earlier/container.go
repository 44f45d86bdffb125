package earlier

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

// Container is a running container of Program.
type Container struct {
	testing.TB
	ID string

	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan string
	last   []string // the last lines
	stderr bytes.Buffer
}

// Start executes the command of a container in the foreground.
func Start(t testing.TB, id string, command *exec.Cmd) *Container {
	t.Helper()
	c := &Container{TB: t, ID: id, cmd: command, lines: make(chan string, 1000)}
	c.cmd.Stderr = &c.stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			c.lines <- lines.Text()
		}
		close(c.lines)
	}()
	return c
}

// End closes the standard input, calls stop to end the container, and waits for the command.
func (c *Container) End(stop func() error) {
	if err := errors.Join(c.in.Close(), stop()); err != nil {
		c.Error(err)
	}
	c.Wait()
}

// Wait waits for the end of the command, if the command still runs.
func (c *Container) Wait() {
	for range c.lines {
	}
	c.cmd.Wait() // killed, or waited for before
}

// Next waits for a line that begins with a word, and returns the rest. It discards other lines.
func (c *Container) Next(word string, patience time.Duration) string {
	c.Helper()
	deadline := testutil.After(patience)
	for {
		select {
		case line, ok := <-c.lines:
			c.last = append(c.last[max(0, len(c.last)-9):], line)
			if !ok {
				c.Fatalf("container %s ended before %q, after %q: %s", c.ID, word, c.last, &c.stderr)
			}
			if rest, found := strings.CutPrefix(line, word+" "); found {
				return rest
			}
			if strings.HasPrefix(line, "corrupt") {
				c.Fatalf("container %s: %s", c.ID, line)
			}
		case <-deadline:
			c.Fatalf("container %s does not come to %q, after %q", c.ID, word, c.last)
		}
	}
}

// Introduce connects two containers and waits for verified messages. The sessions must have the
// given versions of the protocol.
func Introduce(a, z *Container, versionA, versionZ int, patience time.Duration) {
	a.Helper()
	handles := map[*Container]string{}
	for c, version := range map[*Container]int{a: versionA, z: versionZ} {
		spoken, handle, _ := strings.Cut(c.Next("listening", patience), " ")
		if spoken != fmt.Sprint(version) {
			c.Errorf("container %s speaks version %s with its relay, not %d", c.ID, spoken, version)
		}
		handles[c] = handle
	}
	fmt.Fprintln(a.in, handles[z])
	fmt.Fprintln(z.in, handles[a])
	a.Next("moving", patience)
	z.Next("moving", patience)
}
