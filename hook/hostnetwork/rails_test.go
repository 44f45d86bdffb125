package hostnetwork

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	addresses "github.com/peerlane/peerlane/relay/network/address"
)

// madeSysfs makes a fake /sys from lines: "link NAME TO" (a symbolic link), "file NAME TEXT" and
// "dir NAME".
func madeSysfs(t *testing.T, lines string) string {
	t.Helper()
	root := t.TempDir()
	for _, line := range strings.Split(strings.TrimSpace(lines), "\n") {
		words := strings.Fields(line)
		path := filepath.Join(root, words[1])
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			switch words[0] {
			case "link":
				to := filepath.Join(root, words[2])
				if err = os.MkdirAll(to, 0o755); err == nil {
					err = os.Symlink(to, path)
				}
			case "file":
				err = os.WriteFile(path, []byte(words[2]+"\n"), 0o644)
			case "dir":
				err = os.MkdirAll(path, 0o755)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// Fake /sys of hosts.
const (
	// Two NICs with RDMA, of which the first device has the last function, a bond with RDMA, a
	// VLAN on the first NIC, and a slow card with RDMA.
	sysRDMA = `
link class/net/ens2/device devices/pci0000:00/0000:00:02.0/0000:9c:00.0
link class/net/ens1/device devices/pci0000:00/0000:00:01.0/0000:1a:00.0
link class/net/eth0/device devices/pci0000:00/0000:00:03.0/virtio2
link class/net/slow/device devices/pci0000:00/0000:00:04.0
link class/net/bond0/lower_ens8 class/net/ens8
link class/net/ens8/device devices/pci0000:00/0000:00:08.0
link class/net/vlan7/lower_ens2 class/net/ens2
file class/net/ens1/speed 400000
file class/net/ens2/speed 400000
file class/net/bond0/speed 200000
file class/net/slow/speed 25000
file class/net/eth0/speed -1
dir class/infiniband/mlx5_0/device/net/ens2
dir class/infiniband/mlx5_1/device/net/ens1
dir class/infiniband/mlx5_2/device/net/slow
dir class/infiniband/mlx5_10/device/net/ens8
file class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0 ens2
file class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/4 vlan7
file class/infiniband/mlx5_10/ports/1/gid_attrs/ndevs/0 bond0`
	sysPlain = `
link class/net/eth1/device devices/pci0000:00/0000:00:04.0/virtio3
link class/net/eth0/device devices/pci0000:00/0000:00:03.0/virtio2
link class/net/eth2/device devices/pci0000:00/0000:00:05.0
link class/net/eth0.5/lower_eth0 class/net/eth0
dir class/net/br-1
file class/net/eth2/speed 1000
file class/net/eth1/speed 100000
file class/net/eth0/speed -1
file class/net/br-1/speed 10000
link class/net/soft0/device devices/virtual/soft
link class/net/soft1/device devices/virtual/soft
link class/net/soft1/lower_eth1 class/net/eth1
link class/net/v8/lower_v7 class/net/v7
link class/net/v7/lower_v6 class/net/v6
link class/net/v6/lower_v5 class/net/v5
link class/net/v5/lower_v4 class/net/v4
link class/net/v4/lower_v3 class/net/v3
link class/net/v3/lower_v2 class/net/v2
link class/net/v2/lower_v1 class/net/v1
link class/net/v1/lower_eth1 class/net/eth1
link class/net/v9/lower_v8 class/net/v8`
	// Two RDMA devices of a bond.
	sysBond = `
file class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0 bond0
file class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0 bond0
file class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/31 last
file class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/32 beyond`
	sysNone = "dir class/net"
)

// Rails follow the configuration, the plan or the hardware, not the order of the kernel's list.
func TestSetRailsNumbersByHardware(t *testing.T) {
	for name, c := range map[string]struct {
		sys, interfaces string
		named           []string
		planned         map[string]int
		listed          bool
		// want lists interface=rail, with the device.
		want string
	}{
		"RDMA devices, as a plan has them": {sysRDMA, "eth0 ens1 ens2", nil, nil, false,
			"eth0=-1 ens1=1 mlx5_1 ens2=0 mlx5_0"},
		"a bond, a VLAN, and one that is slow": {sysRDMA, "bond0 slow vlan7 ens1", nil, nil, false,
			"bond0=3 mlx5_10 slow=-1 mlx5_2 vlan7=0 mlx5_0 ens1=1 mlx5_1"},
		"one of many":        {sysRDMA, "ens1", nil, nil, true, "ens1=1 mlx5_1"},
		"the slow one alone": {sysRDMA, "slow eth0", nil, nil, true, "slow=2 mlx5_2 eth0=-1"},
		"as planned": {sysRDMA, "ens1 ens2", nil, map[string]int{"mlx5_1": 7}, false,
			"ens1=7 mlx5_1 ens2=0 mlx5_0"},
		"as named": {sysRDMA, "ens1 ens2 eth0", []string{"eth0", "other", "mlx5_0"},
			map[string]int{"mlx5_0": 7}, false, "ens1=-1 mlx5_1 ens2=2 mlx5_0 eth0=0"},
		"named, and not there":            {sysRDMA, "ens1", []string{"ens9"}, nil, false, "error"},
		"PCI functions":                   {sysPlain, "eth1 eth0 br-1", nil, nil, false, "eth1=1 eth0=0 br-1=-1"},
		"one function under another name": {sysPlain, "eth0.5 eth0 eth1", nil, nil, false, "eth0.5=0 eth0=0 eth1=1"},
		"a device without a function":     {sysPlain, "eth1 soft0 soft1", nil, nil, false, "eth1=0 soft0=-1 soft1=0"},
		"the limit of stacked interfaces": {sysPlain, "eth1 v8 v9", nil, nil, false, "eth1=0 v8=0 v9=-1"},
		"a bond of two devices": {sysBond, "bond0 last beyond", nil, nil, false,
			"bond0=0 mlx5_0 last=1 mlx5_1 beyond=-1"},
		"a slow function":                      {sysPlain, "eth0 eth1 eth2", nil, nil, false, "eth0=0 eth1=1 eth2=-1"},
		"nothing is known, and they are named": {sysNone, "veth1 veth0 veth1", nil, nil, true, "veth1=0 veth0=1 veth1=0"},
		"nothing is known":                     {sysNone, "veth1 veth0", nil, nil, false, "veth1=0 veth0=0"},
	} {
		names := strings.Fields(c.interfaces)
		var all []addresses.Chosen
		for i, n := range names {
			all = append(all, addresses.Chosen{Interface: n, Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})})
		}
		err := setRails(all, readAdapters(madeSysfs(t, c.sys), names), c.named, c.planned, c.listed)
		var got []string
		for _, a := range all {
			got = append(got, fmt.Sprintf("%s=%d", a.Interface, a.Rail))
			if a.Device != "" {
				got = append(got, a.Device)
			}
		}
		if text := strings.Join(got, " "); (err != nil) != (c.want == "error") || err == nil && text != c.want {
			t.Errorf("%s: %s, %v; not %s", name, text, err, c.want)
		}
	}
}

func TestSetRailsReadsHardwareAndOrder(t *testing.T) {
	at := netip.AddrFrom4([4]byte{10, 0, 0, 1})
	for _, c := range []struct {
		name, sys, listed string
		want              []int
	}{
		{"hardware", sysRDMA, "", []int{1, 0}},
		{"a list", sysNone, "ens1,ens2", []int{0, 1}},
		{"no list", sysNone, "", []int{0, 0}},
	} {
		chosen := []addresses.Chosen{{Interface: "ens1", Address: at}, {Interface: "ens2", Address: at}}
		err := SetRails(madeSysfs(t, c.sys), chosen, config.Network{Interfaces: c.listed}, nil)
		if got := []int{chosen[0].Rail, chosen[1].Rail}; err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: rails %v, %v; want %v", c.name, got, err, c.want)
		}
	}
}

func TestCompareNaturalOrdersNumbers(t *testing.T) {
	names := []string{"mlx5_10", "mlx5_9", "bnxt_re0", "mlx5_bond_0", "7", "mlx5_09"}
	slices.SortFunc(names, compareNatural)
	if got := strings.Join(names, " "); got != "7 bnxt_re0 mlx5_09 mlx5_9 mlx5_10 mlx5_bond_0" {
		t.Error(got)
	}
}
