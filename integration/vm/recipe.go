package vm

import (
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Kinds of images.
const (
	Small = "small" // an init of our own: up in seconds
	Full  = "full"  // systemd as on an operator's host
)

// suite is Debian's release in the guest. Test binaries are linked with the
// host's glibc, so the host's must not be newer.
const suite = "bookworm"

//go:embed module
var moduleSource embed.FS

// recipe is the input of images: a change gives new images.
//
//go:embed recipe.go image.go
var recipe embed.FS

// packages of the root file systems.
var packages = map[string][]string{
	Small: {
		"ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "perftest", "rdma-core", "iproute2", "ethtool", "pciutils",
		"hwloc-nox", "kmod", "iputils-ping", "procps", "busybox-static", "runc", "crun", "criu",
	},
	Full: {
		"systemd", "systemd-sysv", "systemd-timesyncd-", "udev", "dbus", "dbus-user-session", "libpam-systemd", "apparmor",
		"podman", "uidmap", "slirp4netns", "fuse-overlayfs", "netavark", "aardvark-dns", "catatonit", "ca-certificates-",
		"iptables", "nftables",
	},
}

// modules lists the guests' modules beyond those of the disk. Dependencies are added.
var modules = map[string][]string{
	Small: {
		"rdma_rxe", "siw", "tcp_diag", "pcitree", "ib_uverbs", "rdma_ucm", "rdma_cm", "ib_umad", "crc32_generic",
		"crc32-pclmul",
		"overlay", "veth", "bridge", "dummy", "sch_netem", "sch_tbf", "nvme", "vfio-pci", "tun",
	},
	Full: {
		"br_netfilter", "nf_tables", "nft_compat", "nft_chain_nat", "nft_fib_inet", "nft_ct", "nft_masq", "nft_reject_inet",
		"nf_conntrack",
		"xt_conntrack", "xt_MASQUERADE", "xt_comment", "xt_addrtype", "xt_mark", "xt_multiport", "xt_tcpudp", "ip_tables",
		"iptable_nat", "iptable_filter", "macvlan", "ipvlan", "vxlan",
		"fuse", "autofs4", "configfs", "efivarfs", "ip6_tables", "ip6table_nat", "ip6table_filter", "x_tables",
	},
}

// bootModules are in the initial RAM file system, and loaded there.
var bootModules = []string{"virtio_pci", "virtio_blk", "ext4", "9pnet_virtio", "9p", "virtio_console", "virtio_net",
	"autofs4"}

// unwanted units cost seconds of emulated time and have no use in a test machine; systemd-binfmt
// fails, because this kernel lacks the support that python3 (of criu) configures.
var unwanted = []string{
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
	"fstrim.timer", "getty.target",
	"systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "systemd-random-seed.service",
	"podman-auto-update.timer",
	"podman-auto-update.service", "podman-restart.service", "systemd-pcrphase.service", "systemd-pcrphase-sysinit.service",
	"systemd-journal-flush.service",
	"podman.service", "podman.socket", "ldconfig.service", "systemd-binfmt.service", "systemd-network-generator.service",
	"modprobe@efi_pstore.service", "modprobe@drm.service",
}

// customize has the commands that run on a root file system after its packages are installed: hooks
// of mmdebstrap, with the root in $1.
var customize = map[string][]string{
	Small: {
		`mkdir -p "$1/share" "$1/source" "$1/run"`,
		`echo peerlane-vm > "$1/etc/hostname"`,
		`printf '127.0.0.1 localhost peerlane-vm\n' > "$1/etc/hosts"`,
		// Modules that rdma-core would load at boot.
		`rm -rf "$1/etc/rdma/modules"`,
	},
	Full: {
		`chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 --user-group trainer`,
		`mkdir -p "$1/var/lib/systemd/linger" && touch "$1/var/lib/systemd/linger/trainer"`,
		`ln -sf /dev/null "$1/etc/systemd/system/` + strings.Join(unwanted,
			`" && ln -sf /dev/null "$1/etc/systemd/system/`) + `"`,
		`chroot "$1" systemctl set-default multi-user.target`,
		`echo uninitialized > "$1/etc/machine-id"`,
	},
}

// diskMiB are the sizes of the root file systems, mostly free. The file is sparse.
var diskMiB = map[string]int{Small: 4096, Full: 8192}

// inherited returns the small image's entries, plus those of the full image.
func inherited(kind string, table map[string][]string) []string {
	list := slices.Clone(table[Small])
	if kind == Full {
		list = append(list, table[Full]...)
	}
	return list
}

// kernel is a Debian kernel: the release, the version of its packages, and the path of its source.
type kernel struct{ release, version, tarball string }

// findKernel returns the kernel whose headers and source are installed on this host in the same
// version: modules of another version would load and misbehave.
func findKernel() (kernel, error) {
	tarballs, err := filepath.Glob("/usr/src/linux-source-6.*.tar.xz")
	if err != nil {
		return kernel{}, err
	}
	var found kernel
	for _, tarball := range tarballs {
		version, known := packageVersion(strings.TrimSuffix(filepath.Base(tarball), ".tar.xz"))
		if !known {
			continue
		}
		// Debian's other flavours, cloud and rt, lack features that the guests need.
		headers, err := filepath.Glob("/usr/src/linux-headers-6.*+deb12-amd64")
		if err != nil {
			return kernel{}, err
		}
		for _, dir := range headers {
			of, known := packageVersion(filepath.Base(dir))
			if known && of == version && (found.version == "" ||
				exec.Command("dpkg", "--compare-versions", version, "gt", found.version).Run() == nil) {
				found = kernel{strings.TrimPrefix(filepath.Base(dir), "linux-headers-"), version, tarball}
			}
		}
	}
	if found.release == "" {
		return found, errors.New(
			"no linux-headers-6…+deb12-amd64 with its linux-source in the same version in /usr/src; install both with " +
				"integration/prerequisites vm")
	}
	return found, nil
}

// packageVersion is the version of an installed package of Debian's.
func packageVersion(name string) (version string, known bool) {
	out, err := exec.Command("dpkg-query", "-W", "-f", "${Version}", name).Output()
	return string(out), err == nil && len(out) > 0
}

// key returns a name for a kernel with modules, by their inputs.
func (k kernel) key() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, k.release, k.version)
	for _, source := range []embed.FS{recipe, moduleSource} {
		err := fs.WalkDir(source, ".", func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := source.ReadFile(path)
			fmt.Fprintln(h, path, len(text))
			h.Write(text)
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// rootKey names a root file system, which has a kernel's modules.
func rootKey(kind, kernelKey string) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(kind+" "+kernelKey)))[:16]
}
