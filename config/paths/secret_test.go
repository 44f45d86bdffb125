package paths

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestReadSecretOfOtherModeFails(t *testing.T) {
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
		// want is nil for a readable file.
		want func(path string) error
	}
	notRegular := func(string) error { return ErrNotRegular }
	secrets := []secret{
		{"root's alone", file(0o600), nil},
		{"read-only", file(0o400), nil},
		{"a group reads it", file(0o640), func(path string) error { return &ModeError{path, 0o640, true} }},
		{"everybody reads it", file(0o604), func(path string) error { return &ModeError{path, 0o604, true} }},
		{"a group executes it", file(0o610), func(path string) error { return &ModeError{path, 0o610, true} }},
		{"a group writes it", file(0o620), func(path string) error { return &ModeError{path, 0o620, false} }},
		{"a link", func(path string) error {
			if err := os.WriteFile(path+".real", []byte("secret"), 0o600); err != nil {
				return err
			}
			return os.Symlink(path+".real", path)
		}, notRegular},
		{"a pipe", func(path string) error { return unix.Mkfifo(path, 0o600) }, notRegular},
		{"as long as possible", func(path string) error {
			return os.WriteFile(path, []byte("secret!!"), 0o600)
		}, nil},
		{"too long", func(path string) error { return os.WriteFile(path, make([]byte, 9), 0o600) },
			func(path string) error { return &SizeError{path, 9, 8} }},
		{"in a directory of all", func(path string) error {
			if err := file(0o600)(path); err != nil {
				return err
			}
			return os.Chmod(filepath.Dir(path), 0o777)
		}, func(path string) error { return &ModeError{filepath.Dir(path), 0o777, false} }},
		{"not there", func(string) error { return nil }, func(string) error { return fs.ErrNotExist }},
	}
	if os.Geteuid() == 0 { // only root can change the owner of a file
		secrets = append(secrets, secret{"another's", func(path string) error {
			return errors.Join(file(0o600)(path), os.Chown(path, 65534, 0))
		}, func(path string) error { return &OwnerError{path, 65534} }})
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
			if c.want == nil {
				if err != nil || strings.TrimSuffix(string(text), "!!") != "secret" {
					t.Errorf("%q, %v", text, err)
				}
				return
			}
			want := c.want(path)
			if !testutil.HasError(err, want) {
				t.Errorf("error %v, want %v", err, want)
			}
			_, tooLong := want.(*SizeError)
			uncoded := tooLong || want == fs.ErrNotExist
			if text != nil || errors.Is(err, fault.UntrustedFile) == uncoded {
				t.Errorf("%q, %v; code %s expected: %v", text, err, fault.UntrustedFile, !uncoded)
			}
		})
	}
}

// The kernel reports size 0 for files of /proc.
func TestReadSecretOfGrowingFileFails(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, who owns the directory of this process in /proc")
	}
	path := filepath.Join("/proc", strconv.Itoa(os.Getpid()), "environ")
	all, err := ReadSecret(path, 1<<20)
	if err != nil || len(all) < 2 {
		t.Fatalf("%d bytes, %v", len(all), err)
	}
	if _, err := ReadSecret(path, int64(len(all))-1); err == nil {
		t.Errorf("%d bytes are read with a limit of %d", len(all), len(all)-1)
	}
	if text, err := ReadSecret(path, int64(len(all))); err != nil || len(text) != len(all) {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}
