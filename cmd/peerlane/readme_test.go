package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/hook/config"
)

// What the README shows has to work as it stands.
func TestTheConfigurationOfTheREADME(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(readme), "```toml\n")
	text, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		t.Fatal("the README shows no configuration")
	}
	root := t.TempDir()
	path := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Plan.Lanes) != 1 {
		t.Fatalf("it assigns %d lanes, want one", len(c.Plan.Lanes))
	}
	// The rest is shown at its default, and the lane fits the recorded host.
	c.Plan.Lanes = nil
	if want := config.Default(); c.Relay.Slots != want.Relay.Slots || c.Relay.SlotSize != want.Relay.SlotSize ||
		c.Relay.Route != want.Relay.Route || c.Relay.Transport != want.Relay.Transport ||
		c.GDR.MaxPath != want.GDR.MaxPath || c.CDI != want.CDI {
		t.Errorf("the README shows %+v as the default, which is %+v", c, want)
	}
	_, host := recordedHost(t)
	peerlane(t, append([]string{"plan", "--root", root}, host...)...)
}
