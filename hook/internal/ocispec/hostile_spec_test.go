package ocispec

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/testutil"
)

// Parse refuses a config.json with a duplicate key.
func TestParseDuplicateKeyFails(t *testing.T) {
	for _, text := range []string{
		`{"root": {"path": "a"}, "root": {"path": "b"}}`,
		`{"root": {"path": "a", "path": "b"}}`,
		`{"root": {"path": "a", "Path": "b"}}`,
		`{"root": {"path": "a"}, "process": {"env": []}, "process": {"env": ["CUDA_VISIBLE_DEVICES=0"]}}`,
		`{"root": {"path": "a"}, "process": {"env": [], "env": ["CUDA_VISIBLE_DEVICES=0"]}}`,
		`{"root": {"path": "a"}, "process": {"rlimits": [], "rlimits": []}}`,
		`{"root": {"path": "a"}, "mounts": [], "mounts": [{"destination": "/run/peerlane/x"}]}`,
		`{"root": {"path": "a"}, "hooks": {}, "hooks": {}}`,
		`{"root": {"path": "a"}, "hooks": {"createRuntime": [], "createRuntime": []}}`,
	} {
		s, err := Parse([]byte(text))
		if _, ok := errors.AsType[*DuplicateKeyError](err); !ok {
			t.Errorf("%s is %+v, %v", text, s, err)
		}
	}
	// Duplicates of unknown keys are accepted.
	if _, err := Parse([]byte(`{"root": {"path": "a"}, "annotations": {"a": "b", "a": "c"}, "x": 1, "x": 2}`)); err != nil {
		t.Error(err)
	}
}

// Read refuses a config.json above the limit without reading it.
func TestReadHugeSpecFailsUnread(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config.json")
	if err := os.WriteFile(path, []byte(`{"root":{"path":"r"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 100<<20); err != nil {
		t.Fatal(err)
	}
	allocated := testing.AllocsPerRun(1, func() {
		_, err := Read(dir)
		if !testutil.HasError(err, &paths.SizeError{Path: path, Bytes: 100 << 20, Limit: MaxBytes}) {
			t.Errorf("%v", err)
		}
	})
	if allocated > 100 {
		t.Errorf("%v allocations", allocated)
	}
}

func TestMountBelowSocketIsRefused(t *testing.T) {
	for destination, refused := range map[string]bool{
		"/run/peerlane": false, "/run/peerlanes/x": false, "/run": false, "/": false, "": false,
		"/run/peerlane/x": true, "run/peerlane/x": true, "/run//peerlane/./x/y": true, "/a/../run/peerlane/x": true,
		"/../run/peerlane/relay.sock": true,
	} {
		s := RootOnly("r")
		s.Mounts = []Mount{{Destination: destination}}
		if err := s.NothingBelow(); (err != nil) != refused {
			t.Errorf("%q: %v", destination, err)
		}
	}
}
