package hostconfig

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
)

// Config is the configuration that a container starts with.
type Config struct {
	config.Config
	// text is that of the file; empty where there is no file.
	text []byte
	// replaced is the fault of the file, where the last good copy is in effect instead.
	Replaced error
}

// Read reads the configuration, which names programs that run as root: a file that another user
// could have written is refused. The last good copy replaces a file with a fault, because a
// misspelt key would else stop every container with a lane.
func Read(l paths.Layout) (config.Config, error) {
	c, err := Load(l)
	return c.Config, err
}

func Load(l paths.Layout) (Config, error) {
	file := l.ConfigFile()
	if err := paths.Trusted(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, err
	}
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, fmt.Errorf("reading the configuration: %w", err)
	}
	c, fault := config.Parse(file, text)
	if fault == nil {
		return Config{Config: c, text: text}, nil
	}
	good := l.GoodConfig()
	if err := paths.Trusted(good); err != nil {
		return Config{}, fault // no copy, or an untrusted copy
	}
	if text, err = os.ReadFile(good); err != nil {
		return Config{}, fault
	}
	if c, err = config.Parse(good, text); err != nil {
		return Config{}, fault // of another release
	}
	return Config{
		c,
		text,
		fmt.Errorf("%w; containers start with the last good configuration, %s, until that is mended", fault, good),
	}, nil
}

// Keep writes the copy, where the file has changed.
func (c Config) Keep(l paths.Layout) error {
	if c.Replaced != nil {
		return nil
	}
	path := l.GoodConfig()
	have, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && len(c.text) == 0: // the defaults
		return nil
	case err == nil && bytes.Equal(have, c.text):
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("reading the last good configuration: %w", err)
	}
	if err := c.replace(path); err != nil {
		return fmt.Errorf("keeping the last good configuration: %w", err)
	}
	return nil
}

// replace writes the file at path. Of several hooks at once one writes. A temporary file of a
// killed hook is removed after a minute.
func (c Config) replace(path string) error {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if info, err := os.Lstat(temporary); err == nil && time.Since(info.ModTime()) > time.Minute {
			return os.Remove(temporary) // the next hook writes the copy
		}
		return nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no state yet: the next hook
	}
	if err != nil {
		return err
	}
	_, err = f.Write(c.text)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return nil
}
