package config

import (
	"bytes"
	"fmt"
	"os"

	"github.com/BurntSushi/toml"
	"github.com/dustin/go-humanize"
)

// MarshalText writes a size that UnmarshalText reads as the same: in MiB or KiB
// where that is exact.
func (s Size) MarshalText() ([]byte, error) {
	switch n := uint64(s); {
	case n > 0 && n%humanize.MiByte == 0:
		return fmt.Appendf(nil, "%dMiB", n/humanize.MiByte), nil
	case n > 0 && n%humanize.KiByte == 0:
		return fmt.Appendf(nil, "%dKiB", n/humanize.KiByte), nil
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
