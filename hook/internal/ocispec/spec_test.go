package ocispec

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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

// Hostile content of a config.json costs no more than the bytes of the file, and ends in an
// error.
func TestReadMalformedSpecFails(t *testing.T) {
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	for name, test := range map[string]struct {
		make func(path string) error
		says string
	}{
		"none":            {func(string) error { return nil }, "no such file"},
		"empty":           {write(""), "unexpected end"},
		"a directory":     {func(path string) error { return os.Mkdir(path, 0o700) }, "not a regular file"},
		"one that waits":  {func(path string) error { return unix.Mkfifo(path, 0o600) }, "not a regular file"},
		"one without end": {func(path string) error { return os.Symlink("/dev/zero", path) }, "not a regular file"},
		"no root":         {write(`{}`), "no root file system"},
		"a root of lists": {write(`{"root": {"path": []}}`), "cannot unmarshal"},
		"an environment":  {write(`{"root": {"path": "r"}, "process": {"env": {"A": "b"}}}`), "cannot unmarshal"},
		"arguments":       {write(`{"root": {"path": "r"}, "hooks": {"prestart": [{"args": [1]}]}}`), "cannot unmarshal"},
		"very deep":       {write(strings.Repeat(`{"a":`, 100000)), "exceeded max depth"},
		"longer than ours": {write(`{"root": {"path": "` + string(bytes.Repeat([]byte("r"), MaxBytes)) + `"}}`),
			"is longer than the limit of 16777216 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := test.make(filepath.Join(dir, "config.json")); err != nil {
				t.Fatal(err)
			}
			_, err := Read(dir)
			if err == nil || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), dir) {
				t.Errorf("%v; want %q and the name of the file", err, test.says)
			}
		})
	}
}
