package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/config/paths"
)

// newWholeHost creates a host with installed specifications and all device nodes.
func newWholeHost(t *testing.T) *cdiHost {
	t.Helper()
	return wholeHost(t, cdiTree(t))
}

func wholeHost(t *testing.T, tree string) *cdiHost {
	t.Helper()
	h := onTree(t, tree)
	devRoot := t.TempDir()
	for _, node := range []string{
		"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia9", "infiniband/rdma_cm", "infiniband/uverbs0",
		"infiniband/uverbs1",
		"nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidia4", "nvidia5", "nvidia6", "nvidia7",
	} {
		path := filepath.Join(devRoot, "dev", node)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mkfifo(path, 0o600); err != nil { // CDI accepts FIFOs, and any user can create one
			t.Fatal(err)
		}
	}
	h.flags = append(h.flags, "--dev-root", devRoot)
	h.generate()
	return h
}

// drift runs `peerlane cdi validate` and requires a difference.
func (h *cdiHost) drift() (list []cdi.Drift) {
	h.t.Helper()
	out, errOut := h.fails(3, "validate", "-o", "json")
	if !strings.Contains(errOut, "differ from this host") {
		h.t.Errorf("standard error: %q", errOut)
	}
	var got struct {
		Fits  bool
		Drift []cdi.Drift
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		h.t.Fatal(err)
	}
	if got.Fits {
		h.t.Error("validate reports drift and fits = true")
	}
	return got.Drift
}

func (h *cdiHost) configure(text string) {
	h.t.Helper()
	path := filepath.Join(h.root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		h.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		h.t.Fatal(err)
	}
}

// rewrite changes an installed file.
func rewrite(t *testing.T, path string, change func(string) string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(change(string(text))), 0o644); err != nil {
		t.Fatal(err)
	}
}

