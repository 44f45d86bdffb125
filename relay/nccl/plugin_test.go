package nccl_test

import (
	"bufio"
	"bytes"
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/nccl"
)

// buildKey is that of everything that the tests compile.
var buildKey = sync.OnceValues(func() (string, error) {
	return programs.Key(
		"*.go",
		"source/*",
		"tests/*",
		"../libpeerlane/*.go",
		"../libpeerlane/source/*",
		"../libpeerlane/examples/*",
		"../wire/*.h",
	)
})

// build builds files for several tests, unless an earlier run built them from the same sources, and
// returns the directory.
func build(t *testing.T, name string, make func(dir string) error) string {
	t.Helper()
	_, err := libpeerlane.Compiler()
	programs.MustHave(t, err)
	key, err := buildKey()
	if err != nil {
		t.Fatal(err)
	}
	return programs.Built(t, key, name, make)
}

// sanitized are the flags of plugin and harness for sanitizers.
var sanitized = []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DPEERLANE_UNBOUND", "-O1"}

func plugin(t *testing.T) string {
	t.Helper()
	return filepath.Join(build(t, "plugin", func(dir string) error { return nccl.Build(dir) }), nccl.Name)
}

func sanitizedPlugin(t *testing.T) string {
	t.Helper()
	// The sanitizers' own functions are the program's.
	return filepath.Join(build(t, "sanitized", func(dir string) error {
		return nccl.Build(dir, append(sanitized, "-Wl,-z,undefs")...)
	}), nccl.Name)
}

func brokenPlugin(t *testing.T) string {
	t.Helper()
	return filepath.Join(build(t, "broken", func(dir string) error {
		broken, err := filepath.Abs("tests/broken.c")
		if err != nil {
			return err
		}
		return nccl.Build(dir, "-I.", "-O0", "-DncclNetPlugin_v11=sound_v11", broken)
	}), nccl.Name)
}

func program(t *testing.T, name string, flags ...string) string {
	t.Helper()
	return filepath.Join(build(t, name+strings.Join(flags, ""), func(dir string) error {
		if _, err := nccl.Unpack(dir); err != nil {
			return err
		}
		compiler, err := libpeerlane.Compiler()
		if err != nil {
			return err
		}
		args := append(append(compiler[1:], "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"), flags...)
		args = append(
			args,
			"-I",
			dir,
			"-I",
			"../libpeerlane/examples",
			"-o",
			filepath.Join(dir, name),
			"tests/"+name+".c",
			"-ldl",
		)
		if out, err := exec.Command(compiler[0], args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}), name)
}

// run describes a run of the harness.
type run struct {
	plugin, harness string
	version         int
	mode            string
	seed            uint64
	links, groups   int
	bytes, depth    int
	environment     []string
}

func (r run) command(a, b *lane) *exec.Cmd {
	c := exec.Command(
		r.harness,
		r.plugin,
		strconv.Itoa(r.version),
		r.mode,
		strconv.FormatUint(r.seed, 10),
		strconv.Itoa(r.links),
		strconv.Itoa(r.groups),
		strconv.Itoa(r.bytes),
		strconv.Itoa(r.depth),
		a.socket,
		a.uuid,
		b.socket,
		b.uuid,
	)
	c.Env = append(os.Environ(), r.environment...)
	return c
}

// must runs the harness to the end, and demands success.
func (r run) must(t *testing.T, a, b *lane) {
	t.Helper()
	out, err := r.command(a, b).CombinedOutput()
	if err != nil || strings.Count(string(out), ": done\n") != 2 {
		t.Fatalf("version %d, seed %d: %v: %s%s%s", r.version, r.seed, err, out, a.Stderr, b.Stderr)
	}
}

// seed is a new one for each run of the tests; PEERLANE_NCCL_SEED repeats a run.
func seed(t *testing.T) uint64 {
	t.Helper()
	if text := os.Getenv("PEERLANE_NCCL_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return uint64(time.Now().UnixNano())
}

func TestEachPluginVersionMovesRandomMessages(t *testing.T) {
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		mode:    "run",
		seed:    seed(t),
		links:   4,
		groups:  12,
		bytes:   64 << 10,
		depth:   4,
	}
	h := newHost(t, launch.RouteStaged)
	a, b := h.lane(0), h.lane(1)
	for r.version = 8; r.version <= 12; r.version++ {
		r.must(t, a, b)
	}
}

// A send of host memory ends when the plugin has copied it, so that NCCL's kernel runs ahead of a
// receiver that waits for a time slice. Sends that are under way when the communicator is closed
// arrive.
func TestSendsOfHostMemoryEndBeforeTheirReceives(t *testing.T) {
	for _, route := range []string{launch.RouteDirect, launch.RouteStaged} {
		h := newHost(t, route)
		r := run{
			plugin:  plugin(t),
			harness: program(t, "harness"),
			mode:    "ahead",
			version: 11,
			seed:    seed(t),
			links:   2,
			groups:  1,
			bytes:   64,
			depth:   1,
		}
		r.must(t, h.lane(0), h.lane(1))
	}
}

// Buffered sends between two ranks of a GPU arrive.
func TestSendsBetweenRanksOfOneGPUArrive(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	h.shared = true
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		mode:    "run",
		version: 11,
		seed:    seed(t),
		links:   4,
		groups:  16,
		bytes:   96 << 10,
		depth:   8,
	}
	r.must(t, h.lane(0), h.lane(1))
}

