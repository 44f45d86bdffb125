package libpeerlane_test

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/libpeerlane"
)

// newestGlibc is the newest version of glibc's that the library may need.
const newestGlibc = 28

func TestLibraryNeedsLibcOnly(t *testing.T) {
	f, err := elf.Open(filepath.Join(library(t), libpeerlane.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	// Thread-local errors need the loader, which every process has.
	for _, n := range needed {
		if !slices.Contains([]string{"libc.so.6", "libpthread.so.0", "libdl.so.2"}, n) && !strings.HasPrefix(n, "ld-linux") {
			t.Errorf("it needs %s", n)
		}
	}
	// Before glibc 2.34 the functions are not in libc.
	for _, n := range []string{"libpthread.so.0", "libdl.so.2"} {
		if !slices.Contains(needed, n) {
			t.Errorf("it does not name %s", n)
		}
	}
	symbols, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	versioned := 0
	for _, s := range symbols {
		if s.Version == "" {
			// Weak symbols of the compiler, which no library defines.
			if !strings.HasPrefix(s.Name, "_ITM_") && s.Name != "__gmon_start__" {
				t.Errorf("it needs %s of no version", s.Name)
			}
			continue
		}
		versioned++
		minor, err := strconv.Atoi(strings.Split(strings.TrimPrefix(s.Version, "GLIBC_2."), ".")[0])
		if err != nil || minor > newestGlibc {
			t.Errorf("it needs %s of %s, and may of GLIBC_2.%d", s.Name, s.Version, newestGlibc)
		}
		if strings.HasPrefix(s.Name, "cu") ||
			slices.Contains([]string{"exit", "_exit", "abort", "sigaction", "signal", "printf", "puts", "fputs"}, s.Name) {
			t.Errorf("it calls %s", s.Name)
		}
	}
	if versioned < 20 {
		t.Errorf("the test sees %d versions only", versioned)
	}
	flags, err := f.DynValue(elf.DT_FLAGS_1)
	if err != nil || len(flags) != 1 || elf.DynFlag1(flags[0])&elf.DF_1_NODELETE == 0 {
		t.Errorf("it can be unloaded, under a thread of its own: %v, %v", flags, err)
	}
	name, err := f.DynString(elf.DT_SONAME)
	if err != nil || len(name) != 1 || name[0] != libpeerlane.Name {
		t.Errorf("its name is %v, %v", name, err)
	}
}

// earlierNames are the names of functions in earlier packages of libpeerlane.so.0, with the
// names of today.
var earlierNames = map[string]string{"peerlane_offer": "peerlane_expose", "peerlane_withdraw": "peerlane_revoke"}

// The library exports the declared functions and the earlier names of functions, with the version
// of the library, and no further symbol.
func TestLibraryExportsHeaderAndEarlierNames(t *testing.T) {
	dir := library(t)
	f, err := elf.Open(filepath.Join(dir, libpeerlane.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var shown []string
	address := map[string]uint64{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && s.Name != "PEERLANE_0" {
			shown = append(shown, s.Name)
			address[s.Name] = s.Value
			if s.Version != "PEERLANE_0" {
				t.Errorf("%s has the version %q", s.Name, s.Version)
			}
		}
	}
	header, err := os.ReadFile(filepath.Join(dir, "peerlane.h"))
	if err != nil {
		t.Fatal(err)
	}
	var declared []string
	for _, line := range strings.Split(string(header), "\n") {
		if rest, ok := strings.CutPrefix(line, "PEERLANE_API "); ok {
			before, _, _ := strings.Cut(rest, "(")
			fields := strings.Fields(strings.ReplaceAll(before, "*", " "))
			declared = append(declared, fields[len(fields)-1])
		}
	}
	for earlier, now := range earlierNames {
		declared = append(declared, earlier)
		if address[earlier] == 0 || address[earlier] != address[now] {
			t.Errorf("%s is at %#x, and %s at %#x", earlier, address[earlier], now, address[now])
		}
	}
	slices.Sort(shown)
	slices.Sort(declared)
	if !slices.Equal(shown, declared) {
		t.Errorf("the library exports %v, want %v", shown, declared)
	}
}

func TestLibraryBuiltTwiceIsIdentical(t *testing.T) {
	library(t)
	var content [2][]byte
	for i := range content {
		dir := t.TempDir()
		if err := libpeerlane.Build(dir); err != nil {
			t.Fatal(err)
		}
		var err error
		if content[i], err = os.ReadFile(filepath.Join(dir, libpeerlane.Name)); err != nil {
			t.Fatal(err)
		}
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 2 {
			t.Errorf("a build leaves %v, %v", left, err)
		}
	}
	if !bytes.Equal(content[0], content[1]) {
		t.Error("the same source gives two libraries")
	}
}

// As a package would have it: pkg-config finds the library and the flags to build a program.
func TestInstallationByPkgConfigBuildsProgram(t *testing.T) {
	pkgConfig, err := exec.LookPath("pkg-config")
	programs.MustHave(t, err)
	library(t)
	root := t.TempDir()
	p := libpeerlane.Places{
		Library: filepath.Join(root, "usr/lib/peerlane"), Include: filepath.Join(root, "usr/include"),
		PkgConfig: filepath.Join(root, "usr/share/pkgconfig"), Version: "1.2.3",
	}
	if err := libpeerlane.Install(p); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PKG_CONFIG_PATH", p.PkgConfig)
	version, err := exec.Command(pkgConfig, "--modversion", "peerlane").CombinedOutput()
	if err != nil || string(version) != "1.2.3\n" {
		t.Errorf("pkg-config finds version %q: %v", version, err)
	}
	flags, err := exec.Command(pkgConfig, "--cflags", "--libs", "peerlane").CombinedOutput()
	if err != nil {
		t.Fatalf("pkg-config: %v: %s", err, flags)
	}
	binary := filepath.Join(root, "transfer")
	args := append(
		[]string{"-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=gnu11", "-o", binary, "examples/transfer.c"},
		strings.Fields(string(flags))...)
	if out, err := exec.Command("cc", append(args, "-ldl")...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.Command("readelf", "-d", binary).CombinedOutput()
	if err == nil && !strings.Contains(string(out), "["+libpeerlane.Name+"]") {
		t.Errorf("the program does not name the library: %s", out)
	}
	// The program runs if the loader finds the library, and fails with a message without a relay.
	c := exec.Command(binary, filepath.Join(root, "none/s"), devices[0].UUID, "receive", "1", "1", "1")
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+p.Library)
	if out, err := c.CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "--device peerlane.dev/lane="+devices[0].UUID) {
		t.Errorf("without a relay: %v: %s", err, out)
	}
}

// The header compiles in C++, too, and needs no header before.
func TestHeaderAloneCompilesInCAndCPlusPlus(t *testing.T) {
	dir := library(t)
	for _, c := range [][]string{{"cc", "-std=c99", "-x", "c"}, {"c++", "-std=c++11", "-x", "c++"}} {
		if _, err := exec.LookPath(c[0]); err != nil {
			t.Logf("no %s here", c[0])
			continue
		}
		cmd := exec.Command(
			c[0],
			append(c[1:], "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", dir, "-fsyntax-only", "-")...)
		cmd.Stdin = strings.NewReader("#include \"peerlane.h\"\nint status = PEERLANE_STATUS_FORKED;\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", c[0], err, out)
		}
	}
}

func TestPythonAndCProgramsTransfer(t *testing.T) {
	_, err := exec.LookPath("python3")
	programs.MustHave(t, err)
	transfer := program(t, "examples", "transfer", plain)
	t.Setenv("LIBPEERLANE", filepath.Join(library(t), libpeerlane.Name))
	const bytes, count, seed = 100_003, 5, 1 << 63
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			a, b := newHost(t).pair(route, 0, 1)
			for _, c := range []struct{ from, to string }{{"examples/transfer.py", transfer},
				{transfer, "examples/transfer.py"}, {"examples/transfer.py", "examples/transfer.py"}} {
				receives, handle := receiver(t, c.to, b, 1, bytes, count, uint64(seed))
				sends := sender(t, c.from, a, 0, handle, bytes, count, uint64(seed))
				want := fmt.Sprintf("%d messages of %d bytes\n", count, bytes)
				if got := sends.end(); got != "sent "+want {
					t.Errorf("the sender says %q", got)
				}
				if got := receives.end(); got != "received "+want {
					t.Errorf("the receiver says %q", got)
				}
			}
		})
	}
}