func replacing(old, with string) func(string) string {
	return func(text string) string { return strings.ReplaceAll(text, old, with) }
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// renameNIC gives mlx5_1 another name, as udev does.
func (h *cdiHost) renameNIC(name string) {
	h.t.Helper()
	class := filepath.Join(h.tree, "sys/class/infiniband")
	target, err := os.Readlink(filepath.Join(class, "mlx5_1"))
	check(h.t, err)
	renamed := filepath.Join(filepath.Dir(target), name)
	check(h.t, os.Rename(filepath.Join(class, target), filepath.Join(class, renamed)))
	check(h.t, os.Remove(filepath.Join(class, "mlx5_1")))
	check(h.t, os.Symlink(renamed, filepath.Join(class, name)))
	h.edit(h.glob("sys/class/infiniband_verbs/uverbs1/ibdev"), func(string) string { return name + "\n" })
}

const otherUUID = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"

func (h *cdiHost) information(index int) string {
	return "proc/driver/nvidia/gpus/" + h.gpu(index).BusID + "/information"
}

func TestValidateNamesTheDrift(t *testing.T) {
	shared := cdiTree(t)
	// Seven GPUs share the two NICs at full rate if one GPU uses both.
	const gpu3 = `lanes .* the lane of GPU 3 would`
	for _, test := range []struct {
		name   string
		change func(t *testing.T, h *cdiHost)
		// want has a pattern "kind subject message" for every difference, in order.
		want []string
		// stays reports that a refresh does not remove the difference.
		stays bool
		// shared reports a change outside the host's own trees.
		shared bool
	}{
		{name: "a GPU in another's place", change: func(_ *testing.T, h *cdiHost) {
			a, b := h.gpu(2).UUID, h.gpu(3).UUID
			h.edit(h.information(2), replacing(a, b))
			h.edit(h.information(3), replacing(b, a))
		}, want: []string{`gpu-moved .*lane=2 GPU 2 .* was at 0000:3a:00.0 and is now at 0000:3b:00.0`,
			`gpu-moved .*lane=3 .* is now at 0000:3a:00.0`}},
		{name: "a GPU gone", change: func(_ *testing.T, h *cdiHost) { h.noDevice(h.gpu(7).BusID) },
			want: []string{`gpu-gone .*lane=7 GPU 7 \(GPU-c64a.*\) at 0000:bb:00.0 is gone`, gpu3}},
		{name: "a GPU in the middle gone", change: func(_ *testing.T, h *cdiHost) { h.noDevice(h.gpu(6).BusID) },
			want: []string{`gpu-gone .*lane=6 `, `gpu-index .*lane=7 the GPU at 0000:bb:00.0 now has index 6, and had 7`,
				gpu3}},
		{name: "a GPU added", change: func(t *testing.T, h *cdiHost) {
			link := filepath.Join(h.tree, "sys/bus/pci/devices", h.gpu(7).BusID)
			target, err := os.Readlink(link)
			check(t, err)
			check(t, os.Remove(link))
			h.generate()
			check(t, os.Symlink(target, link))
		}, want: []string{`gpu-added .*lane=7 GPU 7 \(GPU-c64a.*\) at 0000:bb:00.0 has no device yet`, gpu3}},
		{name: "a GPU replaced", change: func(_ *testing.T, h *cdiHost) {
			h.edit(h.information(3), replacing(h.gpu(3).UUID, otherUUID))
		}, want: []string{
			`gpu-replaced .*lane=3 a different GPU is now at 0000:3b:00.0: its UUID is ` + otherUUID + `, and was GPU-e1b6`}},
		{name: "a GPU's minor number", change: func(_ *testing.T, h *cdiHost) {
			h.edit(h.information(3), func(text string) string {
				return regexp.MustCompile(`(Device Minor:\s*)3`).ReplaceAllString(text, "${1}9")
			})
		}, want: []string{`minor /dev/nvidia3 the device node of GPU 3 at 0000:3b:00.0 is now /dev/nvidia9`}},
		{name: "a GPU excluded", shared: true, change: func(_ *testing.T,
			h *cdiHost) {
			h.configure("[plan.exclude]\ngpus = [\"7\"]\n")
		},
			want: []string{`gpu-refused .*lane=7 GPU 7 can no longer have a lane: `, `lanes .* the lanes of GPUs 3, 7 would now`}},

		{name: "a NIC renamed", change: func(_ *testing.T, h *cdiHost) { h.renameNIC("mlx5_9") },
			want: []string{`nic-renamed mlx5_1 NIC mlx5_1 at 0000:9c:00.0 is now called mlx5_9`,
				`lanes .* the lanes of GPUs 4, 5, 6, 7 would now have other NICs`}},
		{name: "a NIC gone", change: func(t *testing.T, h *cdiHost) {
			check(t, os.Remove(filepath.Join(h.tree, "sys/class/infiniband/mlx5_1")))
		}, want: []string{`nic-gone mlx5_1 NIC mlx5_1 at 0000:9c:00.0 is gone`, `lanes .*GPUs .*7 would`}},
		{name: "a NIC added", change: func(t *testing.T, h *cdiHost) {
			link := filepath.Join(h.tree, "sys/class/infiniband/mlx5_1")
			target, err := os.Readlink(link)
			check(t, err)
			check(t, os.Remove(link))
			h.generate()
			check(t, os.Symlink(target, link))
		}, want: []string{`nic-added mlx5_1 NIC mlx5_1 at 0000:9c:00.0 is new`, `lanes .*GPUs .*7 would`}},
		{name: "a port down", change: func(_ *testing.T, h *cdiHost) { h.portDown("mlx5_1") },
			want: []string{`port-down mlx5_1 NIC mlx5_1 no longer has an active port`, `lanes .*GPUs .*7 would`}},
		{name: "a port up", change: func(t *testing.T, h *cdiHost) {
			state := h.glob("sys/class/infiniband/mlx5_1/ports/1/state")
			h.portDown("mlx5_1")
			h.generate()
			h.edit(state, func(string) string { return "4: ACTIVE\n" })
		}, want: []string{`port-up mlx5_1 NIC mlx5_1 now has an active port`, `lanes .*GPUs .*7 would`}},

		{name: "several tenants", shared: true, change: func(_ *testing.T,
			h *cdiHost) {
			h.configure("[cdi]\ntenancy = \"multi\"\n")
		},
			want: []string{`tenancy .*/peerlane.dev-gpu.json it gives containers devices that several tenants must not share`,
				`tenancy .*/peerlane.dev-nic.json it gives`}},
		{name: "one tenant", shared: true, change: func(t *testing.T, h *cdiHost) {
			h.configure("[cdi]\ntenancy = \"multi\"\n")
			h.generate()
			h.configure("")
		}, want: []string{`tenancy peerlane.dev/gpu it should be offered`, `tenancy peerlane.dev/nic it should`}},
		{name: "another group", shared: true, change: func(_ *testing.T,
			h *cdiHost) {
			h.configure("[groups]\nhalf = [\"0\", \"1\"]\n")
		},
			want: []string{`plan .*/plan.json the groups of the configuration have changed`}},

		{name: "no plan", shared: true, change: func(t *testing.T, h *cdiHost) { check(t, os.Remove(h.planFile())) },
			want: []string{`missing .*/plan.json there is no plan`}},
		{name: "a plan of another version", shared: true, change: func(t *testing.T, h *cdiHost) {
			rewrite(t, h.planFile(), func(text string) string {
				return regexp.MustCompile(`"version": \d+`).ReplaceAllString(text, `"version": 1`)
			})
		}, want: []string{`plan .*/plan.json .*has version 1, and this program supports`}},
		{name: "a plan that others can write", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Chmod(h.planFile(), 0o666))
		},
			want: []string{`mode .*/plan.json users other than its owner can write it \(mode 0666\)`}},
		{name: "another plan", shared: true, change: func(t *testing.T, h *cdiHost) {
			rewrite(t, h.planFile(), replacing(`"name": "mlx5_0",`, `"name": "mlx5_0", "guid": "0",`))
		}, want: []string{`plan .*/plan.json it differs from the present plan of this host: it has .*`}},

		{name: "a damaged file", shared: true, change: func(t *testing.T, h *cdiHost) {
			rewrite(t, h.specFile("gpu"), func(text string) string { return text[:len(text)/2] })
		}, want: []string{`damaged .*/peerlane.dev-gpu.json engines cannot load it`}},
		{name: "an empty file", shared: true, change: func(t *testing.T, h *cdiHost) {
			rewrite(t, h.specFile("lane"), func(string) string { return "" })
		}, want: []string{`damaged .*/peerlane.dev-lane.json engines cannot load it`}},
		{name: "a file that rootless engines cannot read", shared: true,
			change: func(t *testing.T, h *cdiHost) { check(t, os.Chmod(h.specFile("lane"), 0o600)) },
			want:   []string{`mode .*/peerlane.dev-lane.json not every user can read it \(mode 0600\)`}},
		{name: "a file that others can write", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Chmod(h.specFile("lane"), 0o664))
		},
			want: []string{`mode .*/peerlane.dev-lane.json users other than its owner can write it`}},
		{name: "somebody else's file", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Chown(h.specFile("lane"), 12345, 0))
		},
			want: []string{`mode .*/peerlane.dev-lane.json it belongs to uid 12345`}},
		{name: "a newer CDI version", shared: true, change: func(t *testing.T, h *cdiHost) {
			rewrite(t, h.specFile("lane"), func(text string) string {
				return regexp.MustCompile(`"cdiVersion": "[^"]*"`).ReplaceAllString(text, `"cdiVersion": "1.0.0"`)
			})
		}, want: []string{`version .*/peerlane.dev-lane.json it states CDI version 1.0.0 and needs 0.`}},
		{name: "a file missing", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Remove(h.specFile("lane")))
		},
			want: []string{`missing peerlane.dev/lane no specification of it is installed`}},
		{name: "nothing installed", shared: true, change: func(_ *testing.T, h *cdiHost) { h.run("remove") },
			want: []string{`missing .*/etc/cdi no specification of Peerlane is installed`}},
		{name: "an edited file", shared: true, change: func(t *testing.T, h *cdiHost) {
			rewrite(t, h.specFile("gpu"), replacing("CUDA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES=0,"))
		}, want: []string{`content .*/peerlane.dev-gpu.json it differs from the file that this version writes on this host: it has .*DEVICES=0,GPU.* instead of .*DEVICES=GPU`}},
		{name: "two files", shared: true, change: func(t *testing.T, h *cdiHost) {
			text, err := os.ReadFile(h.specFile("lane"))
			check(t, err)
			check(t, os.WriteFile(filepath.Join(h.specDir, "old.json"), text, 0o644))
		}, want: []string{`conflict .*/old.json .*/peerlane.dev-lane.json also defines peerlane.dev/lane=0 and \d+ more, so engines ignore both`}, stays: true},
		{name: "two formats", shared: true, change: func(t *testing.T, h *cdiHost) {
			text, err := os.ReadFile(h.specFile("lane"))
			check(t, err)
			check(t, os.WriteFile(filepath.Join(h.specDir, "peerlane.dev-lane.yaml"), text, 0o644))
		}, want: []string{`conflict .*/peerlane.dev-lane.json .*/peerlane.dev-lane.yaml also defines peerlane.dev/lane=0`}},

		{name: "another layout", shared: true, change: func(t *testing.T, h *cdiHost) {
			other := *h
			other.root = t.TempDir()
			unmountsAnchor(t, other.root)
			other.flags = append([]string{"--root", other.root}, h.flags[2:]...)
			other.generate()
		}, want: []string{`layout .*/peerlane.dev-gpu.json it belongs to the layout below .*, and this is `,
			`layout .*/peerlane.dev-lane.json `, `layout .*/peerlane.dev-nic.json `}},
		{name: "no anchor", shared: true, change: func(t *testing.T, h *cdiHost) {
			_, err := paths.New(h.root).UnmountAnchor()
			check(t, errors.Join(err, os.Remove(filepath.Join(h.root, "var/lib/peerlane/anchor"))))
		}, want: []string{`missing .*/anchor the directory that containers get at /run/peerlane is missing`}},
		{name: "no mount on the anchor", shared: true, change: func(t *testing.T, h *cdiHost) {
			_, err := paths.New(h.root).UnmountAnchor()
			check(t, err)
		}, want: []string{
			`content .*/anchor the hook refuses each container with a lane, because of .* it is a directory instead of a mount`}},
		{name: "no hook", shared: true, change: func(t *testing.T, h *cdiHost) { check(t, os.Remove(h.hook)) },
			want: []string{`hook .*/peerlane-hook the hook is missing`}, stays: true},
		{name: "a hook that cannot run", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Chmod(h.hook, 0o644))
		},
			want: []string{`hook .*/peerlane-hook the hook is not an executable file`}, stays: true},
		{name: "a hook of somebody else", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Chown(h.hook, 12345, 0))
		},
			want: []string{`hook .*/peerlane-hook runtimes run it as root, but .* belongs to uid 12345`}, stays: true},
		{name: "a hook that others can write", shared: true, change: func(t *testing.T,
			h *cdiHost) {
			check(t, os.Chmod(h.hook, 0o777))
		},
			want: []string{`hook .*/peerlane-hook runtimes run it as root, but users other than root can write`}, stays: true},
		{name: "another way to GPU memory", change: func(_ *testing.T, h *cdiHost) {
			h.edit("proc/driver/nvidia/version", replacing("Open Kernel Module for x86_64", "x86_64 Kernel Module"))
		}, want: []string{`content .*/peerlane.dev-gpu.json .* it has .*REGISTRATION=dmabuf" instead of .*REGISTRATION=bounce`,
			`content .*/peerlane.dev-nic.json `}},
		{name: "no node", shared: true, change: func(t *testing.T, h *cdiHost) {
			check(t, os.Remove(filepath.Join(h.flags[len(h.flags)-1], "dev/nvidia3")))
		}, want: []string{`node .*/dev/nvidia3 the device node is missing`}, stays: true},
		{name: "no GPU", change: func(_ *testing.T, h *cdiHost) { h.noGPU() }, want: []string{
			`kind .*/peerlane.dev-gpu.json this host has no device for it: .*no NVIDIA GPU`, `kind .*lane.json `,
			`kind .*nic.json `,
			`gpu-gone`, `gpu-gone`, `gpu-gone`, `gpu-gone`, `gpu-gone`, `gpu-gone`, `gpu-gone`, `gpu-gone`,
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			tree := shared
			if !test.shared {
				tree = cdiTree(t)
			}
			h := wholeHost(t, tree)
			test.change(t, h)
			drift := h.drift()
			for i, d := range drift {
				line := d.Kind + " " + d.Subject + " " + d.Message
				if i >= len(test.want) || !regexp.MustCompile(test.want[i]).MatchString(line) {
					t.Errorf("unexpected: %s", line)
				}
				if d.Remedy == "" {
					t.Errorf("no remedy: %s", line)
				}
			}
			if len(drift) < len(test.want) {
				t.Errorf("%d differences, want %d", len(drift), len(test.want))
			}
			if test.stays {
				return
			}
			h.run("refresh", "--hook", h.hook)
			if out := h.run("validate"); !strings.HasPrefix(out, "The installed files match this host") {
				t.Errorf("after a refresh: output %q", out)
			}
		})
	}
}

