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

// configuration is an engine's file, and what peerlane runtime configure was told.
type configuration struct {
	engine, file string
	base         string // the file before
	switches     []string
}

// peerlaneRuntime runs a command of peerlane runtime on an engine's file.
func (b *bed) peerlaneRuntime(command string, switches ...string) string {
	b.Helper()
	words := []string{filepath.Join(b.Binaries, "peerlane"), "runtime", command, "--root", b.Root, "--runtime", b.configured.engine}
	if command != "remove" {
		words = append(words, "--config", b.configured.file)
	}
	return b.mustDo(append(words, switches...)...)
}

// configure writes a configuration with which the engine would give nobody a CDI
// device, and lets peerlane change it. The engine is then started with the result.
func (b *bed) configure(engine, name, base string, switches ...string) (file string) {
	b.Helper()
	file = b.write(name, base)
	b.configured = configuration{engine, file, base, switches}
	if said := b.peerlaneRuntime("configure", switches...); !strings.Contains(said, "wrote "+file) {
		b.Fatalf("peerlane runtime configure changed nothing: %s", said)
	}
	return file
}

// configured demands of the engine, which runs with what peerlane made of its
// configuration, that it gives a container its lane, that peerlane finds it ready,
// and that the configuration can be taken back to the byte.
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
	said := b.peerlaneRuntime("status", "--output", "json")
	if err := json.Unmarshal([]byte(said), &states); err != nil || len(states) != 1 {
		b.Fatalf("%v in %s", err, said)
	}
	s := states[0]
	if !s.Configured || s.CDI == cdiengine.CDIOff || s.Daemon != (b.daemon != nil) {
		b.Errorf("peerlane runtime status says %+v", s)
	}
	if said := b.peerlaneRuntime("configure", append(b.configured.switches, "--dry-run")...); !strings.Contains(said, "nothing has to be changed") {
		b.Errorf("it would be changed once more: %s", said)
	}
	after, err := os.ReadFile(b.configured.file)
	if err != nil {
		b.Fatal(err)
	}
	b.peerlaneRuntime("remove")
	if text, err := os.ReadFile(b.configured.file); err != nil || string(text) != b.configured.base {
		b.Errorf("after it was taken back it is %q, %v, and was %q", text, err, b.configured.base)
	}
	b.peerlaneRuntime("configure", b.configured.switches...)
	if text, err := os.ReadFile(b.configured.file); err != nil || string(text) != string(after) {
		b.Errorf("the second time it is %q, %v, and was %q", text, err, after)
	}
}
