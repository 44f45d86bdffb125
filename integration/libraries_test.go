package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/integration/programs"
)

// A test library in place of Peerlane's libraries; a program of an image loads the library by name.
const (
	testLibrary   = "libpeerlane-test.so.0"
	librarySource = `int peerlane_test(void) { return 42; }`
	programSource = `
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	void *library = dlopen(argv[argc - 1], RTLD_NOW);
	int (*test)(void) = library ? (int (*)(void))dlsym(library, "peerlane_test") : NULL;
	char defaults[256] = "";
	FILE *conf = fopen("/etc/nccl.conf", "r");

	if (!test) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	if (conf)
		fgets(defaults, sizeof defaults, conf);
	printf("%d %s NCCL_NET=%s %s", test(), getenv("LD_LIBRARY_PATH") ? getenv("LD_LIBRARY_PATH") : "-", getenv("NCCL_NET") ? getenv("NCCL_NET") : "-", defaults);
	return 0;
}
`
)

// compile compiles C for the containers.
func compile(t *testing.T, source, to string, options ...string) {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	programs.MustHave(t, err)
	c := exec.Command(compiler, append(append([]string{"-x", "c", "-", "-o", to}, options...), "-ldl")...)
	c.Stdin = strings.NewReader(source)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// image is a root file system with a glibc program.
type image struct {
	*testing.T
	root    string
	program string // on the host
	linker  string // the program's dynamic linker, absolute
	libc    string // the C library, absolute
}

func newImage(t *testing.T, root string) *image {
	t.Helper()
	i := &image{T: t, root: root, program: filepath.Join(t.TempDir(), "loads")}
	compile(t, programSource, i.program)
	out, err := exec.Command("ldd", i.program).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range strings.Fields(string(out)) {
		switch {
		case strings.HasPrefix(word, "/") && strings.Contains(word, "/ld-linux"):
			i.linker = word
		case strings.HasPrefix(word, "/") && strings.Contains(word, "/libc.so"):
			i.libc = word
		}
	}
	if i.linker == "" || i.libc == "" {
		t.Fatalf("ldd finds no dynamic linker or C library: %s", out)
	}
	for _, dir := range []string{"proc", "dev", "run", "tmp", "etc", "usr/bin", "usr/lib"} {
		i.must(os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	i.copy(i.program, "/usr/bin/loads")
	return i
}

func (i *image) must(err error) {
	i.Helper()
	if err != nil {
		i.Fatal(err)
	}
}

func (i *image) copy(from, to string) {
	i.Helper()
	text, err := os.ReadFile(from)
	i.must(err)
	i.write(to, text)
}

func (i *image) write(to string, text []byte) {
	i.Helper()
	to = filepath.Join(i.root, to)
	i.must(os.MkdirAll(filepath.Dir(to), 0o755))
	i.must(programs.Write(to, text))
}

// asHere installs the C library at this machine's paths.
func (i *image) asHere() {
	i.Helper()
	i.copy(i.linker, i.linker)
	i.copy(i.libc, i.libc)
}

// cache creates the loader's cache, as a distribution's packages do.
func (i *image) cache() {
	i.Helper()
	out, err := exec.Command("/sbin/ldconfig", "-r", i.root).CombinedOutput()
	if err != nil {
		i.Fatalf("ldconfig: %v: %s", err, out)
	}
	_, err = os.Stat(filepath.Join(i.root, "etc/ld.so.cache"))
	i.must(err)
}

// elsewhere installs the C library in one directory, and a loader that searches only that
// directory, as other distributions do: Debian's loader with the paths replaced in place.
func (i *image) elsewhere(dirs ...string) {
	i.Helper()
	loader, err := os.ReadFile(i.linker)
	i.must(err)
	multiarch := strings.TrimSuffix(filepath.Dir(i.libc), "/") + "/"
	table := []string{multiarch, "/usr" + multiarch, "/lib/", "/usr/lib/"}
	replaced := make([]string, len(table))
	for n, old := range table {
		path := "/no/"
		if n < len(dirs) {
			path = dirs[n] + "/"
		}
		if len(path) > len(old) {
			i.Fatalf("%s is longer than %s", path, old)
		}
		replaced[n] = path + strings.Repeat("/", len(old)-len(path))
	}
	before, after := []byte(strings.Join(table, "\x00")+"\x00"), []byte(strings.Join(replaced, "\x00")+"\x00")
	if !bytes.Contains(loader, before) {
		i.Skipf("needs a loader with Debian's directories to make others' of, and %s has not %q", i.linker, table)
	}
	i.write(i.linker, bytes.ReplaceAll(loader, before, after))
	i.copy(i.libc, filepath.Join(dirs[0], filepath.Base(i.libc)))
	out, err := exec.Command(filepath.Join(i.root, i.linker), "--list-diagnostics").Output()
	i.must(err)
	for n, dir := range dirs {
		if !strings.Contains(string(out), fmt.Sprintf("path.system_dirs[0x%x]=%q", n, replaced[n])) {
			i.Fatalf("the loader does not look into %s: %s", dir, out)
		}
	}
}

func (i *image) link(to, at string) {
	i.Helper()
	i.must(os.Symlink(to, filepath.Join(i.root, at)))
}

// runIn runs a program in a container with a lane and this root, and returns the output.
func (b *bed) runIn(name string, build func(root string), environment []string, arguments ...string) (string, error) {
	b.Helper()
	built := bundle.New(filepath.Join(b.Root, "bundles", name), arguments...)
	root := filepath.Join(built.Dir, "rootfs")
	if err := os.MkdirAll(root, 0o755); err != nil {
		b.Fatal(err)
	}
	build(root)
	built.Spec.Process.Env = append(built.Spec.Process.Env, environment...)
	if err := built.Inject(b.CDIDir(), device(cdi.KindLane, b.gpu(b.lanes[0]))); err != nil {
		b.Fatal(err)
	}
	if err := built.Write(); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	out, err := b.runtime.Run(ctx, built, b.ContainerID(name)).CombinedOutput()
	return string(out), err
}

// installLibraries installs libraries as Peerlane's package does, and regenerates the
// specifications.
func (b *bed) installLibraries() {
	b.Helper()
	dir := b.Layout.Libraries()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.Fatal(err)
	}
	compile(b.T, librarySource, filepath.Join(dir, testLibrary), "-shared", "-fPIC", "-Wl,-soname,"+testLibrary)
	err := os.WriteFile(b.Layout.NCCLConf(), []byte("NCCL_NET=Peerlane\n"), 0o644)
	if err == nil {
		// The hook mounts no file if another user can write to a parent directory.
		err = errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Join(dir, testLibrary), 0o755),
			os.Chmod(b.Layout.NCCLConf(), 0o644))
	}
	if err != nil {
		b.Fatal(err)
	}
	if err := b.Configure(asItIs); err != nil {
		b.Fatal(err)
	}
}

