//go:build cluster

package integration

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/image"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

const (
	// nodeName is the node on which the control plane runs.
	nodeName = "n1"
	// kubeletDir is the kubelet's directory, a file system of this run only. The directory of
	// device plugins does not depend on --root-dir.
	kubeletDir = "/var/lib/kubelet"
	imageName  = "localhost/peerlane-test:1"
	apiServer  = "https://10.213.0.1:16443"
)

// options are the differences between clusters.
type options struct {
	// controlPlane are flags of API server, scheduler and controller manager.
	controlPlane []string
	apiServer    []string
	// accounts gives pods tokens of service accounts, and runs DaemonSets.
	accounts bool
	// twoNodes adds a second node, and connects the relays of both nodes by TCP.
	twoNodes bool
	// tenants is the annotation with the tenant of a container; empty without tenants.
	tenants string
	// bare starts the control plane alone, without controllers.
	bare bool
	// plugins installs the plugins of NCCL and NIXL, and harnesses.
	plugins bool
}

// cluster is a node with the simulated GPUs of a recorded host, and on the node nodeName the control plane.
type cluster struct {
	*testing.T
	*testbed.Host
	options     options
	node        string
	dir         string // of the cluster's programs
	reports     string
	client      kubernetes.Interface
	daemons     map[string]*daemon
	pluginFiles []string // files with libraries that the image needs
}

// configureRelays configures the relays of a node.
func (c *cluster) configureRelays(to *config.Config) {
	to.Relay.Route, to.Relay.Slots, to.Relay.SlotSize = launch.RouteAuto, 4, 1<<20
	to.Network.TenantAnnotation = c.options.tenants
	if c.options.twoNodes {
		to.Relay.Transport, to.Network.Interfaces = launch.TransportTCP, "="+cables[c.node]
	}
}

// startCluster starts a cluster without drivers until the end of the test.
func startCluster(t *testing.T, o options) *cluster {
	t.Helper()
	begun := time.Now()
	// Short, because paths of sockets have a limit.
	root, err := os.MkdirTemp("", "pl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	if o.twoNodes {
		run := func(command ...string) {
			if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v: %s", command, err, out)
			}
		}
		run("sh", "-c", connectNodes)
		t.Cleanup(func() { run("ip", "netns", "del", secondNode) })
	}
	c := newNode(t, o, root, nodeName)
	c.configure()
	c.startControlPlane()
	if !o.bare {
		c.startEngine()
		c.startKubelet()
	}
	t.Logf("the cluster is ready after %v", time.Since(begun).Round(100*time.Millisecond))
	return c
}

