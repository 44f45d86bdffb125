package paths

import (
	"errors"
	"io/fs"
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
		want error // nil: readable; PATH and DIR stand for the file and its directory
	}
	secrets := []secret{
		{"root's alone", file(0o600), nil},
		{"read-only", file(0o400), nil},
		{"a group reads it", file(0o640), &ModeError{"PATH", 0o640, true}},
		{"everybody reads it", file(0o604), &ModeError{"PATH", 0o604, true}},
		{"a group executes it", file(0o610), &ModeError{"PATH", 0o610, true}},
		{"a group writes it", file(0o620), &ModeError{"PATH", 0o620, false}},
		{"a link", func(path string) error {
			if err := os.WriteFile(path+".real", []byte("secret"), 0o600); err != nil {
				return err
			}
			return os.Symlink(path+".real", path)
		}, ErrNotRegular},
		{"a pipe", func(path string) error { return unix.Mkfifo(path, 0o600) }, ErrNotRegular},
		{"too long", func(path string) error { return os.WriteFile(path, make([]byte, 9), 0o600) }, &SizeError{"PATH", 9, 8}},
		{"in a directory of all", func(path string) error {
			if err := file(0o600)(path); err != nil {
				return err
			}
			return os.Chmod(filepath.Dir(path), 0o777)
		}, &ModeError{"DIR", 0o777, false}},
		{"not there", func(string) error { return nil }, fs.ErrNotExist},
	}
	if os.Geteuid() == 0 { // only root can give a file away
		secrets = append(secrets, secret{"another's", func(path string) error {
			return errors.Join(file(0o600)(path), os.Chown(path, 65534, 0))
		}, &OwnerError{"PATH", 65534}})
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
				if err != nil || string(text) != "secret" {
					t.Errorf("%q, %v", text, err)
				}
				return
			}
			where := func(name string) string {
				return strings.NewReplacer("PATH", path, "DIR", filepath.Dir(path)).Replace(name)
			}
			uncoded := false
			switch want := c.want.(type) {
			case *ModeError:
				got, ok := errors.AsType[*ModeError](err)
				if !ok || *got != (ModeError{where(want.Path), want.Mode, want.Secret}) {
					t.Errorf("error %v, want %v", err, want)
				}
			case *OwnerError:
				got, ok := errors.AsType[*OwnerError](err)
				if !ok || *got != (OwnerError{where(want.Path), want.UID}) {
					t.Errorf("error %v, want %v", err, want)
				}
			case *SizeError:
				uncoded = true
				got, ok := errors.AsType[*SizeError](err)
				if !ok || *got != (SizeError{where(want.Path), want.Bytes, want.Limit}) {
					t.Errorf("error %v, want %v", err, want)
				}
			default:
				uncoded = want == fs.ErrNotExist
				if !errors.Is(err, want) {
					t.Errorf("error %v, want %v", err, want)
				}
			}
			if text != nil || errors.Is(err, fault.UntrustedFile) == uncoded {
				t.Errorf("%q, %v; code %s expected: %v", text, err, fault.UntrustedFile, !uncoded)
			}
		})
	}
}
