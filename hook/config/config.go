// Package config reads the administrator's configuration, config.toml.
//
// Everything in it is optional; a missing file is the default configuration. A
// key that is not known is an error, so that a misspelt one is not silently
// without effect.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/dustin/go-humanize"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// Config is the whole file.
type Config struct {
	Relay Relay           `toml:"relay"`
	Plan  topo.PlanConfig `toml:"plan"`
	CDI   CDI             `toml:"cdi"`
}

// Relay is how relays are started and what they are told.
type Relay struct {
	// Binary is the absolute path of peerlane-relay; empty stands for the one
	// beside peerlane-hook.
	Binary string `toml:"binary"`
	// Route is one of launch.RouteAuto, RouteStaged and RouteDirect.
	Route string `toml:"route"`
	// Transport is one of launch.TransportAuto, TransportLoop and TransportLocal.
	Transport string `toml:"transport"`
	// Slots is the number of staging slots in each direction.
	Slots int `toml:"slots"`
	// SlotSize is the size of a staging slot.
	SlotSize Size `toml:"slot_size"`
	// Environment is added to a relay's environment, "NAME=value" each; beside
	// it there is only PATH.
	Environment []string `toml:"environment"`
}

// CDI is what `cdi generate` offers to container engines.
type CDI struct {
	// Tenancy is TenancySingle or TenancyMulti.
	Tenancy string `toml:"tenancy"`
}

// Who shares a host.
const (
	TenancySingle = "single" // one tenant: containers may get server GPUs and NICs
	TenancyMulti  = "multi"  // several: only `lane=` is offered
)

// Size is a number of bytes, written as "8MiB" or "8388608".
type Size uint64

// UnmarshalText reads a size as humanize.ParseBytes does: MB is 10^6 bytes, MiB 2^20.
func (s *Size) UnmarshalText(text []byte) error {
	n, err := humanize.ParseBytes(string(text))
	if err != nil {
		return fmt.Errorf(`%q is no size; one looks like "8MiB"`, text)
	}
	*s = Size(n)
	return nil
}

// Default is the configuration of a host without config.toml.
func Default() Config {
	return Config{
		Relay: Relay{Route: launch.RouteAuto, Transport: launch.TransportAuto, Slots: 8, SlotSize: 32 << 20},
		Plan:  topo.PlanConfig{GDRMaxPath: topo.PXB},
		CDI:   CDI{Tenancy: TenancySingle},
	}
}

// Load reads a configuration file. Keys that it does not state keep their
// defaults, and so do all where there is no file.
func Load(path string) (Config, error) {
	c := Default()
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("reading the configuration: %w", err)
	}
	found, err := toml.Decode(string(text), &c)
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	if unknown := found.Undecoded(); len(unknown) > 0 {
		var keys []string
		for _, k := range unknown {
			keys = append(keys, k.String())
		}
		return Config{}, fmt.Errorf("configuration %s: unknown key %s; look for a misspelling, or remove it", path, strings.Join(keys, ", "))
	}
	if err := c.check(); err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

func (c Config) check() error {
	r := c.Relay
	if r.Binary != "" && !filepath.IsAbs(r.Binary) {
		return fmt.Errorf("relay.binary is %q; an absolute path is needed, because the hook runs in many directories", r.Binary)
	}
	for _, choice := range []struct {
		key, value string
		known      []string
	}{
		{"relay.route", r.Route, []string{launch.RouteAuto, launch.RouteStaged, launch.RouteDirect}},
		{"relay.transport", r.Transport, []string{launch.TransportAuto, launch.TransportLoop, launch.TransportLocal}},
		{"cdi.tenancy", c.CDI.Tenancy, []string{TenancySingle, TenancyMulti}},
	} {
		if !slices.Contains(choice.known, choice.value) {
			return fmt.Errorf("%s is %q; %s are possible", choice.key, choice.value, strings.Join(choice.known, ", "))
		}
	}
	if r.Slots < 1 || r.Slots > 1024 {
		return fmt.Errorf("relay.slots is %d; 1 to 1024 are possible", r.Slots)
	}
	if r.SlotSize < 64<<10 || r.SlotSize > 1<<30 || r.SlotSize%(64<<10) != 0 {
		return fmt.Errorf("relay.slot_size is %s; a multiple of 64 KiB up to 1 GiB is possible", humanize.IBytes(uint64(r.SlotSize)))
	}
	for _, e := range r.Environment {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.ContainsRune(e, 0) {
			return fmt.Errorf(`relay.environment has %q; "NAME=value" is possible`, e)
		}
	}
	return nil
}
