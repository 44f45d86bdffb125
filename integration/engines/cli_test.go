//go:build engines

package engines

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdiengine "github.com/peerlane/peerlane/cdi/engine"
	"github.com/peerlane/peerlane/integration/image"
)

// cli is an engine with Docker's command line.
type cli struct {
	ground  *ground
	program []string
	// userNS are the flags for a separate user namespace.
	userNS []string
	// devices returns the switches that request CDI devices; nil for --device.
	devices func([]string) []string
	// volumes are writable directories for --volume, for a container with a read-only root file
	// system: Docker makes all other mounts read-only, including CDI's.
	volumes [][2]string
	// checkpoints are the words of a checkpoint command before the container's name.
	checkpoints []string
}

func (e *cli) arguments(c container, switches ...string) []string {
	list := append([]string{"run", "--name", c.name}, switches...)
	if e.devices != nil {
		list = append(list, e.devices(c.devices)...)
	} else {
		for _, d := range c.devices {
			list = append(list, "--device", d)
		}
	}
	if c.readOnly {
		list = append(list, "--read-only")
		for _, v := range e.volumes {
			list = append(list, "--volume", v[0]+":"+v[1])
		}
	}
	if c.user {
		list = append(list, "--user", "1000:1000")
	}
	if c.userNS {
		list = append(list, e.userNS...)
	}
	if c.memory > 0 {
		list = append(list, "--memory", fmt.Sprint(c.memory))
	}
	if c.hostPID {
		list = append(list, "--pid", "host")
	}
	if c.hostNetwork {
		list = append(list, "--network", "host")
	}
	list = append(list, c.from())
	return append(list, c.command()...)
}

func (e *cli) do(ctx context.Context, arguments ...string) error {
	return e.ground.do(ctx, append(e.program, arguments...)...)
}

