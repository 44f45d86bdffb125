package programs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
)

// segment is a program header of an ELF file.
type segment struct {
	kind         uint32
	offset, size uint64
}

// elf returns an ELF file of 64 bits with program headers at an offset, and data after the headers.
func elf(at uint64, data string, segments ...segment) []byte {
	const entry = 56
	file := make([]byte, 64+entry*len(segments), 64+entry*len(segments)+len(data))
	copy(file, "\x7fELF\x02\x01\x01")
	le := binary.LittleEndian
	le.PutUint64(file[32:], at)
	le.PutUint16(file[54:], entry)
	le.PutUint16(file[56:], uint16(len(segments)))
	for i, s := range segments {
		header := file[64+entry*i:]
		le.PutUint32(header, s.kind)
		le.PutUint64(header[8:], s.offset)
		le.PutUint64(header[32:], s.size)
	}
	return append(file, data...)
}

// install writes an executable file.
func install(t *testing.T, path string, content []byte, mode fs.FileMode) string {
	t.Helper()
	if err := os.WriteFile(path, content, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestInterpreterOfEachFileIsFound(t *testing.T) {
	const linker = "/lib64/ld-linux-x86-64.so.2"
	load, interp := segment{kind: 1}, func(offset, size uint64) segment { return segment{3, offset, size} }
	data := uint64(64 + 2*56)
	for _, c := range []struct {
		name string
		file []byte
		want string
		err  error
	}{
		{"dynamic program", elf(64, linker+"\x00", load, interp(data, uint64(len(linker)+1))), linker, nil},
		{"static program", elf(64, "", load, load), "", nil},
		{"program without headers", elf(64, ""), "", nil},
		{"script", []byte("#!/bin/sh\n"), "", nil},
		{"empty file", nil, "", syscall.ENOEXEC},
		{"text", []byte("#comment\n"), "", syscall.ENOEXEC},
		{"truncated header", elf(64, "")[:63], "", syscall.ENOEXEC},
		{"32 bits", append([]byte("\x7fELF\x01\x01"), make([]byte, 100)...), "", syscall.ENOEXEC},
		{"big-endian", append([]byte("\x7fELF\x02\x02"), make([]byte, 100)...), "", syscall.ENOEXEC},
		{"headers after the end of the file", elf(1<<40, "", load), "", syscall.ENOEXEC},
		{"headers at a negative offset", elf(math.MaxUint64, "", load), "", syscall.ENOEXEC},
		{"truncated headers", elf(64, "", load, load)[:64+60], "", syscall.ENOEXEC},
		{"name after the end of the file", elf(64, "", load, interp(1<<40, 10)), "", syscall.ENOEXEC},
		{"name at a negative offset", elf(64, "", load, interp(math.MaxUint64, 10)), "", syscall.ENOEXEC},
		{"name longer than the file", elf(64, "", load, interp(data, math.MaxUint64)), "", syscall.ENOEXEC},
	} {
		if name, err := interpreter(bytes.NewReader(c.file)); name != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: %q, %v", c.name, name, err)
		}
	}
}

func TestInterpreterWithHugeNameIsBounded(t *testing.T) {
	long := bytes.Repeat([]byte("a"), 1<<20)
	name, err := interpreter(bytes.NewReader(elf(64, string(long), segment{3, 64 + 56, math.MaxUint64})))
	if err != nil || len(name) != 4096 {
		t.Errorf("the name has %d bytes, %v", len(name), err)
	}
}

func TestFindReturnsBothPrograms(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	hook := install(t, filepath.Join(dir, "peerlane-hook"), elf(64, ""), 0o755)
	beside := install(t, filepath.Join(dir, "peerlane-relay"), elf(64, ""), 0o755)
	configured := install(t, filepath.Join(other, "relay"), []byte("#!/bin/sh\n"), 0o755)
	for _, c := range []struct{ relay, want string }{{"", beside}, {configured, configured}} {
		if supervisor, relay, err := Find(hook, c.relay); supervisor != hook || relay != c.want || err != nil {
			t.Errorf("with relay.binary %q: %s, %s, %v", c.relay, supervisor, relay, err)
		}
	}
}

func TestFindWithUnusableProgramFails(t *testing.T) {
	dir := t.TempDir()
	hook := install(t, filepath.Join(dir, "peerlane-hook"), elf(64, ""), 0o755)
	relay := install(t, filepath.Join(dir, "relay"), elf(64, ""), 0o755)
	data := install(t, filepath.Join(dir, "data"), elf(64, ""), 0o644)
	absentLinker := "/absent/linker"
	dynamic := install(t, filepath.Join(dir, "dynamic"),
		elf(64, absentLinker, segment{3, 64 + 56, uint64(len(absentLinker))}), 0o755)
	text := install(t, filepath.Join(dir, "text"), []byte("text"), 0o755)
	for _, c := range []struct {
		name, hook, relay string
		cause             error
	}{
		{"hook is absent", filepath.Join(dir, "absent"), relay, fs.ErrNotExist},
		{"hook is a directory", dir, relay, syscall.EISDIR},
		{"hook is not executable", data, relay, syscall.EACCES},
		{"relay is absent", hook, filepath.Join(dir, "absent"), fs.ErrNotExist},
		{"relay beside the hook is absent", hook, "", fs.ErrNotExist},
		{"relay is a directory", hook, dir, syscall.EISDIR},
		{"relay is not executable", hook, data, syscall.EACCES},
		{"relay's linker is absent", hook, dynamic, fs.ErrNotExist},
		{"relay is no program", hook, text, syscall.ENOEXEC},
	} {
		supervisor, relay, err := Find(c.hook, c.relay)
		var f *fault.Error
		if supervisor != "" || relay != "" || !errors.As(err, &f) || f.Code != fault.NoRelayProgram ||
			!errors.Is(err, c.cause) {
			t.Errorf("%s: %q, %q, %v", c.name, supervisor, relay, err)
		}
	}
}

// Without a path, the hook is beside the running program, which is a test here.
func TestFindWithoutPathLooksBesideTheRunningProgram(t *testing.T) {
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	hook := filepath.Join(filepath.Dir(own), "peerlane-hook")
	var path *fs.PathError
	if _, _, err := Find("", ""); !errors.As(err, &path) || path.Path != hook {
		t.Fatalf("without peerlane-hook: %v", err)
	}
	install(t, hook, elf(64, ""), 0o755)
	relay := install(t, filepath.Join(filepath.Dir(own), "peerlane-relay"), elf(64, ""), 0o755)
	t.Cleanup(func() { os.Remove(hook); os.Remove(relay) })
	if supervisor, found, err := Find("", ""); supervisor != hook || found != relay || err != nil {
		t.Errorf("%s, %s, %v", supervisor, found, err)
	}
}
