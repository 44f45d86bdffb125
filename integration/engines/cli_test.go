//go:build engines

package engines

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// cli is an engine with Docker's command line.
type cli struct {
	ground  *ground
	program []string
	// userNS are the switches of a user namespace of its own.
	userNS []string
}

func (e *cli) arguments(c container, switches ...string) []string {
	list := append([]string{"run", "--name", c.name}, switches...)
	for _, d := range c.devices {
		list = append(list, "--device", d)
	}
	if c.readOnly {
		list = append(list, "--read-only")
	}
	if c.user {
		list = append(list, "--user", "1000:1000")
	}
	if c.userNS {
		list = append(list, e.userNS...)
	}
	list = append(list, imageName)
	return append(list, c.command()...)
}

func (e *cli) do(ctx context.Context, arguments ...string) error {
	return e.ground.do(ctx, append(e.program, arguments...)...)
}

func (e *cli) run(ctx context.Context, c container) error {
	return e.do(ctx, e.arguments(c, "--rm")...)
}

func (e *cli) start(ctx context.Context, c container) error {
	return e.do(ctx, e.arguments(c, "--detach")...)
}

func (e *cli) restart(ctx context.Context, c container) error {
	return e.do(ctx, "restart", "--time", "5", c.name)
}

func (e *cli) remove(ctx context.Context, c container) error {
	return e.do(ctx, "rm", "--force", c.name)
}

// do runs a program to its end. The error has what it wrote.
func (g *ground) do(ctx context.Context, command ...string) error {
	c := g.command(ctx, command[0], command[1:]...)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// mustDo is for what every case needs.
func (b *bed) mustDo(command ...string) string {
	b.Helper()
	c := b.ground.command(context.Background(), command[0], command[1:]...)
	out, err := c.CombinedOutput()
	if err != nil {
		b.Fatalf("%s: %v: %s", strings.Join(command, " "), err, out)
	}
	return string(out)
}

// mustBe demands the version that a row is about.
func (b *bed) mustBe(version string, command ...string) {
	b.Helper()
	if said := b.mustDo(command...); !strings.Contains(said, version) {
		b.Fatalf("%s is not version %s but %q: it stands in integration/engines/recipe.go", command[0], version, said)
	}
}

func (b *bed) write(name, text string) string {
	b.Helper()
	path := filepath.Join(b.Root, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
	return path
}

func (b *bed) mkdir(name string) string {
	b.Helper()
	path := filepath.Join(b.Root, name)
	if err := os.MkdirAll(path, 0o755); err != nil {
		b.Fatal(err)
	}
	return path
}

// podman configures it by files, so that its command line is a user's.
func podman(version, runtime string) func(*bed) engine {
	return func(b *bed) engine {
		dir := b.mkdir("podman")
		storage := b.write("storage.conf", fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = %q\n", dir+"/graph", dir+"/run"))
		runtime := runtime
		limits := ""
		if b.cgroups == v2 {
			if runtime == "crun" && version == Podman43 {
				// crun 1.8 raises RLIMIT_MEMLOCK for its device program, which is
				// forbidden here.
				runtime = "runc"
			}
			limits = "pids_limit = 0\n" // that controller is on v1
		}
		// What podman would raise limits to may be more than is permitted here.
		conf := b.write("containers.conf", fmt.Sprintf(`[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
netns = "none"
log_driver = "k8s-file"
%s[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = %q
tmp_dir = %q
static_dir = %q
volume_path = %q
`, limits, runtime, dir+"/tmp", dir+"/static", dir+"/volumes"))
		b.ground.environment = append(b.ground.environment, "CONTAINERS_STORAGE_CONF="+storage, "CONTAINERS_CONF="+conf)
		b.mustBe(version, "podman", "--version")
		b.mustDo("podman", "import", "--change", "ENV PATH=/usr/bin:/bin", b.image.layer, imageName)
		return &cli{ground: b.ground, program: []string{"podman"}, userNS: []string{"--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"}}
	}
}
