package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// make install puts the packages' files below DESTDIR and PREFIX, rewrites the prefix in units,
// keeps an existing configuration, and uses the paths that commands search.
func TestInstallPutsThePackagesFilesBelowAPrefix(t *testing.T) {
	built, dest := t.TempDir(), t.TempDir()
	for _, name := range []string{"peerlane", "peerlane-runtime", "peerlane-hook", "peerlane-relay", "libpeerlane.so.0",
		"libnccl-net-peerlane.so", "libpeerlane-cuda-sim.so", "libpeerlane-softdevice.so"} {
		if err := os.WriteFile(filepath.Join(built, name), []byte("\x00"+name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mine := filepath.Join(dest, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(mine), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(mine, []byte("# mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("../../packaging/install", built, dest, "/opt/peerlane").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for path, mode := range map[string]os.FileMode{
		"bin/peerlane": 0o755, "libexec/peerlane/peerlane": 0o755, "bin/peerlane-runtime": 0o755,
		"libexec/peerlane/peerlane-hook": 0o755, "libexec/peerlane/peerlane-relay": 0o711,
		"lib/peerlane/libpeerlane.so.0": 0o644, "lib/peerlane/libnccl-net-peerlane.so": 0o644,
		"lib/systemd/system/peerlane-relay.socket": 0o644,
		"share/peerlane/alerts.yaml":               0o644, "share/peerlane/dashboard.json": 0o644,
		"share/doc/peerlane/quickstart.md": 0o644,
	} {
		if info, err := os.Stat(filepath.Join(dest, "opt/peerlane", path)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
	checkInstalledDocuments(t, filepath.Join(dest, "opt/peerlane/share/doc/peerlane"))
	if text, err := os.ReadFile(mine); err != nil || string(text) != "# mine\n" {
		t.Errorf("the configuration is %q, %v", text, err)
	}
	if _, err := os.Stat(filepath.Join(dest, "etc/peerlane/nccl.conf")); err != nil {
		t.Error(err)
	}
	unit, err := os.ReadFile(filepath.Join(dest, "opt/peerlane/lib/systemd/system/peerlane-relay@.service"))
	if err != nil || !strings.Contains(string(unit), "ExecStart=/opt/peerlane/libexec/peerlane/peerlane-hook accept") ||
		strings.Contains(string(unit), "/usr/libexec/peerlane") {
		t.Errorf("the unit of relays: %v\n%s", err, unit)
	}
	// The full program and its front.
	for _, place := range []string{"bin/peerlane", "libexec/peerlane/peerlane"} {
		self := filepath.Join(dest, "opt/peerlane", place)
		if got, want := prefixedLibraries(self, "/nosuch"), filepath.Join(dest, "opt/peerlane/lib/peerlane"); got != want {
			t.Errorf("%s looks for libraries in %q, not %q", place, got, want)
		}
		if got := prefixedLibraries(self, built); got != "" {
			t.Errorf("beside the package's libraries %s takes %q", place, got)
		}
		if got, want := runtimeOf(self), filepath.Join(dest, "opt/peerlane/bin/peerlane-runtime"); got != want {
			t.Errorf("%s names the runtime %s, not %s", place, got, want)
		}
	}
	if out, err := exec.Command("../../packaging/install", t.TempDir(), dest).CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "run make build") {
		t.Errorf("without a build: %v: %s", err, out)
	}
}

// checkInstalledDocuments checks that each page below docs is installed at the same path, where links
// of other pages lead.
func checkInstalledDocuments(t *testing.T, installed string) {
	t.Helper()
	const docs = "../../docs"
	err := filepath.WalkDir(docs, func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		page := strings.TrimPrefix(path, docs+"/")
		if _, err := os.Stat(filepath.Join(installed, page)); err != nil {
			t.Errorf("docs/%s is not installed: %v", page, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Without a built front, `make install` installs the full program under the name of the front.
// With a front, users start the front, and the front finds the full program.
func TestInstallPutsTheFrontBeforeTheCommand(t *testing.T) {
	built := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(built, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"peerlane", "peerlane-runtime", "peerlane-hook", "peerlane-relay", "libpeerlane.so.0",
		"libnccl-net-peerlane.so"} {
		write(name, "\x00"+name)
	}
	for _, front := range []string{"\x00peerlane", "\x00front"} {
		if front != "\x00peerlane" {
			write("front/peerlane", front)
		}
		dest := t.TempDir()
		if out, err := exec.Command("../../packaging/install", built, dest, "/usr").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		started := filepath.Join(dest, "usr/bin/peerlane")
		for path, want := range map[string]string{started: front, behindFront(started): "\x00peerlane"} {
			if text, err := os.ReadFile(path); err != nil || string(text) != want {
				t.Errorf("%s is %q, want %q, %v", path, text, want, err)
			}
		}
	}
}
