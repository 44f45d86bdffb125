package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/topo"
)

// Process returns a `peerlane` command outside of a container that sees one GPU and, with
// ClientCopy, its server GPUs. It does not start the command.
func (h *Host) Process(ctx context.Context, g topo.GPU, arguments ...string) (*exec.Cmd, error) {
	return h.Program(ctx, "peerlane", g, arguments...)
}

// Program is Process for another program in the directory Binaries.
func (h *Host) Program(ctx context.Context, name string, g topo.GPU, arguments ...string) (*exec.Cmd, error) {
	environment, err := h.PlainEnvironment(g)
	if err != nil {
		return nil, err
	}
	c := exec.CommandContext(ctx, filepath.Join(h.Binaries, name), arguments...)
	c.Env = append([]string{"PATH=/usr/bin:/bin"}, environment...)
	return c, nil
}

// Launch starts the relay of a GPU's lane for a plain process, like the hook for a container.
func (h *Host) Launch(id string, g topo.GPU, pid int) (*generation.Generation, error) {
	lanes, err := lanes.Find(h.Plan, []string{g.UUID + "@" + g.BusID})
	if err != nil {
		return nil, err
	}
	lanes[0].Copy = h.ClientCopy
	return hook.Launch(h.Layout, hook.Request{
		Container:  generation.Container{ID: id, PID: pid},
		Lanes:      lanes,
		Config:     h.Config,
		HookBinary: h.HookBinary(),
	})
}

// Socket returns the path of a generation's socket for clients.
func (h *Host) Socket(g *generation.Generation) string {
	return filepath.Join(h.Layout.SocketDir(g.ID), paths.SocketName)
}

// Measuring is a process that sees every GPU and executes measure.Jobs.
type Measuring struct {
	command *exec.Cmd
	in      io.WriteCloser
	out     *json.Decoder
	errors  Tail
}

// StartMeasuring starts a Measuring.
func (h *Host) StartMeasuring(ctx context.Context) (*Measuring, error) {
	m := &Measuring{command: exec.CommandContext(ctx, filepath.Join(h.Binaries, "peerlane"), "measure")}
	m.command.Env = append([]string{"PATH=/usr/bin:/bin"}, h.Environment...)
	if h.Software() {
		m.command.Env = append(m.command.Env, h.rdma.Environment()...)
	}
	m.command.Stderr = &m.errors
	var err error
	if m.in, err = m.command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := m.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	m.out = json.NewDecoder(out)
	return m, m.command.Start()
}

// Do executes a Job in the process.
func (m *Measuring) Do(j measure.Job) (measure.Result, error) {
	r, err := measure.Ask(m.in, m.out, j)
	if err != nil {
		return r, fmt.Errorf("measure: %w %s", err, m.errors.String())
	}
	return r, nil
}

// Close ends the process.
func (m *Measuring) Close() error {
	m.in.Close()
	return m.command.Wait()
}

// Tail keeps the end of a process's output. A caller can read it while the process writes.
type Tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 64 << 10

func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	t.text = t.text[max(0, len(t.text)-tailBytes):]
	return len(b), nil
}

func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.text))
}
