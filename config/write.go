package config

import (
	"bytes"
	"fmt"
	"os"

	"github.com/BurntSushi/toml"
)

// MarshalText writes a size that UnmarshalText reads back: in MiB or KiB if that is exact, and in
// bytes otherwise.
func (s Size) MarshalText() ([]byte, error) {
	switch n := uint64(s); {
	case n > 0 && n%(1<<20) == 0:
		return fmt.Appendf(nil, "%dMiB", n/(1<<20)), nil
	case n > 0 && n%(1<<10) == 0:
		return fmt.Appendf(nil, "%dKiB", n/(1<<10)), nil
	default:
		return fmt.Appendf(nil, "%d", n), nil
	}
}

// Write writes a configuration file that Load reads as c.
func (c Config) Write(path string) error {
	var text bytes.Buffer
	if err := toml.NewEncoder(&text).Encode(c); err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}
