package nixl_test

import (
	"bufio"
	"bytes"
	"debug/elf"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/nixl"
	"github.com/peerlane/peerlane/relay/softhost/process"
	"github.com/peerlane/peerlane/relay/wire"
)

// sources are the sources of the plugin; programs of tests have further sources.
var sources = []string{
	"plugin.go", "source/*", "forward/*", "../libpeerlane/library.go", "../libpeerlane/source/*", "../wire/*.h",
}

// build builds files for several tests, unless an earlier run built them from the same sources, and
// returns the directory. own are further sources.
func build(t *testing.T, name string, make func(dir string) error, own ...string) string {
	t.Helper()
	_, err := nixl.Compiler()
	programs.MustHave(t, err)
	key, err := programs.Key(append(slices.Clone(sources), own...)...)
	if err != nil {
		t.Fatal(err)
	}
	return programs.Built(t, key, name, make)
}

// sanitized are the flags of plugin and harness for sanitizers.
var sanitized = []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr",
	"-DPEERLANE_UNBOUND", "-O1"}

func plugin(t *testing.T) string {
	t.Helper()
	return filepath.Join(build(t, "plugin", func(dir string) error { return nixl.Build(dir) }), nixl.Name)
}

func sanitizedPlugin(t *testing.T) string {
	t.Helper()
	// The sanitizers' own functions are the program's.
	return filepath.Join(build(t, "sanitized", func(dir string) error {
		return nixl.Build(dir, append(sanitized, "-Wl,-z,undefs")...)
	}), nixl.Name)
}