func TestValidatePrintsDrift(t *testing.T) {
	h := newWholeHost(t)
	if out := h.run("validate"); out != "The installed files match this host (3 specifications).\n" {
		t.Errorf("output %q", out)
	}
	h.portDown("mlx5_1")
	out, errOut := h.fails(3, "validate")
	want := "mlx5_1: NIC mlx5_1 no longer has an active port; check its link, or run peerlane cdi refresh for lanes " +
		"without it\n" +
		h.planFile() + ": the lanes of GPUs 4, 5, 6, 7 would now have other NICs or server GPUs; run peerlane cdi " +
		"refresh\n"
	if out != want {
		t.Errorf("output %q, want %q", out, want)
	}
	if errOut != "peerlane: installed specifications differ from this host: 2 differences\n" {
		t.Errorf("standard error: %q", errOut)
	}
}

// validate reports a permission error as an error, not as drift.
func TestValidatePermissionErrorIsNoDrift(t *testing.T) {
	h := newWholeHost(t)
	check(t, os.RemoveAll(filepath.Join(h.tree, "proc/driver")))
	if _, errOut := h.fails(1, "validate"); !strings.Contains(errOut, "NVIDIA's driver is not loaded") {
		t.Errorf("standard error: %q", errOut)
	}
	check(t, os.RemoveAll(filepath.Join(h.tree, "sys/bus")))
	check(t, os.WriteFile(filepath.Join(h.tree, "sys/bus"), nil, 0o644))
	h.fails(1, "validate")
}

