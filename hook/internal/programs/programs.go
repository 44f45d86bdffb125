package programs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

// SearchPath is the PATH of supervisors and relays. An image may control the rest of a
// runtime's environment.
const SearchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Find returns the paths of the programs that Launch starts.
func Find(hookBinary, relayBinary string) (supervisor, relay string, err error) {
	supervisor = hookBinary
	if supervisor == "" {
		if supervisor, err = os.Executable(); err != nil {
			return "", "", err
		}
		if filepath.Base(supervisor) != "peerlane-hook" {
			supervisor = filepath.Join(filepath.Dir(supervisor), "peerlane-hook")
		}
	}
	if err := executable(supervisor); err != nil {
		return "", "", &fault.Error{
			Code:      fault.NoRelayProgram,
			Operation: "find the hook binary",
			Cause:     err,
			Remedy:    "install peerlane and peerlane-hook in one directory",
		}
	}
	relay = relayBinary
	if relay == "" {
		relay = filepath.Join(filepath.Dir(supervisor), "peerlane-relay")
	}
	if err = executable(relay); err == nil {
		err = runnable(relay)
	}
	if err != nil {
		return "", "", &fault.Error{
			Code:      fault.NoRelayProgram,
			Operation: "find the relay binary",
			Cause:     err,
			Remedy:    "install it there, or name it by relay.binary in config.toml",
		}
	}
	return supervisor, relay, nil
}

func executable(path string) error {
	info, err := os.Stat(path)
	if err == nil && info.IsDir() {
		err = &os.PathError{Op: "exec", Path: path, Err: syscall.EISDIR}
	}
	if err == nil && info.Mode()&0o111 == 0 {
		err = &os.PathError{Op: "exec", Path: path, Err: syscall.EACCES}
	}
	return err
}

// runnable reports obstacles to executing a program other than the mode, which executable checks.
// The hook checks them itself: the supervisor executes the program only after the hook has ended.
func runnable(path string) error {
	if err := unix.Faccessat2(unix.AT_FDCWD, path, unix.X_OK, unix.AT_EACCESS); err != nil {
		return &os.PathError{Op: "exec", Path: path, Err: err} // for example on a file system that is mounted noexec
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		return nil // without root, a program of the packages is executable but not readable
	}
	if err != nil {
		return err
	}
	defer f.Close()
	linker, err := interpreter(f)
	if err == nil && linker != "" {
		_, err = os.Stat(linker)
	}
	if err != nil {
		return &os.PathError{Op: "exec", Path: path, Err: err}
	}
	return nil
}

// interpreter returns the dynamic linker of an ELF file (elf(5), 64 bits, little-endian: amd64 and
// arm64); empty for a script or a static program. Further executable formats of the
// kernel are unknown here.
func interpreter(f io.ReaderAt) (string, error) {
	header := make([]byte, 64)
	n, err := f.ReadAt(header, 0)
	switch {
	case err != nil && err != io.EOF:
		return "", err
	case bytes.HasPrefix(header[:n], []byte("#!")):
		return "", nil // leave the error to the kernel
	case n < len(header) || string(header[:6]) != "\x7fELF\x02\x01":
		return "", syscall.ENOEXEC
	}
	le := binary.LittleEndian
	at, size, count := int64(le.Uint64(header[32:])), int64(le.Uint16(header[54:])), int64(le.Uint16(header[56:]))
	for i := range count {
		segment := make([]byte, 40)
		if _, err := f.ReadAt(segment, at+i*size); err != nil {
			return "", syscall.ENOEXEC
		}
		const interp = 3 // PT_INTERP
		if le.Uint32(segment) != interp {
			continue
		}
		name := make([]byte, min(le.Uint64(segment[32:]), unix.PathMax))
		if _, err := f.ReadAt(name, int64(le.Uint64(segment[8:]))); err != nil {
			return "", syscall.ENOEXEC
		}
		return string(bytes.TrimRight(name, "\x00")), nil
	}
	return "", nil
}
