//go:build packages

package packages

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
)

// The configuration in comments is valid too.
func TestPackagedConfigurationIsValid(t *testing.T) {
	path := filepath.Join(unpacked(t, "peerlane", "amd64"), "etc/peerlane/config.toml")
	text, err := os.ReadFile(path)
	check(t, err)
	if _, err := config.Load(path); err != nil {
		t.Error(err)
	}
	keys := regexp.MustCompile(`(?m)^# (\[.*|\w+ = .*)$`)
	if n := len(keys.FindAllString(string(text), -1)); n < 8 {
		t.Errorf("the test sees %d lines of keys only", n)
	}
	check(t, os.WriteFile(path, keys.ReplaceAll(text, []byte("$1")), 0o644))
	if _, err := config.Load(path); err != nil {
		t.Error(err)
	}
}

// emulate runs a program of another processor's package.
func emulate(t *testing.T, program string, arguments ...string) string {
	t.Helper()
	return run(t, "qemu-aarch64-static", append([]string{"-L", "/usr/aarch64-linux-gnu", program}, arguments...)...)
}

// The processor is emulated, so the test says nothing about a driver.
func TestARM64ProgramsRun(t *testing.T) {
	native, foreign := unpacked(t, "peerlane", "amd64"), unpacked(t, "peerlane", "arm64")
	for _, arguments := range [][]string{
		{"plan", "--input", source + "/docs/hgx-4-nics.xml"},
		{"topo", "--input", source + "/docs/hgx-4-nics.xml", "-o", "json"},
		{"--help"},
	} {
		want := run(t, filepath.Join(native, "usr/bin/peerlane"), arguments...)
		// An emulated front cannot execute the program behind it.
		programs := []string{"usr/libexec/peerlane/peerlane"}
		if arguments[0] == "topo" {
			programs = append(programs, "usr/bin/peerlane")
		}
		for _, program := range programs {
			if got := emulate(t, filepath.Join(foreign, program), arguments...); got != want {
				t.Errorf("%s %s prints\n%s", program, strings.Join(arguments, " "), got)
			}
		}
	}
	for program, argument := range map[string]string{"bin/peerlane": "version",
		"bin/peerlane-runtime": "--peerlane-version", "libexec/peerlane/peerlane-relay": "version"} {
		if out := emulate(t, filepath.Join(foreign, "usr", program), argument); !strings.Contains(out, "linux/arm64") {
			t.Errorf("%s says %q", program, out)
		}
	}
	emulate(t, filepath.Join(foreign, "usr/libexec/peerlane/peerlane-hook"), "help")

	// The simulator of the emulated processor. The emulator starts no second process, so the test
	// omits tests with two processes, and a demo.
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-o", dir+"/conformance.test",
		"./cuda/conformance")
	build.Dir = source
	build.Env = append(os.Environ(), "GOARCH=arm64", "CGO_ENABLED=1", "CC=aarch64-linux-gnu-gcc",
		"CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	simulator, err := os.ReadFile(filepath.Join(foreign, "usr/libexec/peerlane/libpeerlane-cuda-sim.so"))
	check(t, err)
	check(t, os.WriteFile(filepath.Join(dir, "libpeerlane-cuda-sim.so"), simulator, 0o755))
	out := emulate(t, filepath.Join(dir, "conformance.test"), "-test.v", "-test.run",
		"^Test("+strings.Join(single, "|")+")$")
	for _, name := range single {
		if !strings.Contains(out, "--- PASS: Test"+name+" ") {
			t.Errorf("Test%s does not pass there:\n%s", name, out)
		}
	}
}

// single are the tests of package conformance in one process.
var single = []string{
	"CopyEverySizeBothDirectionsKeepsBytes", "BatchOfCopiesIsComplete", "PeerCopyNeedsOneContextPerEnd",
	"GraphsRepeatCapturedWork",
	"ReplaysTakeTurnsWithTheCPU",
	"KernelsWriteAndCompareThePattern", "RangeOverAllocationsKeepsItsBytes", "CopyReturnsBeforeItsBytesArrive",
	"StreamsWaitForEachOther", "StreamRunsInOrder", "WaitedValuesAreCyclic", "EventsAreNotEarly", "StreamsWaitForEvents",
}

// Versions order as packages do.
func TestVersionsOrderAsPackages(t *testing.T) {
	dir := t.TempDir()
	check(t, os.Mkdir(filepath.Join(dir, "packaging"), 0o755))
	script, err := os.ReadFile(source + "/packaging/version")
	check(t, err)
	write := func(name, text string) {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	}
	git := func(arguments ...string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir, "-c", "user.name=t", "-c",
			"user.email=t@example.com", "-c", "tag.gpgsign=false"}, arguments...)...)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", arguments, err, out)
		}
	}
	var versions []string
	version := func(want string) {
		t.Helper()
		got := strings.TrimSpace(run(t, filepath.Join(dir, "packaging/version")))
		if !regexp.MustCompile("^" + want + "$").MatchString(got) {
			t.Errorf("the version is %s, not like %s", got, want)
		}
		versions = append(versions, strings.Replace(got, "-", "~", 1))
	}
	commit := func(date string) {
		t.Setenv("GIT_COMMITTER_DATE", date)
		git("commit", "-q", "--allow-empty", "-m", "x")
	}
	git("init", "-q")
	write("packaging/version", string(script))
	write("CHANGELOG.md", "## [Unreleased]\n")
	git("add", ".")
	commit("2026-01-01T00:00:00Z")
	version(`0\.1\.0-dev\.20260101000000\+g[0-9a-f]{8}`)
	commit("2026-01-02T00:00:00Z")
	version(`0\.1\.0-dev\.20260102000000\+g[0-9a-f]{8}`)
	write("CHANGELOG.md", "## [Unreleased]\n\n## [0.1.0] - 2026-01-03\n")
	version(`0\.2\.0-dev\.20260102000000\+g[0-9a-f]{8}\.dirty`)
	versions = versions[:2]
	git("add", ".")
	commit("2026-01-03T00:00:00Z")
	git("tag", "v0.1.0")
	version(`0\.1\.0`)
	commit("2026-01-04T00:00:00Z")
	version(`0\.2\.0-dev\.20260104000000\+g[0-9a-f]{8}`)
	for i := range versions[1:] {
		if err := exec.CommandContext(t.Context(), "dpkg", "--compare-versions", versions[i], "lt",
			versions[i+1]).Run(); err != nil {
			t.Errorf("%s is not before %s", versions[i], versions[i+1])
		}
	}
}
