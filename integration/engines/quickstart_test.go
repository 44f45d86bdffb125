//go:build engines

package engines

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	cdilibrary "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
)

// quickstart returns the blocks of docs/quickstart.md by heading, as a script each.
func quickstart(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/quickstart.md")
	if err != nil {
		t.Fatal(err)
	}
	scripts := map[string]string{}
	for part := range strings.SplitSeq(string(text), "\n## ") {
		heading, body, _ := strings.Cut(part, "\n")
		for _, block := range regexp.MustCompile("(?s)\n```([a-z]*)\n(.*?)\n```\n").FindAllStringSubmatch(body, -1) {
			if block[1] != "sh" {
				t.Errorf("below %q is a block that is not run: %s", heading, block[2])
			}
			scripts[heading] += block[2] + "\n"
		}
	}
	return scripts
}

// quickstarts are the engines of the quickstart: the projects' releases, and Debian's packages.
var quickstarts = []struct {
	name, heading string
	row           row
}{
	{"Docker", "Docker", row{containers: dockers, name: "docker-29", next: true, open: docker29}},
	{"Docker-26.1", "Docker 25 to 28.1", row{containers: dockers, name: "docker-26.1", next: true,
		open: packagedDocker(docker26)}},
	{"Docker-20.10", "Docker 24 and older", row{containers: dockers, name: "docker-20.10", old: true,
		open: packagedDocker(docker20Version)}},
	{"Podman", "Podman", row{containers: podmans, name: "podman-5.4", next: true, cgroups: v1,
		open: podman(podman54, "crun")}},
	{"Podman-4.3", "Podman", row{containers: podmans, name: "podman-4.3", old: true, cgroups: v1,
		open: podman(podman43, "crun")}},
	{"containerd", "containerd", row{name: "containerd-2-ctr", next: true, open: containerd2(ctr)}},
	{"containerd-1.7", "containerd 1.7 and older", row{name: "containerd-1.7-ctr", next: true,
		open: containerdByCtr(containerd17Version)}},
	{"containerd-1.6", "containerd 1.7 and older", row{name: "containerd-1.6-ctr", old: true,
		open: containerdByCtr(containerd16)}},
}

// Every block of the quickstart runs unchanged on a separate Debian for each engine, from the
// packages of `make packages`, or from bin without packages, to a container with a lane, and to
// removal.
func TestQuickstartRunsUnchanged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: container engines make namespaces and cgroups")
	}
	t.Parallel()
	scripts := quickstart(t)
	used := map[string]bool{"Install": true, "Without a GPU": true, "With GPUs": true, "Remove Peerlane": true}
	for _, q := range quickstarts {
		heading, r := q.heading, q.row
		used[heading] = true
		t.Run(q.name, func(t *testing.T) {
			r.takeTurn(t)
			b := newBed(t, r, r.cgroups, false)
			g := b.guide()
			for _, section := range []string{"Install", "Without a GPU", "With GPUs", heading, "Remove Peerlane"} {
				if section == "Without a GPU" && q.name != "Docker" {
					continue // unrelated to engines
				}
				if section == "With GPUs" {
					g.hardware()
				}
				output := ""
				// Without systemd the test restarts Docker's daemon.
				for i, part := range restarts.Split(scripts[section], -1) {
					if i > 0 {
						b.daemon.again(t)
					}
					output += g.run(part)
				}
				switch section {
				case "Without a GPU":
					g.mustPrint(output, "verified")
				case "With GPUs":
					g.mustPrint(output, "mlx5_0", "peerlane.dev/lane=3")
				case heading:
					g.mustPrint(output, "relay.sock\n", "CONTAINER")
					if g.packaged {
						g.mustPrint(output, "nccl.conf\n")
					}
					switch {
					case restarts.MatchString(scripts[heading]):
						g.mustPrint(output, "wrote /etc/docker/daemon.json")
					case strings.Contains(scripts[heading], "runtime configure"):
						g.mustPrint(output, "nothing has to be changed")
					}
				}
			}
			for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
				left, err := generation.List(b.Layout)
				if err == nil && len(left) == 0 {
					break
				}
				if end.Over() {
					t.Fatalf("left are %+v, %v", left, err)
				}
			}
		})
	}
	for heading := range scripts {
		if !used[heading] {
			t.Errorf("no engine runs the block below %q", heading)
		}
	}
}

// restarts matches the lines that make systemd restart or reload Docker.
var restarts = regexp.MustCompile(`systemctl (?:restart|reload) docker\n`)

// guide is an engine's bed for the quickstart.
type guide struct {
	*bed
	packaged bool   // from packages of make packages
	dir      string // its subdirectory bin replaces programs that need the network
}

