package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/integration/vm"
)

// session is a temporary directory that machines and host share, and the machines.
type session struct {
	dir      string // short, for sockets
	share    string // /share in the guests
	source   string // the repository, /source in the guests
	image    *vm.Image
	machines []*vm.Machine
}

// images returns an image, and builds it if necessary.
func images(ctx context.Context, kind string) (*vm.Image, error) {
	builder := vm.Builder{Progress: logf}
	return builder.Image(ctx, kind)
}

func newSession(ctx context.Context, kind string) (*session, error) {
	image, err := images(ctx, kind)
	if err != nil {
		return nil, err
	}
	s := &session{image: image}
	if s.source, err = repository(); err != nil {
		return nil, err
	}
	if s.dir, err = os.MkdirTemp("", "peerlane-vm-"); err != nil {
		return nil, err
	}
	s.share = filepath.Join(s.dir, "share")
	if err := s.fill(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func repository() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m: %w; run this in Peerlane's source", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// fill copies Peerlane's programs and the agent to the guests' directory.
func (s *session) fill(ctx context.Context) error {
	for _, dir := range []string{"bin", "test", "out"} {
		if err := os.MkdirAll(filepath.Join(s.share, dir), 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{programs.Peerlane, programs.Hook, programs.Relay, programs.Runtime, sim.LibraryName} {
		from := filepath.Join(s.source, "bin", name)
		if err := link(from, filepath.Join(s.share, "bin", name)); err != nil {
			return fmt.Errorf("%w; build it with `make build`", err)
		}
	}
	// A test process looks for the simulator in its own directory.
	if err := link(filepath.Join(s.source, "bin", sim.LibraryName),
		filepath.Join(s.share, "test", sim.LibraryName)); err != nil {
		return err
	}
	// `make build` omits the programs of tests.
	if err := programs.Build(filepath.Join(s.share, "bin"), programs.WireGenerate, programs.Traffic); err != nil {
		return err
	}
	return goTool(ctx, s.source, []string{"CGO_ENABLED=0"}, "build", "-trimpath", "-ldflags", "-s -w", "-o", s.agent(),
		"./integration/vm/guest")
}

func (s *session) agent() string { return filepath.Join(s.dir, "guest") }

// link creates a hard link, or copies the file to another file system.
func link(from, to string) error {
	if err := os.Link(from, to); err == nil || errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

func goTool(ctx context.Context, dir string, environment []string, arguments ...string) error {
	c := vm.Program(ctx, "go", arguments...)
	c.Dir = dir
	c.Env = append(os.Environ(), environment...)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(arguments, " "), err, out)
	}
	return nil
}

// start boots machines, and joins two machines.
func (s *session) start(ctx context.Context, guests int) error {
	var network *vm.Network
	if guests > 1 {
		network = &vm.Network{Dir: s.dir}
	}
	for guest := range guests {
		dir := filepath.Join(s.dir, fmt.Sprint(guest))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	type started struct {
		guest   int
		machine *vm.Machine
		err     error
	}
	results := make(chan started, guests)
	for guest := range guests {
		go func() {
			m, err := vm.Start(ctx, vm.Options{
				Image: s.image, Dir: filepath.Join(s.dir, fmt.Sprint(guest)), Agent: s.agent(), Share: s.share, Source: s.source,
				Network: network, Guest: guest,
			})
			results <- started{guest, m, err}
		}()
	}
	s.machines = make([]*vm.Machine, guests)
	var failed []error
	for range guests {
		r := <-results
		s.machines[r.guest] = r.machine
		failed = append(failed, r.err)
	}
	return errors.Join(failed...)
}

// keep moves the guests' output to a directory of the repository.
func (s *session) keep(into string) error {
	if err := os.MkdirAll(filepath.Dir(into), 0o755); err != nil {
		return err
	}
	// Use a temporary name until the directory is complete: another runner may do the same.
	whole, err := os.MkdirTemp(filepath.Dir(into), filepath.Base(into)+".")
	if err != nil {
		return err
	}
	if err := os.Chmod(whole, 0o755); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(whole, "out"), os.DirFS(filepath.Join(s.share, "out"))); err != nil {
		return errors.Join(err, os.RemoveAll(whole))
	}
	for guest := range s.machines {
		text, err := os.ReadFile(filepath.Join(s.dir, fmt.Sprint(guest), "console.log"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(whole, fmt.Sprintf("console%d.log", guest)), text, 0o644)
		}
		if err != nil {
			return errors.Join(err, os.RemoveAll(whole))
		}
	}
	err = os.RemoveAll(into)
	if err == nil {
		err = os.Rename(whole, into)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(whole))
	}
	return nil
}

func (s *session) close() error {
	for _, m := range s.machines {
		if m != nil {
			m.Stop()
		}
	}
	return os.RemoveAll(s.dir)
}
