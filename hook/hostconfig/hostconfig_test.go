package hostconfig

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

const (
	valid    = "[relay]\ncpus = 7\n"
	previous = "[relay]\ncpus = 6\n"
	damaged  = "[relay\n"
)

// host writes the configuration and the last good copy, each with a mode, and returns the layout. An
// empty text is no file.
func host(t *testing.T, text string, mode os.FileMode, good string, goodMode os.FileMode) paths.Layout {
	t.Helper()
	l := paths.New(t.TempDir())
	for path, f := range map[string]struct {
		text string
		mode os.FileMode
	}{l.ConfigFile(): {text, mode}, l.GoodConfig(): {good, goodMode}} {
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil && f.text != "" {
			err = errors.Join(os.WriteFile(path, []byte(f.text), 0o600), os.Chmod(path, f.mode))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func TestLoadReplacesFaultyConfigurationByLastGood(t *testing.T) {
	fromDefault := config.Default().Relay.CPUs
	for _, c := range []struct {
		name     string
		text     string
		mode     os.FileMode
		good     string
		goodMode os.FileMode
		cpus     int // 0 for an error
		replaced bool
	}{
		{"no file", "", 0, "", 0, fromDefault, false},
		{"a file", valid, 0o644, "", 0, 7, false},
		{"a file and a copy", valid, 0o644, previous, 0o644, 7, false},
		{"no file and a copy", "", 0, previous, 0o644, fromDefault, false},
		{"a damaged file", damaged, 0o644, "", 0, 0, false},
		{"a damaged file and a copy", damaged, 0o644, previous, 0o644, 6, true},
		{"a damaged file and a copy that others can write", damaged, 0o644, previous, 0o666, 0, false},
		{"a damaged file and a damaged copy", damaged, 0o644, damaged, 0o644, 0, false},
		{"a file that others can write", valid, 0o666, previous, 0o644, 0, false},
	} {
		l := host(t, c.text, c.mode, c.good, c.goodMode)
		got, err := Load(l)
		if (err == nil) != (c.cpus > 0) || err == nil && (got.Relay.CPUs != c.cpus || (got.Replaced != nil) != c.replaced) {
			t.Errorf("%s: %d cpus, replaced by %v, %v", c.name, got.Relay.CPUs, got.Replaced, err)
		}
		if f, ok := errors.AsType[*fault.Error](err); c.mode == 0o666 && (!ok || f.Code != fault.UntrustedFile) {
			t.Errorf("%s: %v", c.name, err)
		}
		read, errRead := Read(l)
		if (errRead == nil) != (err == nil) || err == nil && read.Relay.CPUs != c.cpus {
			t.Errorf("%s: Read: %d cpus, %v", c.name, read.Relay.CPUs, errRead)
		}
	}
}

// keep loads the configuration of a host and keeps it.
func keep(t *testing.T, l paths.Layout) error {
	t.Helper()
	c, err := Load(l)
	if err != nil {
		t.Fatal(err)
	}
	return c.Keep(l)
}

func TestKeepCopiesChangedConfiguration(t *testing.T) {
	for _, c := range []struct{ name, text, good, want string }{
		{"the first file", valid, "", valid},
		{"another file", valid, previous, valid},
		{"the same file", valid, valid, valid},
		{"no file", "", "", ""},
		{"a damaged file", damaged, previous, previous},
	} {
		l := host(t, c.text, 0o644, c.good, 0o600)
		before, _ := os.Stat(l.GoodConfig()) // nil without a copy
		if err := keep(t, l); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		got, err := os.ReadFile(l.GoodConfig())
		if string(got) != c.want || (c.want == "") != errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
		after, err := os.Stat(l.GoodConfig())
		if c.want != "" && (err != nil || after.Mode() != 0o600) {
			t.Errorf("%s: %v, %v", c.name, after, err)
		}
		if c.good == c.want && c.want != "" && !os.SameFile(before, after) {
			t.Errorf("%s: Keep writes the same copy", c.name)
		}
		if _, err := os.Lstat(l.GoodConfig() + ".new"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the temporary file: %v", c.name, err)
		}
	}
}

// The copy follows a removed or emptied file too.
func TestKeepWithoutFileEmptiesCopy(t *testing.T) {
	l := host(t, "", 0, previous, 0o600)
	if err := keep(t, l); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(l.GoodConfig()); err != nil || len(got) > 0 {
		t.Errorf("%q, %v", got, err)
	}
}

func TestKeepBesideTemporaryFileOfAnotherHook(t *testing.T) {
	for _, c := range []struct {
		name string
		age  time.Duration
		left bool
	}{{"a running hook", 0, true}, {"a killed hook", 2 * time.Minute, false}} {
		l := host(t, valid, 0o644, "", 0)
		temporary := l.GoodConfig() + ".new"
		made := time.Now().Add(-c.age)
		if err := errors.Join(os.WriteFile(temporary, nil, 0o600), os.Chtimes(temporary, made, made), keep(t,
			l)); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if _, err := os.Lstat(temporary); errors.Is(err, fs.ErrNotExist) == c.left {
			t.Errorf("%s: the temporary file: %v", c.name, err)
		}
		if _, err := os.Lstat(l.GoodConfig()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the copy: %v", c.name, err)
		}
		if c.left {
			continue
		}
		if err := keep(t, l); err != nil {
			t.Errorf("%s: the next hook: %v", c.name, err)
		}
		if got, err := os.ReadFile(l.GoodConfig()); string(got) != valid {
			t.Errorf("%s: the next hook writes %q, %v", c.name, got, err)
		}
	}
}

func TestKeepWithoutDirectoryIsNoError(t *testing.T) {
	l := host(t, valid, 0o644, "", 0)
	if err := os.RemoveAll(filepath.Dir(l.GoodConfig())); err != nil {
		t.Fatal(err)
	}
	if err := keep(t, l); err != nil {
		t.Errorf("without a directory: %v", err)
	}
}

func TestKeepUnwritableCopyFails(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(good string) error
		err  error
	}{
		{"a directory in place of the copy", func(good string) error { return os.Mkdir(good, 0o755) }, unix.EISDIR},
		{"a file in place of the directory", func(good string) error {
			return errors.Join(os.RemoveAll(filepath.Dir(good)), os.WriteFile(filepath.Dir(good), nil, 0o600))
		}, unix.ENOTDIR},
	} {
		l := host(t, valid, 0o644, "", 0)
		if err := c.make(l.GoodConfig()); err != nil {
			t.Fatal(err)
		}
		if err := keep(t, l); !errors.Is(err, c.err) {
			t.Errorf("%s: %v", c.name, err)
		}
		if err := (Config{}).Keep(l); !errors.Is(err, c.err) {
			t.Errorf("%s, without a file: %v", c.name, err)
		}
		if err := (Config{text: []byte(valid)}).replace(l.GoodConfig()); err == nil {
			t.Errorf("%s: replace has no error", c.name)
		}
		if _, err := os.Lstat(l.GoodConfig() + ".new"); err == nil {
			t.Errorf("%s: the temporary file stays", c.name)
		}
	}
}