// Each distribution's loader finds a library by name, with and without a cache. The container gets
// no variable for the library.
func TestImageLoaderFindsLibraries(t *testing.T) {
	beside(t)
	fedora := []string{"/lib64", "/usr/lib64"}
	images := map[string]func(*image){
		"as this machine": func(i *image) { i.asHere() },
		"usr-lib64": func(i *image) {
			i.must(os.MkdirAll(filepath.Join(i.root, "usr/lib64"), 0o755))
			i.elsewhere(fedora...)
		},
		"lib64 as a link": func(i *image) {
			i.must(os.MkdirAll(filepath.Join(i.root, "usr/lib64"), 0o755))
			i.link("usr/lib64", "lib64")
			i.elsewhere(fedora...)
		},
		"usr-lib for all": func(i *image) {
			i.link("lib", "usr/lib64")
			i.link("usr/lib", "lib")
			i.link("usr/lib", "lib64")
			i.elsewhere("/usr/lib")
		},
		"no usr-lib at all": func(i *image) {
			i.must(os.Remove(filepath.Join(i.root, "usr/lib")))
			i.elsewhere(fedora...)
		},
	}
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			b.installLibraries()
			for name, build := range images {
				t.Run(name, func(t *testing.T) {
					build(newImage(t, t.TempDir())) // skip every case on a machine with another loader
					for _, cached := range []bool{true, false} {
						t.Run(map[bool]string{true: "with a cache", false: "without a cache"}[cached], func(t *testing.T) {
							b.count++
							out, err := b.runIn(fmt.Sprintf("loads-%d", b.count), func(root string) {
								i := newImage(t, root)
								build(i)
								if cached {
									i.cache()
								}
							}, []string{"NCCL_NET=Socket", "LD_LIBRARY_PATH=/opt/own"}, "/usr/bin/loads", testLibrary)
							if want := "42 /opt/own NCCL_NET=Socket NCCL_NET=Peerlane\n"; err != nil || out != want {
								t.Errorf("the program says %q (%v), want %q", out, err, want)
							}
						})
					}
				})
			}
		})
	}
}

// An image without glibc (busybox, musl) has the files and is otherwise unchanged; without
// installed libraries the container has no mount.
func TestImageWithoutLoaderGetsLibraryFilesOnly(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	list := func(name string) string {
		out, err := b.runIn(name, func(root string) {
			i := &image{T: t, root: root}
			for _, dir := range []string{"proc", "dev", "run", "tmp", "etc"} {
				i.must(os.MkdirAll(filepath.Join(root, dir), 0o755))
			}
			i.copy(busybox, "/bin/busybox")
		}, nil, "/bin/busybox", "sh", "-c", "cd / && find usr etc -type f | sort; find run/peerlane/; readlink "+
			"etc/nccl.conf || true")
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return out
	}
	if out := list("without"); strings.Contains(out, "usr/") || strings.Contains(out, "nccl.conf") ||
		!strings.Contains(out, "relay.sock") {
		t.Errorf("nothing is installed, and the container has\n%s", out)
	}
	b.installLibraries()
	want := []string{"usr/lib/" + testLibrary, "usr/lib64/" + testLibrary, "run/peerlane/nccl.conf",
		"/run/peerlane/nccl.conf"}
	lines := strings.Fields(list("with"))
	for _, path := range want {
		if !slices.Contains(lines, path) {
			t.Errorf("the container has not %s but %q", path, lines)
		}
	}
}

// The hook does not mount files that other users could have written. The other edits of the lane
// apply.
func TestLibraryOfOtherOwnerIsNotMounted(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	b.installLibraries()
	if err := os.Chmod(filepath.Join(b.Layout.Libraries(), testLibrary), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := b.Configure(asItIs); err != nil {
		t.Fatal(err)
	}
	out, err := b.runIn("others", func(root string) { newImage(t, root).asHere() }, nil, "/usr/bin/loads", testLibrary)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(out, testLibrary+": cannot open shared object file") {
		t.Errorf("the program says %q (%v)", out, err)
	}
	if _, err := os.Lstat(filepath.Join(b.Root, "bundles/others/rootfs/etc/nccl.conf")); errors.Is(err, fs.ErrNotExist) {
		t.Error("the container has no link to NCCL's defaults, which nobody else could write")
	}
}
