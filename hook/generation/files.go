package generation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ErrTorn reports a damaged file of the state. WriteJSON replaces files in one step, so a file is
// damaged only if the host stopped before the write reached the disk: the file is of an earlier
// boot.
var ErrTorn = errors.New("the file is damaged")

// ReadJSON reads a file that WriteJSON wrote. The error of a damaged file is ErrTorn.
func ReadJSON(path string, value any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, value); err != nil {
		return fmt.Errorf("read %s: %w: %w", path, ErrTorn, err)
	}
	return nil
}

// WriteJSON replaces a file in one step. A file has one writer at a time, so the temporary name is
// free. WriteJSON does not sync, because no generation outlives a boot.
func WriteJSON(path string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// WriteFile writes a world-readable file in one step: a reader finds the old or the new content.
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

// UnlessGone returns nil for fs.ErrNotExist, and any other error unchanged.
func UnlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
