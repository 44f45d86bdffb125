//go:build engines

package engines

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/earlier"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/wire"
)

// Directories of the packages.
const (
	programDir = "/usr/libexec/peerlane"
	libraryDir = "/usr/lib/peerlane"
)

// dpkg replaces packages with the programs of commit a099472 by packages with the programs of this
// commit, under running and stopped containers of Podman.
func TestPodmanUpgradeKeepsContainersOfEarlierCommit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: container engines make namespaces and cgroups")
	}
	t.Parallel()
	// A release that serves no client of the earlier commit, and a release that serves no
	// supervisor of the earlier commit.
	const later = wire.NewestVersion + 1
	withoutClient := build(t, "../../relay/wire/protocol.go", map[string]string{
		fmt.Sprintf("OldestVersion = %d", wire.OldestVersion): fmt.Sprintf("OldestVersion = %d", later),
		fmt.Sprintf("NewestVersion = %d", wire.NewestVersion): fmt.Sprintf("NewestVersion = %d", later),
	})
	withoutSupervisor := build(t, "../../relay/launch/version.go", map[string]string{
		fmt.Sprintf("OldestVersion = %d", launch.OldestVersion): fmt.Sprintf("OldestVersion = %d", launch.Version+1),
		fmt.Sprintf("Version       = %d", launch.Version):       fmt.Sprintf("Version       = %d", launch.Version+1),
	})
	row{name: "podman-4.3", containers: podmans}.waitForTurn(t)
	u := newPodmanUpgrade(t)
	a, z := u.run("a", 0), u.run("z", 1)
	earlier.Introduce(a, z, earlier.NewestVersion, earlier.NewestVersion, patience)
	stopped := u.run("stopped", 0)
	stopped.Next("listening", patience)
	u.stop(stopped)
	relays := map[*earlier.Container]int{a: u.relay(a), z: u.relay(z)}

	u.install("1.0", binaries, u.library)
	for range 2 {
		a.Next("moving", patience)
		z.Next("moving", patience)
	}
	for c, relay := range relays {
		if now := u.relay(c); now != relay {
			t.Errorf("relay %d of %s became %d by the upgrade", relay, c.ID, now)
		}
		u.kill(relay)
	}
	earlier.Introduce(a, z, earlier.NewestVersion, earlier.NewestVersion, patience)

	// The stored container has hooks, mounts and library path of the earlier commit.
	stopped = u.startAgain("stopped")
	u.stop(a)
	earlier.Introduce(stopped, z, wire.NewestVersion, earlier.NewestVersion, patience)
	u.runsInstalledRelay(stopped)
	u.runsInstalledRelay(z)

	u.install("2.0", withoutClient, u.library)
	u.kill(u.relay(z))
	u.refuses(z, wire.StatusVersion, fmt.Sprintf(
		"the client speaks versions %d to %d of Peerlane's protocol, this relay %d to %d",
		wire.OldestVersion, earlier.NewestVersion, later, later))

	u.install("3.0", withoutSupervisor, u.library)
	u.kill(u.relay(z))
	u.refuses(z, wire.StatusRelayDied, fmt.Sprintf(
		"the supervisor speaks version 0 of the messages to its relay, this relay versions %d to %[1]d", launch.Version+1))
}

// podmanUpgrade is a Debian with Podman, whose packages have the programs of the earlier commit.
type podmanUpgrade struct {
	*testing.T
	root    string
	layout  paths.Layout
	ground  *ground
	images  []string // names, by GPU
	devices [][]string
	library string // of this commit
	ids     map[string]string
	started []*earlier.Container
}