// newNode returns a node without programs, whose files are in root.
func newNode(t *testing.T, o options, root, name string) *cluster {
	t.Helper()
	if err := os.Chmod(root, 0o711); err != nil {
		t.Fatal(err)
	}
	h, err := testbed.New(root, peerlanes, testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{T: t, Host: h, options: o, node: name, dir: filepath.Join(root, "k"), reports: filepath.Join(root,
		"reports"), daemons: map[string]*daemon{}}
	testbed.MountAnchor(t, h.Layout)
	if o.plugins {
		c.installPlugins()
	}
	if err := h.Configure(c.configureRelays); err != nil {
		t.Fatal(err)
	}
	stop, err := h.StartNICs(context.Background(), h.Plan.Lanes...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	for dir, mode := range map[string]os.FileMode{c.dir: 0o755, c.reports: 0o777 | os.ModeSticky, c.in("pki"): 0o700,
		c.in("cni"): 0o755} {
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(dir, mode)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(c.shutDown)
	return c
}

func (c *cluster) in(name string) string { return filepath.Join(c.dir, name) }

// configure writes the files of the cluster's programs.
func (c *cluster) configure() {
	c.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		c.Fatal(err)
	}
	certs := filepath.Join("certs.d", registry)
	if err := os.MkdirAll(c.in(certs), 0o755); err != nil {
		c.Fatal(err)
	}
	files := map[string]string{
		filepath.Join(certs, "hosts.toml"): "[host.\"https://" + registry + "\"]\nskip_verify = true\n",
		"pki/sa.key": string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY",
			Bytes: x509.MarshalPKCS1PrivateKey(key)})),
		"pki/tokens.csv": "admintoken,admin,admin,\"system:masters\"\n",
		"kubeconfig": `apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: admin}}]
clusters: [{name: test, cluster: {server: "` + apiServer + `", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: admintoken}}]
`,
		// Without a CNI configuration the node is not ready. Each pod has a network namespace with
		// a loopback interface.
		"cni/peerlane-test": `#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}';;
ADD) echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'$CNI_NETNS'"}],"ips":[{"interface":0,"address":"10.88.0.2/24"}]}';;
esac
`,
		"cni/test.conflist": `{"cniVersion":"1.0.0","name":"test","plugins":[{"type":"peerlane-test"}]}`,
		"containerd.toml": c.expand(`version = 3
root = "$DIR/containerd-root"
state = "$DIR/containerd"
[grpc]
address = "$DIR/containerd.sock"
[ttrpc]
address = "$DIR/containerd.sock.ttrpc"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
cdi_spec_dirs = ["$CDI"]
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["$DIR/cni"]
conf_dir = "$DIR/cni"
use_internal_loopback = true
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "$IMAGE"
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = "$DIR/certs.d"
[plugins.'io.containerd.nri.v1.nri']
disable = true
`),
		// The machine of the tests has cgroup v1, and allows no negative oom_score_adj.
		"kubelet.yaml": c.expand(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
cgroupsPerQOS: false
enforceNodeAllocatable: []
makeIPTablesUtilChains: false
address: 127.0.0.1
port: 10260
readOnlyPort: 0
healthzPort: 0
resolvConf: ""
podLogsDir: $DIR/pods
syncFrequency: 10s
containerRuntimeEndpoint: unix://$DIR/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {nodefs.available: "1%", imagefs.available: "1%", memory.available: "50Mi"}
`),
	}
	for name, text := range files {
		if err := os.WriteFile(c.in(name), []byte(text), 0o700); err != nil {
			c.Fatal(err)
		}
	}
}

func (c *cluster) expand(text string) string {
	return strings.NewReplacer("$DIR", c.dir, "$CDI", c.CDIDir(), "$IMAGE", imageName).Replace(text)
}

// daemon starts a program of the cluster. The log has the same name.
func (c *cluster) daemon(name string, ready func() error, command ...string) *daemon {
	c.Helper()
	d := &daemon{name: name, command: command, ready: ready, log: c.in(name + ".log")}
	c.daemons[name] = d
	d.start(c.T)
	return d
}

func (c *cluster) startControlPlane() {
	c.Helper()
	const etcd = "http://127.0.0.1:23790"
	c.daemon("etcd", nil, "server", "--data-dir", c.in("etcd"), "--listen-client-urls", etcd,
		"--advertise-client-urls", etcd,
		"--listen-peer-urls", "http://127.0.0.1:23800", "--unsafe-no-fsync", "--log-level", "warn")
	c.connect()
	key := c.in("pki/sa.key")
	admission, controllers := []string{"--disable-admission-plugins=ServiceAccount"}, ""
	if c.options.accounts {
		admission = nil
		controllers = ",serviceaccount-controller,root-ca-certificate-publisher-controller,daemonset-controller," +
			"job-controller"
	}
	c.daemon("kube-apiserver", func() error {
		return c.client.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(c.Context()).Error()
	}, append([]string{
		"kube-apiserver", "--etcd-servers=" + etcd, "--bind-address=10.213.0.1", "--advertise-address=10.213.0.1",
		"--secure-port=16443", "--cert-dir=" + c.in("pki"), "--service-account-key-file=" + key,
		"--service-account-signing-key-file=" + key, "--service-account-issuer=https://test",
		"--token-auth-file=" + c.in("pki/tokens.csv"), "--authorization-mode=RBAC", "--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/16",
	}, slices.Concat(admission, c.options.apiServer, c.options.controlPlane)...)...)
	common := append([]string{"--kubeconfig=" + c.in("kubeconfig"), "--leader-elect=false", "--secure-port=0"},
		c.options.controlPlane...)
	c.daemon("kube-scheduler", nil, append([]string{"kube-scheduler"}, common...)...)
	if c.options.bare {
		return
	}
	c.daemon("kube-controller-manager", nil, append([]string{"kube-controller-manager",
		"--controllers=resourceclaim-controller,device-taint-eviction-controller,node-lifecycle-controller," +
			"taint-eviction-controller," +
			"garbage-collector-controller,namespace-controller,pod-garbage-collector-controller" + controllers,
		"--root-ca-file=" + c.in("pki/apiserver.crt"),
		"--kube-api-qps=200", "--kube-api-burst=400"}, common...)...)
}

// connect makes the client of the API server.
func (c *cluster) connect() {
	c.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.in("kubeconfig"))
	if err != nil {
		c.Fatal(err)
	}
	config.QPS, config.Burst = 100, 200
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return patient{next} })
	if c.client, err = kubernetes.NewForConfig(config); err != nil {
		c.Fatal(err)
	}
}

// startEngine starts containerd with the image of the tests.
func (c *cluster) startEngine() {
	c.Helper()
	i, err := image.Make(c.in("image"), imageName, slices.Concat(c.Libraries, c.pluginFiles)...)
	if err != nil {
		c.Fatal(err)
	}
	address := c.in("containerd.sock")
	c.daemon("containerd", func() error {
		return exec.Command("ctr", "--address", address, "version").Run()
	}, "containerd", "--config", c.in("containerd.toml"))
	c.mustDo("ctr", "--address", address, "--namespace", "k8s.io", "images", "import", i.OCI)
}

// startKubelet starts the kubelet and waits until the node is ready.
func (c *cluster) startKubelet() {
	c.Helper()
	c.daemon("kubelet", func() error {
		node, err := c.client.CoreV1().Nodes().Get(c.Context(), c.node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue &&
				len(node.Spec.Taints) == 0 {
				return nil
			}
		}
		return fmt.Errorf("node %s: conditions %v, taints %v", c.node, node.Status.Conditions, node.Spec.Taints)
	}, "kubelet", "--config="+c.in("kubelet.yaml"), "--kubeconfig="+c.in("kubeconfig"), "--root-dir="+kubeletDir,
		"--cert-dir="+c.in("pki/kubelet"), "--hostname-override="+c.node, "--v=2")
}

// startPlugin starts peerlane-kubelet.
func (c *cluster) startPlugin() {
	c.Helper()
	c.daemon("peerlane-kubelet", nil, kubelet, "--kubeconfig", c.in("kubeconfig"), "--node-name", c.node,
		"--root", c.Layout.Root)
}

// patient repeats requests that a loaded API server did not complete in time. The server may have
// executed the request.
type patient struct{ http.RoundTripper }

func (p patient) RoundTrip(r *http.Request) (*http.Response, error) {
	for end := testutil.BeginFor(patience); ; time.Sleep(time.Second) {
		answer, err := p.RoundTripper.RoundTrip(r)
		if err != nil || answer.StatusCode != http.StatusGatewayTimeout || end.Over() || r.Body != nil && r.GetBody == nil {
			return answer, err
		}
		if err := answer.Body.Close(); err != nil {
			return nil, err
		}
		if r.Body != nil {
			if r.Body, err = r.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// mustDo runs a command and returns the output. mustDo repeats a command that a loaded API server
// did not answer in time.
func (c *cluster) mustDo(command ...string) string {
	c.Helper()
	for end := testutil.BeginFor(patience); ; time.Sleep(time.Second) {
		var stderr bytes.Buffer
		x := exec.Command(command[0], command[1:]...)
		x.Env = append(os.Environ(), "KUBECONFIG="+c.in("kubeconfig"))
		x.Stderr = &stderr
		out, err := x.Output()
		if err == nil {
			return string(out)
		}
		if command[0] != "kubectl" || end.Over() || !strings.Contains(strings.ToLower(stderr.String()), "timeout") {
			c.Fatalf("%s: %v: %s%s", strings.Join(command, " "), err, out, stderr.String())
		}
	}
}

// shutDown deletes the pods, and removes the programs, containers and mounts of the cluster.
func (c *cluster) shutDown() {
	c.Helper()
	if c.Failed() {
		for _, name := range slices.Sorted(maps.Keys(c.daemons)) {
			c.Logf("%s said last: %s", name, tail(c.daemons[name].log))
		}
	}
	// Stop each daemon before the daemons that it needs.
	for _, name := range []string{"kubelet", "peerlane-kubelet", "exporter"} {
		if d := c.daemons[name]; d != nil {
			d.stop(c.T)
		}
	}
	c.endContainers()
	for _, name := range []string{"containerd", "kube-controller-manager", "kube-scheduler", "kube-apiserver", "etcd",
		"registry"} {
		if d := c.daemons[name]; d != nil {
			d.stop(c.T)
		}
	}
	c.endShims()
	c.unmount()
	entries, err := os.ReadDir(kubeletDir)
	if err != nil {
		c.Error(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(kubeletDir, e.Name())); err != nil {
			c.Error(err)
		}
	}
}

// endContainers ends the containers, while containerd runs.
func (c *cluster) endContainers() {
	c.Helper()
	if d := c.daemons["containerd"]; d == nil || d.process == nil {
		return
	}
	address := c.in("containerd.sock")
	tasks, err := exec.Command("ctr", "--address", address, "--namespace", "k8s.io", "tasks", "ls", "-q").Output()
	if err != nil {
		c.Error(err)
	}
	for _, id := range strings.Fields(string(tasks)) {
		// The shim of a pod can end before it has answered; the last list shows whether the task is gone.
		if out, err := exec.Command("ctr", "--address", address, "--namespace", "k8s.io", "tasks", "rm",
			"--force", id).CombinedOutput(); err != nil && !strings.Contains(string(out), "ttrpc: closed") {
			c.Errorf("end container %s: %v: %s", id, err, out)
		}
	}
	// containerd removes the task of an ended shim a little later.
	for end := testutil.BeginFor(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		left, err := exec.Command("ctr", "--address", address, "--namespace", "k8s.io", "tasks", "ls", "-q").Output()
		if err == nil && len(strings.Fields(string(left))) == 0 {
			return
		}
		if end.Over() {
			c.Errorf("containers remain: %v: %s", err, left)
			return
		}
	}
}

// endShims ends containerd's shims, which survive containerd.
func (c *cluster) endShims() {
	c.Helper()
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		c.Fatal(err)
	}
	for _, path := range commands {
		text, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(text), "containerd-shim") || !strings.Contains(string(text), c.dir) {
			continue // an ended process, or another process
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) {
			c.Error(err)
		}
	}
}

// unmount removes the mounts below the directories of the cluster and of the kubelet, in reverse
// order.
func (c *cluster) unmount() {
	c.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		c.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, line := range slices.Backward(lines) {
		if point := strings.Fields(line)[4]; strings.HasPrefix(point, c.dir+"/") || strings.HasPrefix(point,
			kubeletDir+"/") {
			if err := syscall.Unmount(point, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
				c.Errorf("unmount %s: %v", point, err)
			}
		}
	}
}

// until waits until holds returns "". A failure shows the last returned state.
func (c *cluster) until(limit time.Duration, condition string, holds func() string) time.Duration {
	c.Helper()
	begun := time.Now()
	for end := testutil.BeginFor(limit); ; time.Sleep(100 * time.Millisecond) {
		state := holds()
		if state == "" {
			return time.Since(begun)
		}
		if end.Over() {
			c.Fatalf("%s: not after %v: %s", condition, time.Since(begun).Round(time.Second), state)
		}
	}
}
