package inject

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

// Options are the policies for requests of containers.
type Options struct {
	// Devices are the devices that the administrator adds to every container.
	Devices []string
	// Allowed are patterns of the devices that a container may request.
	Allowed []string
	// ConfigFile is the path of the file with Allowed, for messages.
	ConfigFile string
	// SpecDirs are directories of CDI specifications; the last has precedence.
	SpecDirs []string
}

// maxConfig is the maximum size of a config.json in bytes. Docker's have 20 KiB.
const maxConfig = 32 << 20

// Bundle applies the requested devices to the config.json at path. It replaces the file in one
// step, and does not touch the file without a request. A missing file is no error, because the
// runtime reports it.
func Bundle(path string, o Options) error {
	text, info, err := read(path, maxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var all []request
	for _, device := range o.Devices {
		all = append(all, request{device: device})
	}
	asked, err := parseRequests(text)
	if err != nil {
		return &fault.Error{Operation: "read", Object: path, Cause: err}
	}
	devices, err := permittedDevices(append(all, asked...), o.Allowed, o.ConfigFile)
	if len(devices) == 0 {
		return err
	}
	changed, err := apply(text, o.SpecDirs, devices)
	if err != nil {
		return err
	}
	return replace(path, changed, info)
}

// read reads a regular file of limited size: a pipe could block the engine for ever.
func read(path string, limit int64) ([]byte, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, &fs.PathError{Op: "read", Path: path, Err: paths.ErrNotRegular}
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = &paths.SizeError{Path: path, Bytes: max(info.Size(), int64(len(text))), Limit: limit}
	}
	return text, info, err
}

var errLink = errors.New("it is a symbolic link, and its target may belong to another bundle, too; copy the file")

// replace replaces a file in one step and keeps its owner and mode. It does not sync, because an
// engine writes a new bundle for every start.
func replace(path string, text []byte, like fs.FileInfo) (err error) {
	if link, err := os.Lstat(path); err != nil {
		return err
	} else if !os.SameFile(link, like) {
		return fmt.Errorf("%s: %w", path, errLink)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".config.json.*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = io.Copy(tmp, bytes.NewReader(text))
	if err == nil {
		stat := like.Sys().(*syscall.Stat_t) // as package os documents for Linux
		err = tmp.Chown(int(stat.Uid), int(stat.Gid))
	}
	if err == nil {
		err = tmp.Chmod(like.Mode().Perm())
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}
