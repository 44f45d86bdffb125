package ocispec

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestReadSpecReturnsFields(t *testing.T) {
	dir := t.TempDir()
	text := `{"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "linux": {"resources": 5, "devices": [{"path": "/dev/nvidia3", "type": "c", "major": 195, "minor": 3, "fileMode": 438}]},
		"process": {"env": ["A=b"], "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1, "hard": 1}]},
		"hooks": {"createRuntime": [{"path": "/p", "args": ["p", "create", "--gpu", "x@y"]}], "poststop": [{"args": 1}]}}`
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if s.Rootfs(dir) != filepath.Join(dir, "rootfs") || len(s.Process.Env) != 1 || len(s.Process.Rlimits) != 1 ||
		len(s.RequestedDevices()) != 1 ||
		!slices.Equal(s.Devices, []Device{{"c", 195, 3}}) {
		t.Errorf("%+v", s)
	}
	if s.Root.Path = "/absolute"; s.Rootfs(dir) != "/absolute" {
		t.Errorf("an absolute root is %s", s.Rootfs(dir))
	}
}

// Hostile content of a config.json uses no more memory than the bytes of the file, and is an
// error.
func TestReadMalformedSpecFails(t *testing.T) {
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	errorIs := func(err error) func(string) error { return func(string) error { return err } }
	for name, test := range map[string]struct {
		make func(path string) error
		want func(path string) error
	}{
		"none":            {func(string) error { return nil }, errorIs(fs.ErrNotExist)},
		"empty":           {write(""), errorIs(&json.SyntaxError{Offset: 0})},
		"a directory":     {func(path string) error { return os.Mkdir(path, 0o700) }, errorIs(paths.ErrNotRegular)},
		"one that waits":  {func(path string) error { return unix.Mkfifo(path, 0o600) }, errorIs(paths.ErrNotRegular)},
		"one without end": {func(path string) error { return os.Symlink("/dev/zero", path) }, errorIs(paths.ErrNotRegular)},
		"no root":         {write(`{}`), errorIs(errNoRoot)},
		"a root of lists": {write(`{"root": {"path": []}}`), errorIs(&json.UnmarshalTypeError{Value: "array"})},
		"an environment": {write(`{"root": {"path": "r"}, "process": {"env": {"A": "b"}}}`),
			errorIs(&json.UnmarshalTypeError{Value: "object"})},
		"arguments": {write(`{"root": {"path": "r"}, "hooks": {"prestart": [{"args": [1]}]}}`),
			errorIs(&json.UnmarshalTypeError{Value: "number"})},
		"very deep": {write(strings.Repeat(`{"a":`, 100000)), errorIs(&json.SyntaxError{Offset: 10000*5 + 1})},
		"longer than ours": {write(`{"root": {"path": "` + string(bytes.Repeat([]byte("r"), MaxBytes)) + `"}}`),
			func(path string) error { return &paths.SizeError{Path: path, Bytes: MaxBytes + 22, Limit: MaxBytes} }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := test.make(filepath.Join(dir, "config.json")); err != nil {
				t.Fatal(err)
			}
			_, err := Read(dir)
			path := filepath.Join(dir, "config.json")
			f, ok := errors.AsType[*fault.Error](err)
			if !ok || f.Object != path || !testutil.HasError(f.Cause, test.want(path)) {
				t.Errorf("%v; want %v of %s", err, test.want(path), path)
			}
		})
	}
}

func TestReadBoundedLimitIsInclusive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, path string
		limit      int64
		want       error
	}{
		{"above the size", path, 6, nil},
		{"the size", path, 5, nil},
		{"below the size", path, 4, &paths.SizeError{Path: path, Bytes: 5, Limit: 4}},
		// The size of a file in /proc is 0, as that of a file that grows after the look.
		{"below the size of a growing file", "/proc/self/status", 4,
			&paths.SizeError{Path: "/proc/self/status", Bytes: 5, Limit: 4}},
	} {
		text, err := ReadBounded(c.path, c.limit)
		if c.want == nil && (err != nil || string(text) != "12345") || c.want != nil && !testutil.HasError(err, c.want) {
			t.Errorf("%s: %q, %v; want %v", c.name, text, err, c.want)
		}
	}
}

func TestRootOnlyNamesRoot(t *testing.T) {
	if s := RootOnly("/r"); !s.Unread || s.Rootfs("/bundle") != "/r" {
		t.Errorf("%+v", s)
	}
}