func (e *cli) imports(ctx context.Context, i *image.Image, name string) error {
	return e.do(ctx, "import", "--change", "ENV PATH=/usr/bin:/bin", i.Layer, name)
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

func (e *cli) exec(ctx context.Context, c container, command ...string) error {
	return e.do(ctx, append([]string{"exec", c.name}, command...)...)
}

func (e *cli) pause(ctx context.Context, c container) error   { return e.do(ctx, "pause", c.name) }
func (e *cli) unpause(ctx context.Context, c container) error { return e.do(ctx, "unpause", c.name) }

func (e *cli) update(ctx context.Context, c container) error {
	return e.do(ctx, "update", "--cpu-shares", "512", c.name)
}

func (e *cli) checkpoint(ctx context.Context, c container, dir string) error {
	arguments := slices.Clone(e.checkpoints)
	if arguments[0] == "container" {
		return e.do(ctx, append(arguments, c.name)...)
	}
	return e.do(ctx, append(arguments, "--checkpoint-dir", dir, c.name, "one")...)
}

// do runs a program to its end. The error contains the output.
func (g *ground) do(ctx context.Context, command ...string) error {
	c := g.command(ctx, command[0], command[1:]...)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// mustDo runs a setup command and requires success.
func (b *bed) mustDo(command ...string) string {
	b.Helper()
	c := b.ground.command(context.Background(), command[0], command[1:]...)
	out, err := c.CombinedOutput()
	if err != nil {
		b.Fatalf("%s: %v: %s", strings.Join(command, " "), err, out)
	}
	return string(out)
}

// mustBe requires the version of the row.
func (b *bed) mustBe(version string, command ...string) {
	b.Helper()
	if output := b.mustDo(command...); !strings.Contains(output, version) {
		b.Fatalf("%s is not version %s but %q: it stands in integration/engines/recipe.go", command[0], version, output)
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

// podman is configured by files, so that the command lines are those of a user.
func podman(version, runtime string) func(*bed) engine {
	return func(b *bed) engine {
		dir := b.mkdir("podman")
		storage := b.write("storage.conf", fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = %q\n",
			dir+"/graph", dir+"/run"))
		runtime := runtime
		limits := ""
		if b.cgroups == v2 {
			if runtime == "crun" && version == podman43 {
				// crun 1.8 raises RLIMIT_MEMLOCK for its device program, which is forbidden here.
				runtime = "runc"
			}
			limits = "pids_limit = 0\n" // that controller is on v1
		}
		// Podman's default limits may exceed the permitted limits. Podman needs no configuration
		// for CDI; Podman also gets peerlane-runtime, so that runtime configure has an effect.
		b.ground.environment = append(b.ground.environment, "CONTAINERS_STORAGE_CONF="+storage)
		text := fmt.Sprintf(`[containers]
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
`, limits, runtime, dir+"/tmp", dir+"/static", dir+"/volumes")
		var conf string
		if b.row.rootless {
			conf = b.write("containers.conf", text) // the user's file, which no package changes
		} else {
			conf = b.configure("podman", "containers.conf", text, "--set-as-runtime")
		}
		b.ground.environment = append(b.ground.environment, "CONTAINERS_CONF="+conf)
		b.mustBe(version, "podman", "--version")
		b.mustDo("podman", "import", "--change", "ENV PATH=/usr/bin:/bin", b.image.Layer, imageName)
		return &cli{ground: b.ground, program: []string{"podman"}, checkpoints: []string{"container", "checkpoint"},
			userNS: []string{"--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"}}
	}
}

// byRuntime returns Podman with devices injected by peerlane-runtime, under the name of peerlane
// runtime configure.
func (e *cli) byRuntime(b *bed) engine {
	other := *e
	other.program = []string{"podman", "--runtime", cdiengine.RuntimeName, "--runtime-flag", "peerlane-root=" + b.Root,
		"--runtime-flag", "peerlane-spec-dir=" + b.CDIDir()}
	other.devices = byVariable
	return &other
}

// dockerDaemon starts a daemon. The client learns the address from the environment.
func (b *bed) dockerDaemon(version string, path []string, configuration string, switches ...string) *cli {
	b.Helper()
	dir := b.mkdir("docker")
	address := "unix://" + dir + "/docker.sock"
	path = append(path, "/usr/sbin", "/usr/bin", "/sbin", "/bin")
	b.ground.environment = append(b.ground.environment, "PATH="+strings.Join(path, ":"), "DOCKER_HOST="+address,
		"DOCKER_CONFIG="+dir)
	// peerlane reads the daemon's address from its file.
	configuration = fmt.Sprintf(`{"hosts": [%q], `, address) + strings.TrimPrefix(configuration, "{")
	file := b.configure("docker", "daemon.json", configuration, switches...)
	ready := func() error { return b.ground.do(context.Background(), "docker", "info") }
	remap := []string{}
	if b.userNS {
		remap = []string{"--userns-remap", "daemon"}
	}
	b.daemon = b.ground.daemon(b.T, ready, append(append([]string{"dockerd"}, remap...),
		"--config-file", file, "--data-root", dir+"/data", "--exec-root", dir+"/exec",
		"--pidfile", dir+"/docker.pid", "--iptables=false", "--ip6tables=false", "--bridge=none", "--log-level=warn")...)
	b.mustBe(version, "docker", "version", "--format", "{{.Server.Version}}")
	b.mustDo("docker", "import", "--change", "ENV PATH=/usr/bin:/bin", b.image.Layer, imageName)
	simulator := filepath.Join(b.Root, "simulator")
	return &cli{ground: b.ground, program: []string{"docker"}, checkpoints: []string{"checkpoint", "create"},
		volumes: [][2]string{{b.reports, reportsDir}, {simulator, simulator}}}
}

func docker29(b *bed) engine {
	return b.dockerDaemon(docker29Version, []string{installed.Docker, installed.Containerd, installed.Runc},
		`{"live-restore": true, "experimental": true, "features": {"cdi": false}}`)
}

// packagedDocker returns a Docker of Debian with a new /etc/docker/daemon.json.
func packagedDocker(version string) func(*bed) engine {
	return func(b *bed) engine {
		dir := b.mkdir("docker")
		address := "unix://" + dir + "/docker.sock"
		b.ground.environment = append(b.ground.environment, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DOCKER_HOST="+address,
			"DOCKER_CONFIG="+dir)
		text := fmt.Sprintf(`{"hosts": [%q], "live-restore": true}`, address)
		b.mustDo("sh", "-c", `mkdir -p /etc/docker && printf %s "$0" >/etc/docker/daemon.json`, text)
		ready := func() error { return b.ground.do(context.Background(), "docker", "info") }
		b.daemon = b.ground.daemon(b.T, ready, "dockerd", "--data-root", dir+"/data", "--exec-root", dir+"/exec",
			"--pidfile", dir+"/docker.pid",
			"--iptables=false", "--ip6tables=false", "--bridge=none", "--log-level=warn")
		b.mustBe(version, "docker", "version", "--format", "{{.Server.Version}}")
		b.mustDo("docker", "import", "--change", "ENV PATH=/usr/bin:/bin", b.image.Layer, imageName)
		simulator := filepath.Join(b.Root, "simulator")
		return &cli{ground: b.ground, program: []string{"docker"},
			volumes: [][2]string{{b.reports, reportsDir}, {simulator, simulator}}}
	}
}

// docker20 has no CDI support: peerlane-runtime injects the devices.
func docker20(b *bed) engine {
	e := b.dockerDaemon(docker20Version, nil, `{"live-restore": true, "experimental": true}`,
		"--runtime-arg", "--peerlane-root="+b.Root, "--runtime-arg", "--peerlane-spec-dir="+b.CDIDir())
	e.devices = func(names []string) []string {
		if len(names) == 0 {
			return nil
		}
		return append([]string{"--runtime", "peerlane"}, byVariable(names)...)
	}
	return e
}

// byVariable returns the variable that requests devices from peerlane-runtime.
func byVariable(names []string) []string {
	if len(names) == 0 {
		return nil
	}
	return []string{"--env", "PEERLANE_DEVICES=" + strings.Join(names, ",")}
}