// More receives than a ring has places, of which each communicator may have 32.
func TestEachCommunicatorHas32Requests(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		mode:    "run",
		version: 12,
		seed:    seed(t),
		links:   12,
		groups:  34,
		bytes:   200,
		depth:   32,
	}
	r.must(t, h.lane(0), h.lane(1))
}

// More receives at once than a session has places: 64 communicators per direction.
func TestManyCommunicatorsWithAllReceivesTransfer(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		mode:    "run",
		version: 11,
		seed:    seed(t),
		links:   64,
		groups:  34,
		bytes:   64,
		depth:   32,
	}
	r.must(t, h.lane(0), h.lane(1))
}

func TestMessagesOfMebibytesArrive(t *testing.T) {
	h := newHost(t, launch.RouteStaged)
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		mode:    "run",
		version: 10,
		seed:    seed(t),
		links:   2,
		groups:  3,
		bytes:   5 << 20,
		depth:   1,
	}
	if os.Getenv("PEERLANE_NCCL_SOAK") != "" {
		r.bytes, r.groups = 64<<20, 40
	}
	r.must(t, h.lane(0), h.lane(1))
}

func TestPluginUnderSanitizersAndForkPasses(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	r := run{
		plugin:  sanitizedPlugin(t),
		harness: program(t, "harness", sanitized...),
		mode:    "fork",
		version: 11,
		seed:    seed(t),
		links:   3,
		groups:  6,
		bytes:   10000,
		depth:   3,
	}
	r.environment = []string{"ASAN_OPTIONS=detect_leaks=0"} // the simulator keeps objects
	r.must(t, h.lane(0), h.lane(1))
}