// compile compiles a program of tests with the C++ compiler.
func compile(dir, name string, flags ...string) error {
	if _, _, err := nixl.Unpack(dir); err != nil {
		return err
	}
	compiler, err := nixl.Compiler()
	if err != nil {
		return err
	}
	args := append(append(compiler[1:], "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"), flags...)
	args = append(args, "-I", dir, "-o", filepath.Join(dir, name), "tests/"+name+".cpp", "-ldl")
	if out, err := exec.Command(compiler[0], args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func program(t *testing.T, name string, flags ...string) string {
	t.Helper()
	return filepath.Join(build(t, name+strings.Join(flags, ""), func(dir string) error {
		return compile(dir, name, flags...)
	}, "tests/"+name+".cpp"), name)
}

// library stands for libnixl.so in the harness.
func library(t *testing.T, flags ...string) string {
	t.Helper()
	const name = "libnixl.so"
	return filepath.Join(build(t, "library"+strings.Join(flags, ""), func(dir string) error {
		compiler, err := libpeerlane.Compiler()
		if err != nil {
			return err
		}
		args := append(append(compiler[1:], "-shared", "-fPIC", "-o", filepath.Join(dir, name), "tests/libnixl.c"), flags...)
		if out, err := exec.Command(compiler[0], args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}, "tests/libnixl.c"), name)
}

// run describes a run of the harness.
type run struct {
	plugin, harness, library      string
	mode                          string
	seed                          uint64
	regions, blocks, bytes, times int
	environment                   []string
}

func (r run) command(a, b *lane) *exec.Cmd {
	c := exec.Command(r.harness, r.plugin, r.library, r.mode, strconv.FormatUint(r.seed, 10), a.socket, a.uuid, b.socket,
		b.uuid,
		strconv.Itoa(r.regions), strconv.Itoa(r.blocks), strconv.Itoa(r.bytes), strconv.Itoa(r.times))
	c.Env = append(os.Environ(), r.environment...)
	return c
}

// must runs the harness to the end, demands success, and returns the output.
func (r run) must(t *testing.T, a, b *lane) string {
	t.Helper()
	out, err := r.command(a, b).CombinedOutput()
	if err != nil || strings.Count(string(out), ": done\n") != 2 {
		t.Fatalf("%s, seed %d: %v: %s%s%s", r.mode, r.seed, err, out, a.Stderr, b.Stderr)
	}
	return string(out)
}

// seed is new in every run of the tests; PEERLANE_NIXL_SEED repeats a run.
func seed(t *testing.T) uint64 {
	t.Helper()
	if text := os.Getenv("PEERLANE_NIXL_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return uint64(time.Now().UnixNano())
}

func newRun(t *testing.T, mode string) run {
	return run{plugin: plugin(t), harness: program(t, "harness"), library: library(t), mode: mode, seed: seed(t),
		regions: 4, blocks: 64, bytes: 4096, times: 3}
}

func TestPluginCalledAsVLLMDoesMovesBlocks(t *testing.T) {
	for _, route := range []string{launch.RouteDirect, launch.RouteStaged} {
		h := newHost(t, route)
		out := newRun(t, "vllm").must(t, h.lane(0), h.lane(1))
		if line := "PEERLANE: agent agent 0: route " + route + ", lane " + process.Devices[1].UUID + " to " +
			process.Devices[0].UUID + ", list operations"; strings.Count(out, line) != 1 {
			t.Errorf("no line %q in %s", line, out)
		}
	}
}

func TestPluginCalledAsSGLangDoesMovesBlocks(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	newRun(t, "sglang").must(t, h.lane(0), h.lane(1))
}

func TestPluginRandomListsMatchModel(t *testing.T) {
	for _, route := range []string{launch.RouteDirect, launch.RouteStaged} {
		h := newHost(t, route)
		r := newRun(t, "random")
		r.times = 25
		r.must(t, h.lane(0), h.lane(1))
	}
}

func TestPluginUnderSanitizersPasses(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	a, b := h.lane(0), h.lane(1)
	for _, mode := range []string{"vllm", "random"} {
		r := newRun(t, mode)
		r.plugin, r.harness, r.times = sanitizedPlugin(t), program(t, "harness", sanitized...), 8
		r.environment = []string{"ASAN_OPTIONS=detect_leaks=0"} // the simulator keeps objects
		r.must(t, a, b)
	}
}

func TestPluginWithoutKnownNIXLGivesNoTable(t *testing.T) {
	l := &lane{socket: "-", uuid: "-"}
	for name, c := range map[string]struct{ library, table, line string }{
		"1.0.0": {library(t), ": a table\n", ""},
		"0.x":   {library(t, "-DOLD"), ": no table\n", "install NIXL 1.0.0 or newer"},
		"none":  {"-", ": no table\n", "libnixl.so is not loaded"},
	} {
		r := newRun(t, "load")
		r.library = c.library
		out, err := r.command(l, l).CombinedOutput()
		if err != nil || strings.Count(string(out), c.table) != 2 || !strings.Contains(string(out), c.line) {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

// The newest versions that a binary for glibc 2.28 and for the libraries of GCC 8 may need.
var newest = map[string]string{"GLIBC": "2.28", "GLIBCXX": "3.4.25", "CXXABI": "1.3.11", "GCC": "7.0.0"}

func TestPluginNeedsOldLibrariesOnly(t *testing.T) {
	dir := filepath.Dir(plugin(t))
	for _, name := range nixl.Files() {
		f, err := elf.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		needed, err := f.ImportedLibraries()
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range needed {
			known := []string{"libc.so.6", "libpthread.so.0", "libdl.so.2"}
			if name == nixl.Name {
				known = append(known, "libstdc++.so.6", "libgcc_s.so.1")
			}
			if !slices.Contains(known, n) && !strings.HasPrefix(n, "ld-linux") {
				t.Errorf("%s needs %s", name, n)
			}
		}
		symbols, err := f.ImportedSymbols()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range symbols {
			of, version, versioned := strings.Cut(s.Version, "_")
			if versioned && !notNewer(version, newest[of]) {
				t.Errorf("%s needs %s of %s", name, s.Name, s.Version)
			}
		}
		exported, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		var shown []string
		for _, s := range exported {
			if s.Section != elf.SHN_UNDEF {
				shown = append(shown, s.Name)
			}
		}
		slices.Sort(shown)
		if !slices.Equal(shown, []string{"nixl_plugin_fini", "nixl_plugin_init"}) {
			t.Errorf("%s exports %v", name, shown)
		}
	}
}

// notNewer compares versions of numbers with dots.
func notNewer(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(x), len(y)) {
		m, errM := strconv.Atoi(x[i])
		n, errN := strconv.Atoi(y[i])
		if errM != nil || errN != nil || m != n {
			return errM == nil && errN == nil && m < n
		}
	}
	return len(x) <= len(y)
}

func TestForwarderLoadsPluginOfNIXL(t *testing.T) {
	compiler, err := libpeerlane.Compiler()
	programs.MustHave(t, err)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "plugins"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"-shared", "-fPIC", "-o", filepath.Join(dir, "libnixl.so"), "tests/libnixl.c"},
		{"-shared", "-fPIC", "-o", filepath.Join(dir, "plugins", nixl.ForwarderName("UCX")), "tests/own.c"},
		{"-o", filepath.Join(dir, "forwarded"), "tests/forwarded.c", "-ldl"},
	} {
		if out, err := exec.Command(compiler[0], append(compiler[1:], args...)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for backend, want := range map[string]string{"UCX": "0x77\n",
		"POSIX": "PEERLANE: libplugin_POSIX.so: NIXL's own plugin cannot be loaded from " + dir + "/plugins"} {
		out, err := exec.Command(filepath.Join(dir, "forwarded"), filepath.Join(dir, "libnixl.so"),
			filepath.Join(filepath.Dir(plugin(t)), nixl.ForwarderName(backend))).CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v: %s", backend, err, out)
		}
	}
}

// A transfer whose messages get no host memory ends, on either side, after few lines.
func TestPluginWithoutHostMemoryEndsTransfers(t *testing.T) {
	for name, c := range map[string]struct {
		first, second uint64 // limits; 0 is the default
		statuses      string
	}{
		"buffers of the reader":       {0, 64 << 10, "VRAM -3, DRAM -3"},
		"buffers of the owner":        {128 << 10, 0, "VRAM 0, DRAM -10"},
		"receives from the owner":     {0, 128 << 10, "VRAM 0, DRAM -10"},
		"buffers and receives of all": {256 << 10, 256 << 10, "VRAM 0, DRAM 0"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, launch.RouteDirect)
			h.limits.ClientHostMemory = c.first
			a := h.lane(0)
			h.limits.ClientHostMemory = c.second
			out := newRun(t, "limit").must(t, a, h.lane(1))
			if !strings.Contains(out, "rank 1: "+c.statuses+"\n") || strings.Count(out, "\n") > 30 {
				t.Errorf("%d lines, want %q among few: %.4000s", strings.Count(out, "\n"), c.statuses, out)
			}
		})
	}
}

// The owner's limit is enough for the receives and answers of three connections.
func TestPluginFreesMemoryOfEarlierConnections(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	h.limits.ClientHostMemory = 768 << 10
	newRun(t, "rejoin").must(t, h.lane(0), h.lane(1))
}

func TestSessionsNameNIXL(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	other := h.lane(1)
	hello := process.Hello(t, func(socket string) *exec.Cmd {
		return newRun(t, "vllm").command(&lane{uuid: other.uuid, socket: socket}, other)
	})
	if hello.Program != wire.ProgramNIXL {
		t.Errorf("the hello names program %d, want %d", hello.Program, wire.ProgramNIXL)
	}
}

func TestPluginWithStoppedPeersReachesOthers(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	newRun(t, "stop").must(t, h.lane(0), h.lane(1))
}

// A peer that takes no answers loses its connection: its transfers end.
func TestPluginClosesConnectionThatCannotBeServed(t *testing.T) {
	if out, err := exec.Command(program(t, "inbound", "-pthread", "-DPEERLANE_UNBOUND")).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// Kills of a client and of the relays while an agent reads: the transfer ends with
// NIXL_ERR_REMOTE_DISCONNECT, no byte is wrong, and the next handshake works. PEERLANE_NIXL_KILLS is
// their number.
func TestPluginDeathOfPeerIsRemoteDisconnect(t *testing.T) {
	kills := 3
	if text := os.Getenv("PEERLANE_NIXL_KILLS"); text != "" {
		var err error
		if kills, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	random := rand.New(rand.NewPCG(seed(t), 1))
	h := newHost(t, launch.RouteDirect)
	lanes := [2]*lane{h.lane(0), h.lane(1)}
	var slowest time.Duration
	for k := range kills {
		victim := k % 3
		if kills > 3 {
			victim = random.IntN(3)
		}
		slowest = max(slowest, killOne(t, newRun(t, "kill"), lanes, victim, time.Duration(random.IntN(50))*time.Millisecond,
			func() {}))
		if victim < 2 {
			lanes[victim] = h.lane(victim)
		}
	}
	newRun(t, "vllm").must(t, lanes[0], lanes[1])
	t.Logf("%d kills: the slowest error came after %v", kills, slowest)
}

// An agent reads again over the relay that takes the place of its own container's.
func TestPluginAfterDeathOfOwnRelayReadsAgain(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	lanes := [2]*lane{h.lane(0), h.lane(1)}
	r := newRun(t, "anew")
	killOne(t, r, lanes, 1, 0, func() { lanes[1] = h.lane(1) })
}

// killOne kills the relay of lanes[victim], or the first agent's process if victim is 2, and returns
// the time until the second agent has the error. It calls then after the kill.
func killOne(t *testing.T, r run, lanes [2]*lane, victim int, after time.Duration, then func()) time.Duration {
	t.Helper()
	c := r.command(lanes[0], lanes[1])
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(time.Until(testutil.Deadline()), func() { _ = c.Process.Kill() })
	defer timer.Stop()
	var said strings.Builder
	var killed time.Time
	var took time.Duration
	pid := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		said.WriteString(lines.Text() + "\n")
		if text, ok := strings.CutPrefix(lines.Text(), "rank 0: pid "); ok {
			pid, _ = strconv.Atoi(text)
		}
		if lines.Text() == "rank 1: moving" {
			time.Sleep(after)
			killed = time.Now()
			if victim < 2 {
				lanes[victim].Kill()
			} else if pid == 0 || syscall.Kill(pid, syscall.SIGKILL) != nil {
				t.Errorf("process %d cannot be killed", pid)
			}
			then()
		}
		if strings.HasPrefix(lines.Text(), "rank 1: status -10 ") {
			took = time.Since(killed)
		}
	}
	if err := c.Wait(); err != nil || took == 0 || !strings.Contains(said.String(), "rank 1: done\n") {
		t.Fatalf("victim %d after %v, seed %d: %v: %s%s", victim, after, r.seed, err, &said, &stderr)
	}
	return took
}