func TestValidateOfEmptyHostMatches(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	h.noGPU()
	h.run("remove")
	if out := h.run("validate"); out != "The installed files match this host (0 specifications).\n" {
		t.Errorf("output %q", out)
	}
}

func TestListShowsInjectedEdits(t *testing.T) {
	h := newWholeHost(t)
	clean := func(text string) string {
		return strings.NewReplacer(h.root, "ROOT", h.flags[len(h.flags)-1], "DEVROOT").Replace(text)
	}
	golden(t, "cdi-list.txt", clean(h.run("list")))
	golden(t, "cdi-list-devices.txt", clean(h.run("list", "lane=3", "peerlane.dev/gpu=all")))
	installed, generated := h.run("list", "lane=3"), h.run("list", "--generated", "--hook", h.hook, "lane=3")
	if a, b := strings.ReplaceAll(installed, "  of      "+h.specFile("lane")+"\n", ""), generated; a != b {
		t.Errorf("installed and generated are not the same:\n%s\n%s", a, b)
	}
	all := decode[[]cdi.Device](t, h.args("list", "-o", "json")...)
	// Eight GPUs and "all" in two classes, two NICs and "all", and the lane= device for the GPUs
	// of the container.
	if len(all) != 22 {
		t.Errorf("%d devices", len(all))
	}
	if _, errOut := h.fails(1, "list", "lane=9"); !strings.Contains(errOut,
		"unknown device peerlane.dev/lane=9; installed are gpu=0,") {
		t.Errorf("standard error: %q", errOut)
	}
	if out := peerlane(t, append([]string{"__complete"}, append(h.args("list"), "lane=")...)...); !strings.Contains(out,
		"lane=7\nlane=all\nlane=auto\n") {
		t.Errorf("completion printed %q", out)
	}
}