// The harness detects broken rules. The remaining tests show that a correct plugin breaks no rule.
func TestHarnessDetectsBrokenPlugin(t *testing.T) {
	r := run{
		plugin:  brokenPlugin(t),
		harness: program(t, "harness"),
		version: 11,
		mode:    "run",
		seed:    7,
		links:   2,
		groups:  60,
		bytes:   20000,
		depth:   4,
	}
	h := newHost(t, launch.RouteDirect)
	a, b := h.lane(0), h.lane(1)
	for what, c := range map[string]struct {
		want  string
		limit string // where it is seen by nothing happening
		// refused is the error of the plugin, if that error can come before the error of the harness.
		refused string
	}{
		"accept":    {"accept blocks", "HARNESS_LIMIT=4", ""},
		"isend":     {"isend blocks", "HARNESS_LIMIT=4", ""},
		"irecv":     {"irecv blocks", "HARNESS_LIMIT=4", ""},
		"test":      {"test blocks", "HARNESS_LIMIT=4", ""},
		"lost":      {"nothing ends any more", "HARNESS_QUIET=2", ""},
		"listen":    {"listen gives out no listener", "", ""},
		"hasty":     {"accept has a communicator before anybody could connect", "", ""},
		"twice":     {"two operations have one request", "", "a request was tested that is done already"},
		"optional":  {"is what NCCL put there", "", ""},
		"untouched": {"left the request as it was", "", ""},
		"order":     {"bytes", "", ""}, // of another message, or wrong ones where that has too few to tell
		"early":     {"bytes", "", ""},
		"behind":    {"bytes behind the message", "", ""},
		"size":      {"size of ", "", ""},
		"swapped":   {"size of ", "", ""},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r := r
			r.environment = append(slices.Clone(r.environment), "BROKEN="+what, cmp.Or(c.limit, "HARNESS_LIMIT=60"))
			out, err := r.command(a, b).CombinedOutput()
			if c.refused != "" && err != nil && strings.Contains(string(out), c.refused) {
				return
			}
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.Contains(string(out), "violation: ") ||
				!strings.Contains(string(out), c.want) {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// lines reads a harness that runs.
type lines struct {
	*testing.T
	*exec.Cmd
	out    *bufio.Reader
	stderr bytes.Buffer
}

func start(t *testing.T, c *exec.Cmd) *lines {
	t.Helper()
	l := &lines{T: t, Cmd: c}
	c.Stderr = &l.stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	l.out = bufio.NewReader(out)
	timer := time.AfterFunc(4*time.Minute, func() { c.Process.Kill() })
	t.Cleanup(func() { timer.Stop() })
	return l
}

func (l *lines) end() string {
	l.Helper()
	rest, err := io.ReadAll(l.out)
	if err := errors.Join(err, l.Wait()); err != nil {
		l.Fatalf("%v: %s%s", err, rest, l.stderr.String())
	}
	return string(rest)
}

// stopped runs the harness with the receiver's relay stopped during connect, and returns the
// output.
func (r run) stopped(t *testing.T, a, b *lane) (string, error) {
	t.Helper()
	r.mode = "stop"
	c := r.command(a, b)
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, c)
	var said strings.Builder
	for {
		line, err := p.out.ReadString('\n')
		said.WriteString(line)
		if err != nil {
			break
		}
		switch line {
		case "rank 0: ready\n":
			err = b.Process.Signal(syscall.SIGSTOP)
			if err == nil {
				_, err = in.Write([]byte("\n"))
			}
		case "rank 0: waits\n":
			err = b.Process.Signal(syscall.SIGCONT)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	err = p.Wait()
	return said.String() + p.stderr.String(), err
}

func TestConnectDoesNotWait(t *testing.T) {
	h := newHost(t, launch.RouteStaged)
	r := run{
		plugin:      plugin(t),
		harness:     program(t, "harness"),
		version:     11,
		seed:        seed(t),
		links:       1,
		groups:      2,
		bytes:       1000,
		depth:       2,
		environment: []string{"HARNESS_LIMIT=2"},
	} // less than a relay waits for another one
	a, b := h.lane(0), h.lane(1)
	if out, err := r.stopped(t, a, b); err != nil || !strings.Contains(out, "rank 0: waits\n") ||
		strings.Count(out, ": done\n") != 2 {
		t.Errorf("%v: %s", err, out)
	}
	r.plugin, r.environment = brokenPlugin(t), append(r.environment, "BROKEN=connect")
	var exit *exec.ExitError
	if out, err := r.stopped(t, a, b); !errors.As(err, &exit) || exit.ExitCode() != 3 ||
		!strings.Contains(out, "violation: connect blocks\n") {
		t.Errorf("a connect that waits: %v: %s", err, out)
	}
}

// NCCL starts the connects to every peer over every channel before it waits.
func TestConnectsBeyondRelayQueueWait(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		version: 10,
		seed:    seed(t),
		links:   128,
		groups:  1,
		bytes:   100,
		depth:   1,
	}
	if out, err := r.stopped(t, h.lane(0), h.lane(1)); err != nil || !strings.Contains(out, "rank 0: waits\n") ||
		strings.Count(out, ": done\n") != 2 {
		t.Errorf("%v: %s", err, out)
	}
}

func TestRelayDeathEndsEachCommunicatorWithReason(t *testing.T) {
	h := newHost(t, launch.RouteStaged)
	a, b := h.lane(0), h.lane(1)
	r := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		version: 12,
		mode:    "kill",
		seed:    seed(t),
		links:   3,
		groups:  1,
		bytes:   30000,
		depth:   4,
	}
	p := start(t, r.command(a, b))
	for range 2 {
		line, err := p.out.ReadString('\n')
		if err != nil || !strings.HasSuffix(line, ": running\n") {
			t.Fatalf("%q, %v: %s", line, err, p.stderr.String())
		}
	}
	if err := b.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	out := p.end()
	// A rank has three ends of links.
	if n := strings.Count(out, " ended: "); n != 6 {
		t.Errorf("%d communicators have ended: %s", n, out)
	}
	for _, want := range []string{"rank 0: link 0 ended: 6: NET/Peerlane: ",
		a.uuid + " (peerlane.dev/lane=0, NIC nic0), host ", "rank 1: link 0 ended: 2: ", "the relay of this container died"} {
		if !strings.Contains(out, want) {
			t.Errorf("nobody says %q: %s", want, out)
		}
	}
}

// Up to version 10 NCCL calls init once, also after the relay's death.
func TestCommunicatorAfterRelayDeathUsesNewRelay(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	a, b := h.lane(0), h.lane(1)
	c := run{
		plugin:  plugin(t),
		harness: program(t, "harness"),
		version: 10,
		mode:    "anew",
		seed:    seed(t),
		links:   3,
		groups:  6,
		bytes:   3000,
		depth:   4,
	}.command(
		a,
		b,
	)
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, c)
	await := func(suffix string) {
		t.Helper()
		for range 2 {
			line, err := p.out.ReadString('\n')
			for err == nil && strings.Contains(line, ": link ") {
				line, err = p.out.ReadString('\n')
			}
			if err != nil || !strings.HasSuffix(line, suffix) {
				t.Fatalf("%q, %v: %s", line, err, p.stderr.String())
			}
		}
	}
	await(": running\n")
	if err := errors.Join(b.Process.Kill(), os.Remove(b.socket)); err != nil {
		t.Fatal(err)
	}
	await(": ended\n")
	h.lane(1)
	if _, err := in.Write([]byte("\n\n")); err != nil {
		t.Fatal(err)
	}
	if out := p.end(); strings.Count(out, ": done\n") != 2 {
		t.Error(out)
	}
}

// symbols returns the exported symbols of a library.
func symbols(t *testing.T, f *elf.File) (shown []string) {
	t.Helper()
	all, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Section != elf.SHN_UNDEF {
			shown = append(shown, s.Name)
		}
	}
	slices.Sort(shown)
	return shown
}