// guide creates programs that a host with a network has: apt without downloads, and NVIDIA's
// toolkit.
func (b *bed) guide() *guide {
	b.Helper()
	g := &guide{bed: b, dir: b.mkdir("quickstart")}
	b.mkdir("quickstart/bin")
	packages := os.Getenv("PEERLANE_PACKAGES")
	if packages == "" {
		packages = "../../dist"
	}
	// `make packages` also leaves packages of other architectures.
	found, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil {
		b.Fatal(err)
	}
	if len(found) > 0 {
		for _, name := range []string{"peerlane_0_arm64.deb", "libpeerlane_0_arm64.deb"} {
			b.write(filepath.Join("quickstart", name), "of another processor, which nobody installs")
		}
	}
	for _, path := range found {
		text, err := os.ReadFile(path)
		if err != nil {
			b.Fatal(err)
		}
		b.write(filepath.Join("quickstart", filepath.Base(path)), string(text))
	}
	if g.packaged = len(found) > 0; g.packaged {
		b.T.Logf("with the packages %v", found)
		// Without these the purge would find the test bed's directories in the way (hardware).
		b.write("quickstart/apt.conf", `Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "/dev/null"; Dpkg::Options { "--force-unsafe-io"; };
DPkg::Pre-Invoke { "umount /etc/peerlane /run/peerlane /var/lib/peerlane 2>/dev/null || true"; };
`)
	} else {
		b.T.Log("without packages (make packages, or PEERLANE_PACKAGES=DIR): what they have is copied")
		g.program("apt", fmt.Sprintf(`case $1 in
install) mkdir -p /usr/libexec/peerlane
  cp %[1]s/* %[2]s /usr/libexec/peerlane/
  ln -sf ../libexec/peerlane/peerlane ../libexec/peerlane/peerlane-runtime /usr/bin/ ;;
purge) rm -r /usr/libexec/peerlane /usr/bin/peerlane /usr/bin/peerlane-runtime ;;
esac`, b.Binaries, strings.Join(b.Libraries, " ")))
	}
	cache, err := cdilibrary.NewCache(cdilibrary.WithSpecDirs(b.CDIDir()), cdilibrary.WithAutoRefresh(false))
	if err != nil {
		b.Fatal(err)
	}
	vendor := b.write("quickstart/nvidia.json", "")
	for _, spec := range cache.GetVendorSpecs("nvidia.com") {
		if err := os.Rename(spec.GetPath(), vendor); err != nil {
			b.Fatal(err)
		}
	}
	// JSON is also YAML.
	g.program("nvidia-ctk", `[ "$1 $2" = "cdi generate" ]; cp `+vendor+` "${3#--output=}"`)
	// The test bed's specifications would hide those of the quickstart.
	for _, spec := range cache.GetVendorSpecs("peerlane.dev") {
		if err := os.Remove(spec.GetPath()); err != nil {
			b.Fatal(err)
		}
	}
	return g
}

func (g *guide) program(name, script string) {
	g.Helper()
	if err := os.WriteFile(filepath.Join(g.dir, "bin", name), []byte("#!/bin/sh\nset -eu\n"+script+"\n"),
		0o755); err != nil {
		g.Fatal(err)
	}
}

// hardware makes the host look like the recorded host, by the test bed's configuration and two
// flags.
func (g *guide) hardware() {
	g.Helper()
	g.Config.Relay.Binary = ""
	if err := g.Config.Write(g.Layout.ConfigFile()); err != nil {
		g.Fatal(err)
	}
	// The quickstart creates this table, which the packaged file lacks.
	text, err := os.ReadFile(g.Layout.ConfigFile())
	if err != nil {
		g.Fatal(err)
	}
	text = regexp.MustCompile(`(?ms)^\[runtime\]\n.*?(^\[|\z)`).ReplaceAll(text, []byte("$1"))
	if err := os.WriteFile(g.Layout.ConfigFile(), text, 0o644); err != nil {
		g.Fatal(err)
	}
	g.run(fmt.Sprintf(`cp /etc/peerlane/nccl.conf %s/etc/peerlane/ || true`, g.Root))
	g.run(fmt.Sprintf(`for tree in etc run var/lib; do mkdir -p /$tree/peerlane; mount --bind %s/$tree/peerlane /$tree/peerlane; done; mkdir -p /etc/cdi`, g.Root))
	host := filepath.Join(g.Root, "host")
	g.program("peerlane", fmt.Sprintf(`case $1 in
topo|plan|cdi) [ "${2-}" = remove ] || exec /usr/bin/peerlane "$@" --sysfs %[1]s/sys --proc %[1]s/proc ;;
esac
exec /usr/bin/peerlane "$@"`, host))
}

// run runs a script on the engine's ground and returns the output.
func (g *guide) run(script string) string {
	g.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 5*time.Minute)
	defer cancel()
	c := g.ground.command(ctx, "sh", "-c", `cd "$0" && export PATH="$0/bin:$PATH" APT_CONFIG="$0/apt.conf" DEBIAN_FRONTEND=noninteractive && set -eux && `+script, g.dir)
	out, err := c.CombinedOutput()
	if err != nil {
		g.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func (g *guide) mustPrint(output string, words ...string) {
	g.Helper()
	for _, w := range words {
		if !strings.Contains(output, w) {
			g.Errorf("output lacks %q: %s", w, output)
		}
	}
}
