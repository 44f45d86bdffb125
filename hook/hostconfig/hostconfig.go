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

// Config is the configuration with which a container starts.
type Config struct {
	config.Config
	// text is the content of the file; empty without a file.
	text []byte
	// Replaced is the fault of the file if the last good copy is in effect; otherwise nil.
	Replaced error
}

// Read reads the configuration. It names programs that run as root, so Read refuses a file that
// another user could have written. The last good copy replaces a file with a fault, because a
// misspelt key would otherwise stop every container with a lane.
func Read(l paths.Layout) (config.Config, error) {
	c, err := Load(l)
	return c.Config, err
}

// Load is Read with the text of the file and the fault that the last good copy replaces.
func Load(l paths.Layout) (Config, error) {
	file := l.ConfigFile()
	if err := paths.CheckTrusted(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, err
	}
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, fmt.Errorf("read the configuration: %w", err)
	}
	c, fault := config.Parse(file, text)
	if fault == nil {
		return Config{Config: c, text: text}, nil
	}
	good := l.GoodConfig()
	if err := paths.CheckTrusted(good); err != nil {
		return Config{}, fault // no copy, or another user could have written it
	}
	if text, err = os.ReadFile(good); err != nil {
		return Config{}, fault
	}
	if c, err = config.Parse(good, text); err != nil {
		return Config{}, fault // the copy is of another release
	}
	return Config{
		c,
		text,
		fmt.Errorf("%w; containers start with the last good configuration, %s, until the file is corrected", fault, good),
	}, nil
}

// Keep copies the file if it has changed.
func (c Config) Keep(l paths.Layout) error {
	if c.Replaced != nil {
		return nil
	}
	path := l.GoodConfig()
	current, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && len(c.text) == 0: // the defaults
		return nil
	case err == nil && bytes.Equal(current, c.text):
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read the last good configuration: %w", err)
	}
	if err := c.replace(path); err != nil {
		return fmt.Errorf("store the last good configuration: %w", err)
	}
	return nil
}

// replace writes the file at path. One of several concurrent hooks writes it. The temporary file
// of a killed hook is removed after a minute.
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
		return nil // the state directory is missing; the next hook writes the copy
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