func newPodmanUpgrade(t *testing.T) *podmanUpgrade {
	t.Helper()
	built, err := earlier.Build()
	programs.MustHave(t, err)
	root, err := os.MkdirTemp("", "pl") // for the length of a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(root, 0o711); err != nil {
		t.Fatal(err)
	}
	u := &podmanUpgrade{T: t, root: root, layout: paths.New(root), ids: map[string]string{}}
	made := earlier.StartHost(t, built, root, built, launch.RouteDirect)
	u.moveSpecifications(built)
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(root, "ground")
	if err := os.Mkdir(own, 0o755); err != nil {
		t.Fatal(err)
	}
	u.ground = lay(t, own, installed.Old, v1, filepath.Join(root, "cdi"), filepath.Join(root, "nodes/dev"),
		filepath.Join(cache, "peerlane"))
	t.Cleanup(u.leavesNothing)
	u.configurePodman()
	library := t.TempDir()
	if err := libpeerlane.Build(library); err != nil {
		t.Fatal(err)
	}
	u.library = filepath.Join(library, libpeerlane.Name)
	u.install("0.1", built, filepath.Join(built, earlier.Library))
	for i, dir := range made.Bundles {
		name := fmt.Sprint("localhost/earlier-", i)
		u.do("sh", "-c", `tar -C "$0" -c . | podman import - "$1"`, filepath.Join(dir, "rootfs"), name)
		u.images = append(u.images, name)
		u.devices = append(u.devices, u.devicesOf(dir))
	}
	return u
}

// devicesOf returns the CDI devices of a bundle: the GPU with the lane of the bundle's hook.
func (u *podmanUpgrade) devicesOf(bundle string) []string {
	u.Helper()
	text, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		u.Fatal(err)
	}
	lane := regexp.MustCompile(`GPU-[-0-9a-f]+@[0-9a-f:.]+`).FindString(string(text))
	files, err := filepath.Glob(filepath.Join(u.root, "cdi/peerlane.dev-lane*"))
	if err != nil || len(files) != 1 || lane == "" {
		u.Fatalf("the lane of %s is %q; the specifications are %v, %v", bundle, lane, files, err)
	}
	if text, err = os.ReadFile(files[0]); err != nil {
		u.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		u.Fatal(err)
	}
	for _, d := range spec.Devices {
		edits, err := json.Marshal(d.ContainerEdits)
		if err != nil {
			u.Fatal(err)
		}
		if _, err := strconv.Atoi(d.Name); err == nil && strings.Contains(string(edits), lane) {
			return []string{"nvidia.com/gpu=" + d.Name, "peerlane.dev/lane=" + d.Name}
		}
	}
	u.Fatalf("no device of %s has the lane %s", files[0], lane)
	return nil
}

// moveSpecifications replaces the directories of the earlier programs and of the library by those of
// the packages.
func (u *podmanUpgrade) moveSpecifications(built string) {
	u.Helper()
	files, err := filepath.Glob(filepath.Join(u.root, "cdi/*"))
	if err != nil {
		u.Fatal(err)
	}
	replaced := false
	moved := strings.NewReplacer(built+"/peerlane-", programDir+"/peerlane-", u.layout.Libraries(), libraryDir)
	for _, path := range append(files, u.layout.ConfigFile()) {
		text, err := os.ReadFile(path)
		if err != nil {
			u.Fatal(err)
		}
		after := moved.Replace(string(text))
		replaced = replaced || strings.Contains(after, libraryDir+"/"+earlier.Library) &&
			strings.Contains(after, programDir+"/peerlane-hook")
		if err := os.WriteFile(path, []byte(after), 0o644); err != nil {
			u.Fatal(err)
		}
	}
	if !replaced {
		u.Fatalf("no specification of %v has the hook and the library of the packages", files)
	}
}

func (u *podmanUpgrade) configurePodman() {
	u.Helper()
	dir := filepath.Join(u.root, "podman")
	if err := os.Mkdir(dir, 0o755); err != nil {
		u.Fatal(err)
	}
	for name, text := range map[string]string{
		"storage.conf": fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = %q\n",
			dir+"/graph", dir+"/run"),
		"containers.conf": fmt.Sprintf(`[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
netns = "none"
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
tmp_dir = %q
static_dir = %q
volume_path = %q
`, dir+"/tmp", dir+"/static", dir+"/volumes"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			u.Fatal(err)
		}
	}
	u.ground.environment = append(u.ground.environment, "CONTAINERS_STORAGE_CONF="+dir+"/storage.conf",
		"CONTAINERS_CONF="+dir+"/containers.conf")
	if output := u.do("podman", "--version"); !strings.Contains(output, podman43) {
		u.Fatalf("podman is not version %s but %s", podman43, output)
	}
}

