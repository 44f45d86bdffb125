package integration_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/nixl"
)

// nixlPrograms builds the harness of relay/nixl and its library in the place of NIXL's, and returns
// the directory.
func nixlPrograms(t *testing.T) string {
	t.Helper()
	_, err := nixl.Compiler()
	programs.MustHave(t, err)
	key, err := programs.Key("../relay/nixl/plugin.go", "../relay/nixl/source/*", "../relay/nixl/forward/*",
		"../relay/nixl/tests/*", "../relay/libpeerlane/library.go", "../relay/libpeerlane/source/*", "../relay/wire/*.h")
	if err != nil {
		t.Fatal(err)
	}
	return programs.Built(t, key, "nixl-containers", func(dir string) error {
		if err := nixl.Build(filepath.Join(dir, "nixl")); err != nil {
			return err
		}
		source := filepath.Join(dir, "source")
		if err := os.Mkdir(source, 0o755); err != nil {
			return err
		}
		if _, _, err := nixl.Unpack(source); err != nil {
			return err
		}
		cxx, err := nixl.Compiler()
		if err != nil {
			return err
		}
		c, err := libpeerlane.Compiler()
		if err != nil {
			return err
		}
		const tests = "../relay/nixl/tests/"
		err = libpeerlane.Compile(".", "harness", cxx, []string{"-std=c++17", "-O1", "-I", source, "-o",
			filepath.Join(dir, "harness"), tests + "harness.cpp", "-ldl"})
		if err != nil {
			return err
		}
		return libpeerlane.Compile(".", "libnixl.so", c, []string{"-shared", "-fPIC", "-o",
			filepath.Join(dir, "libnixl.so"), tests + "libnixl.c"})
	})
}

// librariesOf returns the shared libraries of a program, by ldd.
func librariesOf(t *testing.T, program string) (paths []string) {
	t.Helper()
	out, err := exec.Command("ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range strings.Fields(string(out)) {
		if strings.HasPrefix(word, "/") {
			paths = append(paths, word)
		}
	}
	return paths
}

// The plugin that CDI mounts moves the blocks of a KV cache between two containers, with the calls of
// vLLM and of SGLang. The harness compares every byte.
func TestNIXLPluginInContainersMovesBlocks(t *testing.T) {
	beside(t)
	built := nixlPrograms(t)
	b := newBed(t, "runc", asItIs)
	b.nics()
	libraries := filepath.Join(b.Layout.Libraries(), "nixl")
	if err := os.MkdirAll(libraries, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range nixl.Files() {
		if err := bundle.CopyFile(filepath.Join(built, "nixl", name), filepath.Join(libraries, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Configure(func(c *config.Config) { c.Relay.Route = launch.RouteDirect }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	for _, mode := range []string{"vllm", "sglang"} {
		side := filepath.Join(b.Root, "side-"+mode)
		if err := os.Mkdir(side, 0o777); err != nil {
			t.Fatal(err)
		}
		var out [2]bytes.Buffer
		var commands [2]*exec.Cmd
		for i := range commands {
			name := mode + string(rune('0'+i))
			gpu := b.gpu(b.lanes[i]).UUID
			c := bundle.New(filepath.Join(b.Root, "bundles", name), "/usr/bin/harness",
				"/usr/lib/peerlane/nixl/"+nixl.Name, "/usr/lib/libnixl.so", mode, "7", "/run/peerlane/relay.sock", gpu,
				"/run/peerlane/relay.sock", gpu, "4", "64", "4096", "3", string(rune('0'+i)), "/side/socket")
			root := filepath.Join(c.Dir, "rootfs")
			if err := os.MkdirAll(root, 0o755); err != nil {
				t.Fatal(err)
			}
			in := newImage(t, root)
			for _, path := range librariesOf(t, filepath.Join(built, "harness")) {
				in.copy(path, path)
			}
			for _, name := range []string{"libdl.so.2", "libpthread.so.0"} { // of the plugin
				in.copy(filepath.Join(filepath.Dir(in.libc), name), filepath.Join(filepath.Dir(in.libc), name))
			}
			in.copy(filepath.Join(built, "harness"), "/usr/bin/harness")
			in.copy(filepath.Join(built, "libnixl.so"), "/usr/lib/libnixl.so")
			c.Spec.Mounts = append(c.Spec.Mounts, specs.Mount{Destination: "/side", Type: "bind", Source: side,
				Options: []string{"bind", "rw", "nosuid", "nodev"}})
			if err := c.Inject(b.CDIDir(), testbed.Devices(b.gpu(b.lanes[i]))...); err != nil {
				t.Fatal(err)
			}
			if err := c.Write(); err != nil {
				t.Fatal(err)
			}
			commands[i] = b.runtime.Run(ctx, c, b.ContainerID(name))
			commands[i].Stdout, commands[i].Stderr = &out[i], &out[i]
			if err := commands[i].Start(); err != nil {
				t.Fatal(err)
			}
		}
		for i, c := range commands {
			if err := c.Wait(); err != nil || !strings.Contains(out[i].String(), ": done\n") {
				t.Errorf("%s, agent %d: %v: %s", mode, i, err, &out[i])
			}
		}
	}
}
