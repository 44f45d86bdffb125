//go:build engines

package engines

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"time"

	cdiengine "github.com/peerlane/peerlane/cdi/engine"
	"github.com/peerlane/peerlane/internal/testutil"
)

// configuration is an engine's file, and the arguments of peerlane runtime configure.
type configuration struct {
	engine, file string
	base         string // the file before
	switches     []string
}

// peerlaneRuntime runs a command of peerlane runtime on an engine's file.
func (b *bed) peerlaneRuntime(command string, switches ...string) string {
	b.Helper()
	words := []string{filepath.Join(b.Binaries, "peerlane"), "runtime", command, "--root", b.Root, "--runtime",
		b.configured.engine}
	if command != "remove" {
		words = append(words, "--config", b.configured.file)
	}
	return b.mustDo(append(words, switches...)...)
}

// configure writes a configuration without CDI devices, and lets peerlane change it. The engine
// starts with the result.
func (b *bed) configure(engine, name, base string, switches ...string) (file string) {
	b.Helper()
	file = b.write(name, base)
	b.configured = configuration{engine, file, base, switches}
	if output := b.peerlaneRuntime("configure", switches...); !strings.Contains(output, "wrote "+file) {
		b.Fatalf("peerlane runtime configure changed nothing: %s", output)
	}
	return file
}

// configured requires that the engine with the changed configuration gives a container its lane,
// that peerlane reports the engine as ready, and that removal restores the file byte for byte.
func configured(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	e := b.engine
	if one, ok := e.(interface{ byRuntime(*bed) engine }); ok && b.configured.engine == cdiengine.Podman {
		e = one.byRuntime(b)
	}
	if err := e.run(ctx, c.ask); err != nil {
		b.Error(err)
	}
	b.judge(c, b.lastReport(c.ask, 1))

	var states []cdiengine.State
	output := b.peerlaneRuntime("status", "--output", "json")
	if err := json.Unmarshal([]byte(output), &states); err != nil || len(states) != 1 {
		b.Fatalf("%v in %s", err, output)
	}
	s := states[0]
	if !s.Configured || s.CDI == cdiengine.CDIOff || s.Daemon != (b.daemon != nil) {
		b.Errorf("peerlane runtime status says %+v", s)
	}
	if output := b.peerlaneRuntime("configure", append(b.configured.switches, "--dry-run")...); !strings.Contains(output,
		"nothing has to be changed") {
		b.Errorf("a second change is pending: %s", output)
	}
	after, err := os.ReadFile(b.configured.file)
	if err != nil {
		b.Fatal(err)
	}
	b.peerlaneRuntime("remove")
	if text, err := os.ReadFile(b.configured.file); err != nil || string(text) != b.configured.base {
		b.Errorf("after removal: %q, %v; original: %q", text, err, b.configured.base)
	}
	b.peerlaneRuntime("configure", b.configured.switches...)
	if text, err := os.ReadFile(b.configured.file); err != nil || string(text) != string(after) {
		b.Errorf("after the second configuration: %q, %v; want %q", text, err, after)
	}
}
