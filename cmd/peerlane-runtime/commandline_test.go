package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
)

func TestParseFindsCommandAndBundle(t *testing.T) {
	for _, test := range []struct {
		// line are the arguments without this program's own.
		line    string
		command string
		// config is the path for create and run.
		config string
		log    string
		format string
	}{
		{"--root /run/r --log /b/log.json --log-format json create --bundle /b --pid-file /b/init.pid c1", "create",
			"/b/config.json", "/b/log.json", "json"},
		{"--root=/run/r --log=/b/log create --bundle=/b c1", "create", "/b/config.json", "/b/log", ""},
		{"-root /run/r -log /b/log run -bundle /b c1", "run", "/b/config.json", "/b/log", ""},
		{"create -b /b c1", "create", "/b/config.json", "", ""},
		{"create -b=/b c1", "create", "/b/config.json", "", ""},
		{"create -b/b c1", "create", "/b/config.json", "", ""},
		{"create c1", "create", "CWD/config.json", "", ""},
		{"create -b sub c1", "create", "CWD/sub/config.json", "", ""},
		{"create c1 --bundle /b", "create", "/b/config.json", "", ""},
		{"create --bundle /a --bundle /b c1", "create", "/b/config.json", "", ""},
		{"create --pid-file --bundle --bundle /b c1", "create", "/b/config.json", "", ""},
		{"create --console-socket /s --no-pivot --preserve-fds 3 --bundle /b c1", "create", "/b/config.json", "", ""},
		{"create -- --bundle /b", "create", "CWD/config.json", "", ""},
		{"create --bundle", "create", "CWD/config.json", "", ""},
		{"run -b /b -f /other.json c1", "run", "/other.json", "", ""},
		{"run -b /b -f/other.json c1", "run", "/other.json", "", ""},
		{"run --bundle /b --config other.json c1", "run", "CWD/other.json", "", ""},
		{"run --bundle /b --config config.json c1", "run", "/b/config.json", "", ""},
		{"--systemd-cgroup --rootless true --criu /c create --bundle /b c1", "create", "/b/config.json", "", ""},
		{"--debug create --bundle /b c1", "create", "/b/config.json", "", ""},
		{"--cgroup-manager systemd --log file:/b/log create --bundle /b c1", "create", "/b/config.json", "file:/b/log", ""},
		{"--platform ptrace create --bundle /b c1", "create", "/b/config.json", "", ""}, // gVisor's
		{"--strange create --bundle /b c1", "create", "/b/config.json", "", ""},
		{"--strange --root create create --bundle /b c1", "create", "/b/config.json", "", ""},
		{"--root create state c1", "state", "", "", ""},
		{"start c1", "start", "", "", ""},
		{"exec --process /create c1", "exec", "", "", ""},
		{"delete --force create", "delete", "", "", ""},
		{"--version", "", "", "", ""},
		{"features", "features", "", "", ""},
		{"--log", "", "", "", ""},
		{"", "", "", "", ""},
	} {
		t.Run(test.line, func(t *testing.T) {
			args := strings.Fields(test.line)
			for _, own := range [][]string{nil, {"--peerlane-device=peerlane.dev/lane=3,nvidia.com/gpu=3",
				"--peerlane-device=a.b/c=d", "--peerlane-spec-dir=/cdi", "--peerlane-root=/r"}} {
				c, err := parse(slices.Concat(own, args))
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(c.forward, args) {
					t.Errorf("the runtime gets %q", c.forward)
				}
				if c.command != test.command || c.log != test.log || c.logFormat != test.format {
					t.Errorf("command %q, log %q, format %q", c.command, c.log, c.logFormat)
				}
				if own != nil && (!slices.Equal(c.devices, []string{"peerlane.dev/lane=3", "nvidia.com/gpu=3", "a.b/c=d"}) ||
					!slices.Equal(c.specDirs, []string{"/cdi"}) || c.root != "/r") {
					t.Errorf("its own options are %+v", c.own)
				}
				if test.config == "" {
					continue
				}
				cwd, err := os.Getwd()
				if err != nil {
					t.Fatal(err)
				}
				file, err := c.configFile()
				if want := strings.Replace(test.config, "CWD", cwd, 1); err != nil || file != want {
					t.Errorf("config.json is %q (%v), want %q", file, err, want)
				}
			}
		})
	}
}

// Arguments behind the command belong to the runtime, even with the prefix of own options.
func TestOwnOptionsStandInFrontOfTheCommand(t *testing.T) {
	args := strings.Fields("--root /r --peerlane-device=a.b/c=d exec c1 --peerlane-device=x")
	c, err := parse(args)
	if want := strings.Fields("--root /r exec c1 --peerlane-device=x"); err != nil || !slices.Equal(c.forward, want) {
		t.Errorf("the runtime gets %q (%v), want %q", c.forward, err, want)
	}
}

func TestRuntimeInvalidOptionIsRefused(t *testing.T) {
	for arg, cause := range map[string]error{
		"--peerlane-device":         errNoValue,
		"--peerlane-device=":        errNoValue,
		"--peerlane-devices=x":      errUnknownOption,
		"--peerlane-root=here":      errRelative,
		"--peerlane-spec-dir=./cdi": errRelative,
	} {
		_, err := parse([]string{arg, "create", "c1"})
		if !testutil.HasError(err, &optionError{arg, cause}) {
			t.Errorf("%s: %v, want %v", arg, err, cause)
		}
	}
}

// FuzzParse checks that forward has the arguments that are not this program's, in order.
func FuzzParse(f *testing.F) {
	f.Add("--root\x00/r\x00--log=l\x00create\x00--bundle\x00/b\x00c1")
	f.Add("--peerlane-device=a.b/c=d\x00run\x00-b")
	f.Add("-\x00--\x00-=\x00create\x00-b\x00--\x00-f=x")
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, "\x00")
		c, err := parse(args)
		if err != nil {
			return
		}
		var kept int
		for _, arg := range args {
			switch {
			case kept < len(c.forward) && c.forward[kept] == arg:
				kept++
			case !strings.HasPrefix(arg, ownPrefix):
				t.Fatalf("%q is lost of %q; the runtime gets %q", arg, args, c.forward)
			}
		}
		if kept != len(c.forward) {
			t.Fatalf("the runtime gets %q of %q", c.forward, args)
		}
		if file, err := c.configFile(); err != nil || !filepath.IsAbs(file) {
			t.Fatalf("config.json is %q (%v)", file, err)
		}
	})
}
