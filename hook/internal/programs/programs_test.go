package programs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// elf returns an ELF file with a segment of another type, and for a linker its segment.
func elf(linker string) []byte {
	const header, segment = 64, 56
	b := make([]byte, header+2*segment)
	copy(b, "\x7fELF\x02\x01")
	le := binary.LittleEndian
	le.PutUint64(b[32:], header)
	le.PutUint16(b[54:], segment)
	le.PutUint16(b[56:], 2)
	le.PutUint32(b[header:], 1) // PT_LOAD
	if linker == "" {
		return b
	}
	le.PutUint32(b[header+segment:], 3) // PT_INTERP
	le.PutUint64(b[header+segment+8:], uint64(len(b)))
	le.PutUint64(b[header+segment+32:], uint64(len(linker)+1))
	return append(append(b, linker...), 0)
}

// changed returns a copy of b with a 64-bit number at an offset.
func changed(b []byte, at int, n uint64) []byte {
	b = bytes.Clone(b)
	binary.LittleEndian.PutUint64(b[at:], n)
	return b
}

func TestInterpreterOfHostileFile(t *testing.T) {
	const linker = "/lib/ld"
	file := elf(linker)
	const second = 64 + 56
	for _, c := range []struct {
		name string
		file []byte
		want string
		err  error
	}{
		{"a linker", file, linker, nil},
		{"no linker", elf(""), "", nil},
		{"a script", []byte("#!/bin/sh\n"), "", nil},
		{"an empty file", nil, "", syscall.ENOEXEC},
		{"the header alone without segments", make([]byte, 64), "", syscall.ENOEXEC},
		{"a header without its last byte", file[:63], "", syscall.ENOEXEC},
		{"32 bits", append([]byte("\x7fELF\x01\x01"), file[6:]...), "", syscall.ENOEXEC},
		{"segments after the end", changed(file, 32, uint64(len(file))), "", syscall.ENOEXEC},
		{"segments at a negative offset", changed(file, 32, 1<<63), "", syscall.ENOEXEC},
		{"the last segment is cut", elf("")[:second+39], "", syscall.ENOEXEC},
		{"the last segment ends the file", elf("")[:second+40], "", nil},
		{"a name after the end", changed(file, second+8, uint64(len(file))), "", syscall.ENOEXEC},
		{"a name of the whole memory", changed(file, second+32, 1<<63), "", syscall.ENOEXEC},
		{"a name of the limit", changed(elf(strings.Repeat("a", unix.PathMax)), second+32, 1<<40),
			strings.Repeat("a", unix.PathMax), nil},
	} {
		if got, err := interpreter(bytes.NewReader(c.file)); got != c.want || !errors.Is(err, c.err) ||
			(err == nil) != (c.err == nil) {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
	}
	few := bytes.Clone(file)
	binary.LittleEndian.PutUint16(few[56:], 1)
	if got, err := interpreter(bytes.NewReader(few)); got != "" || err != nil {
		t.Errorf("a segment above the number of segments: %q, %v", got, err)
	}
	if got, err := interpreter(unreadable{}); err != unix.EIO {
		t.Errorf("an unreadable file: %q, %v", got, err)
	}
}

type unreadable struct{}

func (unreadable) ReadAt([]byte, int64) (int, error) { return 0, unix.EIO }

var _ io.ReaderAt = unreadable{}

func write(t *testing.T, path string, text []byte, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o600),
		os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

func TestFindRefusesProgramThatCannotRun(t *testing.T) {
	script := []byte("#!/bin/sh\n")
	for _, c := range []struct {
		name        string
		hook, relay func(t *testing.T, path string) // makes the file; nil for a script
		operation   string                          // of the error; empty for success
		err         error
	}{
		{"two programs", nil, nil, "", nil},
		{"no hook", remove, nil, "find the hook binary", fs.ErrNotExist},
		{"a hook that is a directory", directory, nil, "find the hook binary", syscall.EISDIR},
		{"a hook without a mode", plain, nil, "find the hook binary", syscall.EACCES},
		{"no relay", nil, remove, "find the relay binary", fs.ErrNotExist},
		{"a relay that is a directory", nil, directory, "find the relay binary", syscall.EISDIR},
		{"a relay without a mode", nil, plain, "find the relay binary", syscall.EACCES},
		{"a relay that is text", nil, func(t *testing.T, path string) { write(t, path, []byte("text"), 0o755) },
			"find the relay binary", syscall.ENOEXEC},
		{"a relay with a linker", nil, func(t *testing.T, path string) { write(t, path, elf("/proc/self/exe"), 0o755) }, "",
			nil},
		{"a relay without its linker", nil, func(t *testing.T, path string) { write(t, path, elf("/none"), 0o755) },
			"find the relay binary", fs.ErrNotExist},
		{"a static relay", nil, func(t *testing.T, path string) { write(t, path, elf(""), 0o755) }, "", nil},
	} {
		dir := t.TempDir()
		hook, relay := filepath.Join(dir, "peerlane-hook"), filepath.Join(dir, "peerlane-relay")
		for path, change := range map[string]func(*testing.T, string){hook: c.hook, relay: c.relay} {
			write(t, path, script, 0o755)
			if change != nil {
				change(t, path)
			}
		}
		elsewhere := filepath.Join(dir, "elsewhere", "relay")
		write(t, elsewhere, script, 0o755)
		if c.relay != nil {
			c.relay(t, elsewhere)
		}
		for named, relay := range map[string]string{"": relay, elsewhere: elsewhere} {
			gotHook, gotRelay, err := Find(hook, named)
			if c.operation == "" {
				if err != nil || gotHook != hook || gotRelay != relay {
					t.Errorf("%s: %s, %s, %v", c.name, gotHook, gotRelay, err)
				}
				continue
			}
			f, ok := errors.AsType[*fault.Error](err)
			if !ok || f.Code != fault.NoRelayProgram || f.Operation != c.operation || !errors.Is(err, c.err) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

func directory(t *testing.T, path string) {
	t.Helper()
	if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o755)); err != nil {
		t.Fatal(err)
	}
}

func plain(t *testing.T, path string) {
	t.Helper()
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
}

// Without a name, the hook is beside this program.
func TestFindWithoutNameLooksBesideProgram(t *testing.T) {
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want := filepath.Join(filepath.Dir(own), "peerlane-hook")
	if _, err := os.Stat(want); err == nil {
		t.Skipf("%s exists", want)
	}
	_, _, err = Find("", "")
	missing := &fs.PathError{Op: "stat", Path: want, Err: unix.ENOENT}
	if f, ok := errors.AsType[*fault.Error](err); !ok || !testutil.HasError(f.Cause, missing) {
		t.Errorf("%v, want %v", err, missing)
	}
}

func TestRunnableClosesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	write(t, path, elf(""), 0o755)
	if err := runnable(path); err != nil {
		t.Fatal(err)
	}
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == path { // otherwise perhaps closed meanwhile
			t.Errorf("%s is open", path)
		}
	}
}