func TestPluginOfOneVersionExportsItsTableAlone(t *testing.T) {
	dir := build(t, "version", func(dir string) error { return nccl.BuildVersion(dir, 9) })
	f, err := elf.Open(filepath.Join(dir, "libnccl-net-peerlane-v9.so"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := []string{"ncclNetPlugin_v9", "ncclTunerPlugin_v3", "ncclTunerPlugin_v4", "ncclTunerPlugin_v5"}
	if shown := symbols(t, f); !slices.Equal(shown, want) {
		t.Errorf("it shows %v", shown)
	}
	if err := nccl.BuildVersion(t.TempDir(), 7); !errors.Is(err, nccl.ErrNoTable) {
		t.Errorf("version 7: %v", err)
	}
}

func TestPluginLibraryExportsTablesAndNeedsLibc(t *testing.T) {
	f, err := elf.Open(plugin(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	shown := symbols(t, f)
	want := []string{
		"ncclNetPlugin_v10",
		"ncclNetPlugin_v11",
		"ncclNetPlugin_v12",
		"ncclNetPlugin_v8",
		"ncclNetPlugin_v9",
		"ncclTunerPlugin_v3",
		"ncclTunerPlugin_v4",
		"ncclTunerPlugin_v5",
	}
	if !slices.Equal(shown, want) {
		t.Errorf("it shows %v", shown)
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range needed {
		if !slices.Contains([]string{"libc.so.6", "libpthread.so.0", "libdl.so.2"}, n) && !strings.HasPrefix(n, "ld-linux") {
			t.Errorf("it needs %s", n)
		}
	}
	imported, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	versioned := 0
	for _, s := range imported {
		if s.Version == "" {
			continue
		}
		versioned++
		minor, err := strconv.Atoi(strings.Split(strings.TrimPrefix(s.Version, "GLIBC_2."), ".")[0])
		if err != nil || minor > 28 {
			t.Errorf("it needs %s of %s, and may of GLIBC_2.28", s.Name, s.Version)
		}
	}
	if versioned < 20 {
		t.Errorf("the test sees %d versions only", versioned)
	}
	flags, err := f.DynValue(elf.DT_FLAGS_1)
	if err != nil || len(flags) != 1 || elf.DynFlag1(flags[0])&elf.DF_1_NODELETE == 0 {
		t.Errorf("it can be unloaded: %v, %v", flags, err)
	}
}
