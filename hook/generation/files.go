package generation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ErrTorn reports a damaged file of the state. WriteJSON replaces files atomically, so only a
// host that stopped before a write to the disk leaves a damaged file, of an earlier boot.
var ErrTorn = errors.New("the file is damaged")

func ReadJSON(path string, value any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, value); err != nil {
		return fmt.Errorf("reading %s: %w: %w", path, ErrTorn, err)
	}
	return nil
}

// WriteJSON replaces a file atomically. A file has one writer at a time, so the temporary name is
// free. Nothing is synced: no generation outlives a boot.
func WriteJSON(path string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// WriteFile writes a world-readable file atomically: a reader has the old file or the new.
func WriteFile(dir, name string, text []byte) error {
	f, err := os.CreateTemp(dir, "."+name+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}

// UnlessGone drops the error that says that a file is not there.
func UnlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
