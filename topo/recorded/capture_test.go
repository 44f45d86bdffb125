package recorded

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// captured unpacks an archive, calls change with the directory, and captures the directory.
func captured(t *testing.T, text string, change func(dir string)) (string, error) {
	t.Helper()
	dir := t.TempDir()
	if err := unpack(dir, text); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(dir)
	}
	return Capture(filepath.Join(dir, "sys"), filepath.Join(dir, "proc"))
}

func TestCaptureOfTheRecordedHostIsItsArchive(t *testing.T) {
	got, err := captured(t, host, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got != host {
		t.Error(cmp.Diff(strings.Split(host, "\n"), strings.Split(got, "\n")))
	}
}

// taken has the files that Capture reads, with every feature of a function: bytes, several
// ports, a subfunction's RDMA device, a second root complex behind a function.
const taken = header + `
proc/
    cpuinfo:
        | processor	: 0
        | vendor_id	: AuthenticAMD
        |
        | processor	: 1
        | vendor_id	: AuthenticAMD
        |

proc/driver/nvidia/
    version:
        | NVRM version: NVIDIA
        | GCC version:

proc/driver/nvidia/gpus/10000:01:00.0/
    information:
        | Model: 	 NVIDIA H200
        | GPU UUID: 	 GPU-????????

sys/bus/pci/devices/
    0000:10:01.0 -> ../../../devices/pci0000:10/0000:10:01.0
    0000:11:00.0 -> ../../../devices/pci0000:10/0000:10:01.0/0000:11:00.0
    0000:20:0e.0 -> ../../../devices/pci0000:20/0000:20:0e.0
    10000:01:00.0 -> ../../../devices/pci0000:20/0000:20:0e.0/pci10000:01/10000:01:00.0

sys/bus/pci/drivers/mlx5_core/
    0000:11:00.0 -> ../../../../devices/pci0000:10/0000:10:01.0/0000:11:00.0

sys/bus/pci/drivers/pcieport/

sys/class/infiniband/
    mlx5_0 -> ../../devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband/mlx5_0
    mlx5_4 -> ../../devices/pci0000:10/0000:10:01.0/0000:11:00.0/mlx5_core.sf.4/infiniband/mlx5_4

sys/class/infiniband_verbs/
    abi_version = 6
    uverbs0 -> ../../devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband_verbs/uverbs0

sys/devices/pci0000:10/0000:10:01.0/
    class = 0x060400
    driver -> ../../../bus/pci/drivers/pcieport

sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/
    class = 0x020700
    current_link_speed = 16.0 GT/s PCIe
    current_link_width = 8
    device = 0x1021
    local_cpulist = 0-1
    max_link_speed = 32.0 GT/s PCIe
    max_link_width = 16
    numa_node = 0
    revision = 0x00
    subsystem_device = 0x0041
    subsystem_vendor = 0x15b3
    vendor = 0x15b3
    driver -> ../../../../bus/pci/drivers/mlx5_core
    resource:
        | 0x0000020000000000 0x0000020001ffffff 0x000000000014220c
        | 0x0000000000000000 0x0000000000000000 0x0000000000000000
    config:
        x 0000 b3 15 21 10 06 04 10 00 00 00 07 02 10 00 00 00
        x 0100 0d 00 01 00 00 00 5f 00 1d 00 00 00 00 00 00 00
        x 1000

sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband/mlx5_0/
    node_guid = a088:c203:00a1:40e0
    node_type = 1: CA
    device -> ../../../0000:11:00.0

sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband/mlx5_0/ports/1/
    link_layer = InfiniBand
    phys_state = 5: LinkUp
    rate = 400 Gb/sec (4X NDR)
    state = 4: ACTIVE

sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband/mlx5_0/ports/2/
    state = 1: DOWN

sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband_verbs/uverbs0/
    dev = 231:192
    ibdev = mlx5_0
    device -> ../../../0000:11:00.0

sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/mlx5_core.sf.4/infiniband/mlx5_4/
    device -> ../../../mlx5_core.sf.4

sys/devices/pci0000:20/0000:20:0e.0/
    vendor = 0x8086

sys/devices/pci0000:20/0000:20:0e.0/pci10000:01/10000:01:00.0/
    class = 0x030200
    vendor = 0x10de

sys/devices/system/node/node0/
    cpulist = 0-1
    distance = 10 21
`

// left has files beside those that Capture reads. Capture skips them.
const left = `
proc/
    meminfo = MemTotal: 1 kB
proc/driver/nvidia/
    params = EnableMSI: 1
proc/driver/nvidia/gpus/10000:01:00.0/
    power = Runtime D3 status
proc/driver/nvidia/gpus/unknown/
    information = Model:
sys/bus/pci/devices/
    0000:30:00.0 -> ../../../devices/pci0000:30/0000:30:00.0
sys/bus/pci/drivers/mlx5_core/
    module -> ../../../../module/mlx5_core
    bind:
sys/bus/pci/drivers/nvme/
    0000:30:00.0 -> ../../../../devices/pci0000:30/0000:30:00.0
sys/class/infiniband/
    rxe0 -> ../../devices/virtual/infiniband/rxe0
sys/devices/pci0000:10/
    uevent:
sys/devices/pci0000:10/0000:10:01.0/
    irq = 24
    subsystem -> ../../../bus/pci
sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/net/ib0/
    address = 00:00
sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband/mlx5_0/ports/1/gids/
    0 = fe80::
sys/devices/pci0000:30/0000:30:00.0/
    class = 0x010802
    vendor = 0x144d
    driver -> ../../../bus/pci/drivers/nvme
sys/devices/virtual/infiniband/rxe0/
    node_type = 1: CA
sys/devices/system/node/
    online = 0
sys/devices/system/node/node0/
    meminfo = Node 0 MemTotal: 1 kB
sys/module/mlx5_core/
`

func TestCaptureTakesFilesOfHeader(t *testing.T) {
	got, err := captured(t, taken+left, func(dir string) {
		// Capture also skips lines that change continuously.
		cpuinfo := "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu MHz\t\t: 2400.1\nflags\t\t: fpu vme\npower " +
			"management:\n\n" +
			"processor\t: 1\nvendor_id\t: AuthenticAMD\ncpu MHz\t\t: 3100.9\n\n\nbogus : 1\n\n"
		if err := os.WriteFile(filepath.Join(dir, "proc", "cpuinfo"), []byte(cpuinfo), 0o644); err != nil {
			t.Fatal(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if got != taken {
		t.Error(cmp.Diff(strings.Split(taken, "\n"), strings.Split(got, "\n")))
	}
}

func TestCaptureFailureNamesCause(t *testing.T) {
	const gpu = "sys/devices/pci0000:10/0000:10:01.0/"
	minimal := "sys/bus/pci/devices/\n    0000:10:01.0 -> ../../../devices/pci0000:10/0000:10:01.0\n" +
		gpu + "\n    vendor = 0x10de\n"
	for name, c := range map[string]struct {
		text   string
		change func(t *testing.T, dir string)
		want   []string
	}{
		"that there is nothing to record": {
			text: strings.Replace(minimal, "0x10de", "0x8086", 1) + "proc/\n",
			want: []string{"no PCI function of NVIDIA", "nothing to record"},
		},
		"what it cannot read": {
			text: minimal + gpu + "class/\n",
			want: []string{gpu + "class", "is a directory"},
		},
		"that root sees more": {
			text: minimal,
			change: func(t *testing.T, dir string) {
				// A sysfs attribute returns fewer bytes than its size, like config for an
				// ordinary user.
				if err := os.Symlink("/sys/devices/system/cpu/online", filepath.Join(dir, gpu, "config")); err != nil {
					t.Fatal(err)
				}
			},
			want: []string{gpu + "config", "of 4096 bytes", "run this as root"},
		},
		"that a link leads out": {
			text: minimal,
			change: func(t *testing.T, dir string) {
				if err := os.Symlink("/bus/pci/drivers/nvidia", filepath.Join(dir, gpu, "driver")); err != nil {
					t.Fatal(err)
				}
			},
			want: []string{"driver", "/bus/pci/drivers/nvidia", "leads out of"},
		},
		"that a name cannot be written": {
			text: minimal,
			change: func(t *testing.T, dir string) {
				if err := os.MkdirAll(filepath.Join(dir, "sys/class/infiniband"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("../../devices/pci0000:10/0000:10:01.0/infiniband/a",
					filepath.Join(dir, "sys/class/infiniband", "a = b")); err != nil {
					t.Fatal(err)
				}
			},
			want: []string{"a = b", "not a valid name"},
		},
		"that a file is no text and long": {
			text: minimal,
			change: func(t *testing.T, dir string) {
				if err := os.WriteFile(filepath.Join(dir, gpu, "config"), make([]byte, maxBytes+1), 0o644); err != nil {
					t.Fatal(err)
				}
			},
			want: []string{"config", "4097 bytes", "more than 4096"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var dir string
			text, err := captured(t, c.text, func(d string) {
				if dir = d; c.change != nil {
					c.change(t, d)
				}
			})
			if err == nil {
				t.Fatalf("no error, but\n%s", text)
			}
			for _, want := range append(c.want, "capture the host", filepath.Join(dir, "sys")) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v\ndoes not say %q", err, want)
				}
			}
		})
	}
}

func TestCaptureWithoutProcHasNoneOfIt(t *testing.T) {
	text := header + "\nsys/bus/pci/devices/\n    0000:10:01.0 -> ../../../devices/pci0000:10/0000:10:01.0\n" +
		"\nsys/devices/pci0000:10/0000:10:01.0/\n    vendor = 0x10de\n"
	got, err := captured(t, text, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(text, got); diff != "" {
		t.Error(diff)
	}
}
