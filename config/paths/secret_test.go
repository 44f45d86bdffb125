package paths

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestSecretsThatOthersKnow(t *testing.T) {
	file := func(mode os.FileMode) func(string) error {
		return func(path string) error {
			if err := os.WriteFile(path, []byte("secret"), 0o600); err != nil {
				return err
			}
			return os.Chmod(path, mode)
		}
	}
	type secret struct {
		name string
		make func(path string) error
		says string // empty: readable
	}
	secrets := []secret{
		{"root's alone", file(0o600), ""},
		{"read-only", file(0o400), ""},
		{"a group reads it", file(0o640), "users other than its owner can read or write it (mode 0640)"},
		{"everybody reads it", file(0o604), "mode 0604"},
		{"a group executes it", file(0o610), "mode 0610"},
		{"a group writes it", file(0o620), "can be written by"},
		{"a link", func(path string) error {
			if err := os.WriteFile(path+".real", []byte("secret"), 0o600); err != nil {
				return err
			}
			return os.Symlink(path+".real", path)
		}, "not a regular file"},
		{"a pipe", func(path string) error { return unix.Mkfifo(path, 0o600) }, "not a regular file"},
		{"too long", func(path string) error { return os.WriteFile(path, make([]byte, 9), 0o600) },
			"has 9 bytes, more than 8"},
		{"in a directory of all", func(path string) error {
			if err := file(0o600)(path); err != nil {
				return err
			}
			return os.Chmod(filepath.Dir(path), 0o777)
		}, "can be written by"},
		{"not there", func(string) error { return nil }, "no such file"},
	}
	if os.Geteuid() == 0 { // only root can give a file away
		secrets = append(secrets, secret{"another's", func(path string) error {
			return errors.Join(file(0o600)(path), os.Chown(path, 65534, 0))
		}, "belongs to uid 65534"})
	}
	for _, c := range secrets {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "key")
			if err := os.Chmod(filepath.Dir(path), 0o755); err != nil { // with any umask
				t.Fatal(err)
			}
			if err := c.make(path); err != nil {
				t.Fatal(err)
			}
			text, err := ReadSecret(path, 8)
			switch {
			case c.says != "" && !errors.Is(err, fault.UntrustedFile) && c.name != "too long" && c.name != "not there":
				t.Errorf("%v has not the code %s", err, fault.UntrustedFile)
			case c.says == "" && (err != nil || string(text) != "secret"):
				t.Errorf("%q, %v", text, err)
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says) || text != nil):
				t.Errorf("%q, %v; want an error with %q", text, err, c.says)
			}
		})
	}
}
