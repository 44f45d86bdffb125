package config_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/BurntSushi/toml"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
)

// FuzzLoad checks that Load refuses a file and names its path, or returns a configuration that
// Write and Load reproduce.
func FuzzLoad(f *testing.F) {
	f.Add(
		[]byte(
			"[relay]\nslots = 4\nslot_size = \"1MiB\"\nenvironment = [\"A=b\"]\n[staging]\nlimit = \"2GiB\"\ngpus = { \"1\" " +
				"= \"0\" }\n",
		),
	)
	f.Add(
		[]byte(
			"[[plan.lane]]\ngpu = \"3\"\nservers = [\"0\", \"1\"]\nnics = [\"mlx5_0\"]\n[groups]\nhalf0 = " +
				"[\"0\"]\n[cdi]\ntenancy = \"multi\"\n",
		),
	)
	f.Add([]byte("[[plan.lane]]\ngpu = \"3\"\nservers = []\n"))
	f.Add([]byte("[runtime]\ndevices = [\"peerlane.dev/lane=*\"]\n[hook]\non_failure = \"warn\"\n"))
	f.Add([]byte("[relay.limits]\nhost_memory = \"9EiB\"\n[relay]\nuids = \"1-2\"\n"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(dir, "config.toml")
		read := func(text []byte) (config.Config, error) {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
			return config.Load(path)
		}
		c, err := read(text)
		if err != nil {
			var f *fault.Error
			if !errors.As(err, &f) || f.Object != path {
				t.Errorf("the error does not name the file: %v", err)
			}
			return
		}
		written := write(t, c)
		again, err := read(written)
		if err != nil {
			t.Fatalf("%v\n%s", err, written)
		}
		if got := write(t, again); !bytes.Equal(got, written) {
			t.Errorf("written: %s\nread, and written again: %s", written, got)
		}
	})
}

func write(t *testing.T, c config.Config) []byte {
	t.Helper()
	var text bytes.Buffer
	if err := toml.NewEncoder(&text).Encode(c); err != nil {
		t.Fatal(err)
	}
	return text.Bytes()
}