// do runs a command on the ground.
func (u *podmanUpgrade) do(command ...string) string {
	u.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := u.ground.command(ctx, command[0], command[1:]...).CombinedOutput()
	if err != nil {
		u.Fatalf("%s: %v: %s", strings.Join(command, " "), err, out)
	}
	return string(out)
}

// install makes packages of programs and of a library, with the scripts of the packages, and
// installs them by dpkg. Then install mounts the anchor, as systemd does at an installation.
func (u *podmanUpgrade) install(version, programs, library string) {
	u.Helper()
	// Only in these tests a host executes other programs of a package.
	files := map[string]string{}
	for _, name := range []string{"peerlane-hook", "peerlane-relay"} {
		files[programDir+"/"+name] = filepath.Join(programs, name)
	}
	debs := []string{
		u.deb("peerlane", version, files, map[string]string{"postinst": "deb-postinst", "prerm": "deb-prerm",
			"postrm": "deb-postrm"}),
		u.deb("libpeerlane", version, map[string]string{libraryDir + "/" + libpeerlane.Name: library},
			map[string]string{"postinst": "libpeerlane-post", "postrm": "libpeerlane-postun"}),
	}
	u.do(append([]string{"env", "LC_ALL=C", "dpkg", "--force-unsafe-io", "--install"}, debs...)...)
	if now := u.do("dpkg-query", "-W", "-f", "${Version} ", "peerlane", "libpeerlane"); now != version+" "+version+" " {
		u.Fatalf("after the installation of %s dpkg has %s", version, now)
	}
	anchor := filepath.Join(u.root, "var/lib/peerlane/anchor")
	u.do("sh", "-c", `while umount "$0" 2>/dev/null; do :; done`, anchor)
	// Podman starts in the ground's mount namespace. The command mounts the anchor there, and then fails
	// if process 1 is in a different namespace.
	u.do("sh", "-c", `"$1" cdi anchor --root "$2" || mountpoint -q "$0"`, anchor, filepath.Join(binaries, "peerlane"),
		u.root)
}

// deb makes a package of files, by path in the package. scripts names files of packaging/scripts.
func (u *podmanUpgrade) deb(name, version string, files, scripts map[string]string) string {
	u.Helper()
	dir := filepath.Join(u.root, "packages", name+"_"+version)
	add := func(path, from string, mode os.FileMode) {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, path), text, mode)
		}
		if err != nil {
			u.Fatal(err)
		}
	}
	for path, from := range files {
		add(path, from, 0o755)
	}
	for path, from := range scripts {
		add("DEBIAN/"+path, filepath.Join("../../packaging/scripts", from), 0o755)
	}
	control := fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: Peerlane <packages@peerlane.dev>\n"+
		"Description: test\n", name, version)
	if err := os.WriteFile(filepath.Join(dir, "DEBIAN/control"), []byte(control), 0o644); err != nil {
		u.Fatal(err)
	}
	u.do("dpkg-deb", "--root-owner-group", "-Znone", "--build", dir, dir+".deb")
	return dir + ".deb"
}

// build compiles hook and relay of this commit with changed lines of a file.
func build(t *testing.T, file string, lines map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := string(text)
	for from, to := range lines {
		if strings.Count(changed, "\t"+from+"\n") != 1 {
			t.Fatalf("%s has no line %q", file, from)
		}
		changed = strings.ReplaceAll(changed, "\t"+from+"\n", "\t"+to+"\n")
	}
	path, err := filepath.Abs(file)
	if err != nil {
		t.Fatal(err)
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: filepath.Join(dir, "changed.go")}})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "changed.go"), []byte(changed), 0o644)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"peerlane-hook", "peerlane-relay"} {
		c := exec.Command("go", "build", "-buildvcs=false", "-overlay", filepath.Join(dir, "overlay.json"), "-o",
			filepath.Join(dir, program), "../../cmd/"+program)
		if program == "peerlane-hook" {
			c.Env = append(os.Environ(), "CGO_ENABLED=0")
		}
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(c.Args, " "), err, out)
		}
	}
	return dir
}