func TestListReportsIgnoredDevices(t *testing.T) {
	h := newWholeHost(t)
	text, err := os.ReadFile(h.specFile("lane"))
	check(t, err)
	check(t, os.WriteFile(filepath.Join(h.specDir, "old.json"), text, 0o644))
	if out := h.run("list", "lane=3"); strings.Count(out, "also defines it, so engines ignore both") != 2 {
		t.Errorf("cdi list printed\n%s", out)
	}
	check(t, os.Remove(filepath.Join(h.specDir, "old.json")))
	later := filepath.Join(h.root, "var/run/cdi")
	check(t, os.MkdirAll(later, 0o755))
	check(t, os.WriteFile(filepath.Join(later, "peerlane.dev-lane.json"), text, 0o644))
	if out := h.run("list"); strings.Count(out, later+"/peerlane.dev-lane.json hides it") != 10 {
		t.Errorf("cdi list printed\n%s", out)
	}
	check(t, os.WriteFile(h.specFile("gpu"), []byte("{"), 0o644))
	var out, errOut bytes.Buffer
	if code := run(h.args("list"), &out, &errOut); code != 0 ||
		!strings.Contains(errOut.String(), "engines ignore "+h.specFile("gpu")) {
		t.Errorf("exit status %d, standard error %q", code, errOut.String())
	}
	empty := newCDIHost(t)
	if out := empty.run("list"); !strings.HasPrefix(out, "No device is installed in ") {
		t.Errorf("output %q", out)
	}
}
