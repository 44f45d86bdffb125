// Package hostinstall installs Peerlane's programs and units on a host without packages, from the
// image of the DaemonSet. Running relays keep their program: the installation replaces only the
// name.
package hostinstall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sirupsen/logrus"
)

// Prefix is the directory of the programs on the host. Units name the same directory.
const Prefix = "/opt/peerlane"

// Config is the configuration of an installation.
type Config struct {
	// Payload is the directory of the image with the files of packaging/install for Prefix.
	Payload string
	// Host is the root of the host, or a directory with the host's directories that the
	// installation writes.
	Host string
	// Systemd starts units; nil on a host without systemd.
	Systemd Systemd
	Log     *logrus.Logger
}

// Systemd is the part of systemd's D-Bus interface that an installation needs.
type Systemd interface {
	// Reload reads all units again (systemctl daemon-reload).
	Reload(ctx context.Context) error
	// Enable starts units at each boot (systemctl enable).
	Enable(ctx context.Context, units ...string) error
	// Restart starts or restarts a unit, and waits until the unit is active, or until a oneshot
	// unit has ended.
	Restart(ctx context.Context, unit string) error
	// Start starts a unit that is not active.
	Start(ctx context.Context, unit string) error
}

// Units of the host. The refresh makes the plan and the CDI specifications. Each relay is an instance of
// peerlane-relay@.service, which an installation neither starts nor stops.
const (
	anchorUnit  = "peerlane-anchor.service"
	socketUnit  = "peerlane-relay.socket"
	refreshUnit = "peerlane-cdi-refresh.service"
	pathUnit    = "peerlane-cdi-refresh.path"
)

// directories maps directories of the payload to directories of the host. keep keeps an existing
// file, which the administrator may have changed.
var directories = []struct {
	from, to string
	keep     bool
}{
	{Prefix + "/bin", Prefix + "/bin", false},
	{Prefix + "/libexec", Prefix + "/libexec", false},
	{Prefix + "/lib/peerlane", Prefix + "/lib/peerlane", false},
	{Prefix + "/lib/systemd/system", "/etc/systemd/system", false},
	{Prefix + "/lib/udev/rules.d", "/etc/udev/rules.d", false},
	{Prefix + "/lib/modprobe.d", "/etc/modprobe.d", false},
	{"/etc/peerlane", "/etc/peerlane", true},
}

// Install copies changed files, programs before the units that start them, and starts the units. A
// second Install of the same payload changes only the time of the refresh.
func Install(ctx context.Context, c Config) error {
	changed := 0
	for _, d := range directories {
		n, err := copyTree(filepath.Join(c.Payload, d.from), filepath.Join(c.Host, d.to), d.keep)
		if err != nil {
			return fmt.Errorf("install %s on the host: %w", d.to, err)
		}
		changed += n
	}
	c.Log.WithField("files", changed).Info("Installed files that differed")
	if c.Systemd == nil {
		c.Log.Warnf("The host has no systemd: run %s/bin/peerlane cdi anchor and %s/bin/peerlane cdi refresh at each boot, "+
			"and refresh after each change of devices", Prefix, Prefix)
		return nil
	}
	return startUnits(ctx, c.Systemd)
}

// unitError is the error of an operation of systemd on a unit.
type unitError struct {
	operation, unit string
	err             error
}

func (e *unitError) Error() string {
	return fmt.Sprintf("systemd: %s %s: %v", e.operation, e.unit, e.err)
}

// Unwrap returns the cause.
func (e *unitError) Unwrap() error { return e.err }

func startUnits(ctx context.Context, s Systemd) error {
	if err := s.Reload(ctx); err != nil {
		return fmt.Errorf("systemd: read the units: %w", err)
	}
	if err := s.Enable(ctx, anchorUnit, socketUnit, refreshUnit, pathUnit); err != nil {
		return fmt.Errorf("systemd: enable the units: %w", err)
	}
	// A restart of the socket would refuse the containers that start meanwhile.
	for _, unit := range []string{anchorUnit, socketUnit, pathUnit} {
		if err := s.Start(ctx, unit); err != nil {
			return &unitError{"start", unit, err}
		}
	}
	if err := s.Restart(ctx, refreshUnit); err != nil {
		return fmt.Errorf("%w; `journalctl -u %s` on the host has the cause", &unitError{"run", refreshUnit, err},
			refreshUnit)
	}
	return nil
}

// copyTree copies changed regular files and links below from, and returns the number of copied
// files.
func copyTree(from, to string, keep bool) (changed int, err error) {
	err = filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, name)
		if d.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		if _, err := os.Lstat(target); err == nil && keep {
			return nil
		}
		replaced, err := replace(path, target)
		if replaced {
			changed++
		}
		return err
	})
	return changed, err
}

// replace replaces a file atomically by a copy of another file, unless both files are equal.
func replace(from, to string) (changed bool, err error) {
	info, err := os.Lstat(from)
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, fmt.Errorf("%s of the image is not a regular file", from)
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return false, err
	}
	return WriteFile(to, text, info.Mode().Perm())
}

// WriteFile replaces a file atomically by a file with this text and mode, unless the file is equal.
// A power failure leaves the old or the new file.
func WriteFile(path string, text []byte, mode os.FileMode) (changed bool, err error) {
	if info, err := os.Lstat(path); err == nil && info.Mode() == mode {
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
			return false, nil
		}
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return false, err
	}
	defer os.Remove(f.Name()) // fails after the rename
	_, err = f.Write(text)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return false, err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return false, err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return true, err
	}
	return true, errors.Join(dir.Sync(), dir.Close())
}
