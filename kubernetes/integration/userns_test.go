//go:build cluster

package integration

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// hideDevices mounts a /dev with few nodes and those of $1: runc gives a container in a user namespace bind
// mounts of nodes in /dev instead of new nodes.
const hideDevices = `set -eu
mkdir /run/dev
mount -t tmpfs -o mode=755 tmpfs /run/dev
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty $1/* /run/dev
mkdir /run/dev/pts /run/dev/shm /run/dev/mqueue
mount --rbind /dev/pts /run/dev/pts
for link in fd:/proc/self/fd ptmx:pts/ptmx stdin:fd/0 stdout:fd/1 stderr:fd/2; do
	ln -s ${link#*:} /run/dev/${link%%:*}
done
mount --rbind /run/dev /dev`

func TestClusterPodsInUserNamespacesExchange(t *testing.T) {
	c := startCluster(t, options{})
	c.mustDo("sh", "-c", hideDevices, "sh", filepath.Join(c.Root, "nodes/dev"))
	t.Cleanup(func() { c.mustDo("sh", "-c", "umount -R -l /dev && umount -R -l /run/dev && rmdir /run/dev") })
	c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	pods := []*corev1.Pod{claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"),
		"gpu-with-staged-lane")}
	for _, p := range pods {
		p.Spec.HostUsers = ptr.To(false)
	}
	c.create(pods...)
	c.untilRunning("a", "b")
	host, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		t.Fatal(err)
	}
	reports := c.exchanged(1, "a", "b")
	for _, r := range reports {
		c.mustBeUnprivileged(r)
		if len(r.GPUs) != 1 || !r.Socket {
			t.Errorf("a pod sees the GPUs %v and the socket %v", r.GPUs, r.Socket)
		}
		if r.Users == host || r.Users == "" {
			t.Errorf("the user namespace is %q; that of the host is %s", r.Users, host)
		}
	}
	if reports[0].Users == reports[1].Users {
		t.Errorf("both pods have the user namespace %s", reports[0].Users)
	}
	c.remove("a", "b")
}