// run starts a container on the GPU with an index.
func (u *podmanUpgrade) run(name string, gpu int) *earlier.Container {
	u.Helper()
	arguments := []string{"run", "--interactive", "--name", name}
	for _, d := range u.devices[gpu] {
		arguments = append(arguments, "--device", d)
	}
	u.Cleanup(func() { u.do("podman", "rm", "--force", "--ignore", "--time", "1", name) })
	return u.start(name, append(arguments, u.images[gpu], "/usr/bin/transfer")...)
}

func (u *podmanUpgrade) start(name string, arguments ...string) *earlier.Container {
	u.Helper()
	c := earlier.Start(u, name, u.ground.command(context.Background(), "podman", arguments...))
	u.started = append(u.started, c)
	return c
}

// startAgain starts a stopped container.
func (u *podmanUpgrade) startAgain(name string) *earlier.Container {
	u.Helper()
	return u.start(name, "start", "--attach", "--interactive", name)
}

func (u *podmanUpgrade) stop(c *earlier.Container) {
	u.Helper()
	c.End(func() error {
		u.do("podman", "stop", "--time", "1", c.ID)
		return nil
	})
}

// relay returns the process of a container's running relay.
func (u *podmanUpgrade) relay(c *earlier.Container) int {
	u.Helper()
	if u.ids[c.ID] == "" {
		u.ids[c.ID] = strings.TrimSpace(u.do("podman", "inspect", "--format", "{{.Id}}", c.ID))
	}
	var list []generation.Info
	for end := testutil.Begin(); !end.Over(); time.Sleep(20 * time.Millisecond) {
		var err error
		if list, err = generation.List(u.layout); err != nil {
			u.Fatal(err)
		}
		for _, g := range list {
			if g.Container.ID == u.ids[c.ID] && g.Status.Relay != nil && g.Status.State == generation.StateReady {
				return g.Status.Relay.PID
			}
		}
	}
	u.Fatalf("container %s has no relay among %+v", c.ID, list)
	return 0
}

// kill kills a relay. The supervisor starts the installed program.
func (u *podmanUpgrade) kill(relay int) {
	u.Helper()
	if err := syscall.Kill(relay, syscall.SIGKILL); err != nil {
		u.Fatal(err)
	}
}

// runsInstalledRelay requires that the relay of a container is the installed program.
func (u *podmanUpgrade) runsInstalledRelay(c *earlier.Container) {
	u.Helper()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", u.relay(c)))
	if err != nil || exe != programDir+"/peerlane-relay" {
		u.Errorf("the relay of %s runs %s, %v", c.ID, exe, err)
	}
}

// refuses requires that the client of a container gets an error with a status and a text.
func (u *podmanUpgrade) refuses(c *earlier.Container, want wire.Status, text string) {
	u.Helper()
	output := ""
	for end := testutil.BeginFor(3 * patience); !end.Over(); {
		status, rest, _ := strings.Cut(c.Next("error", 3*patience), " ")
		output = rest
		if status == fmt.Sprint(uint32(want)) && strings.Contains(rest, text) {
			return
		}
	}
	u.Errorf("the client of %s does not get status %d with %q; it got %q", c.ID, want, text, output)
}

// leavesNothing waits for the end of the containers' generations.
func (u *podmanUpgrade) leavesNothing() {
	for _, c := range u.started { // podman run opens its store once more after the end of a container
		c.Wait()
	}
	testutil.Until(u, "no generation of an ended container is left", func() bool {
		list, err := generation.List(u.layout)
		return err == nil && len(list) == 0
	})
	// conmon starts `podman container cleanup` after the end of a container, which would write to
	// root again.
	testutil.Until(u, "Podman has cleaned up", func() bool {
		commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
		return err == nil && !slices.ContainsFunc(commands, func(path string) bool {
			text, _ := os.ReadFile(path) // empty after the process's end
			return bytes.Contains(text, []byte(u.root+"/podman"))
		})
	})
}
