//go:build cluster

package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/integration/programs"
)

// isolated marks a process in a separate network namespace.
const isolated = "PEERLANE_CLUSTER_ISOLATED"

// isolate makes the network and the file systems of a run: daemons have fixed ports, and write to /run
// and /var/lib/kubelet. The kubelet looks for the address of the node in /etc/hosts. The mounts are in
// the namespace of confine.
const isolate = `set -eu
ip link set lo up
ip link add node0 type veth peer name node1
ip address add 10.213.0.1/24 dev node0
ip link set node0 up
ip link set node1 up
ip route add default via 10.213.0.2 dev node0
mkdir -p /var/lib/kubelet
for dir in /run /var/lib/kubelet; do mount -t tmpfs tmpfs $dir; done
mkdir /run/lock /run/cdi
printf '127.0.0.1 localhost\n10.213.0.1 n1\n10.214.0.2 n2\n' >/run/hosts
mount --bind /run/hosts /etc/hosts
exec "$@"`

// nextVersion is the version of an upgrade's plugin.
const nextVersion = "9.9.9"

// Directories of programs, set by run.
var (
	peerlanes string   // of Peerlane
	kubelet   string   // of peerlane-kubelet
	next      string   // of peerlane-kubelet of the version nextVersion
	installed []string // of Kubernetes and the container engine
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "exchange" {
		fmt.Fprintln(os.Stderr, exchange(os.Args[2], os.Args[3]))
		os.Exit(1)
	}
	if len(os.Args) == 4 && os.Args[1] == "rank" {
		if err := rank(os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) == 2 && os.Args[1] == "job" {
		if err := exchangeOnce(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) == 5 && os.Args[1] == "node" {
		runNode(os.Args[2], os.Args[3], os.Args[4])
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("a cluster needs root; run make test-cluster as root")
	}
	if os.Getenv(isolated) == "" {
		return 1, enter()
	}
	if installed, err = find(); err != nil {
		return 1, err
	}
	var remove func() error
	if peerlanes, remove, err = programs.Directory(programs.Peerlane, programs.Hook, programs.Relay); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	dir, err := os.MkdirTemp("", "peerlane-kubelet-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	kubelet, next = filepath.Join(dir, "peerlane-kubelet"), filepath.Join(dir, "next")
	for path, version := range map[string]string{kubelet: "", next: nextVersion} {
		build := exec.Command("go", "build", "-buildvcs=false", "-ldflags",
			"-s -w -X github.com/peerlane/peerlane/cmd/version.version="+version, "-o", path, "../cmd/peerlane-kubelet")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return 1, fmt.Errorf("build peerlane-kubelet: %w: %s", err, out)
		}
	}
	path := append(append([]string{}, installed...), "/usr/sbin", "/usr/bin", "/sbin", "/bin")
	if err := os.Setenv("PATH", strings.Join(path, ":")); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// enter executes this program again in a network namespace of its own. The mount namespace is that of
// process 1, as the anchor of Peerlane demands.
func enter() error {
	if init, err := os.Readlink("/proc/1/exe"); err != nil || filepath.Base(init) != "confine" {
		return fmt.Errorf("process 1 is %s, %v; run make test-cluster, which runs the tests in namespaces of their own",
			init, err)
	}
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	arguments := append([]string{"unshare", "--net", "sh", "-c", isolate, "sh", self}, os.Args[1:]...)
	return syscall.Exec(unshare, arguments, append(os.Environ(), isolated+"=1"))
}
