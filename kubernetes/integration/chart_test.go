//go:build cluster

package integration

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/oci"
	"github.com/peerlane/peerlane/kubernetes/hostinstall"
	"github.com/peerlane/peerlane/kubernetes/lanes"
)

const (
	namespace = "peerlane"
	chart     = "../chart"
	manifests = "../manifests"
	// layout and archive are the image of `make image`.
	layout, archive = "../../dist/image", "../../dist/image.tar"
)

// classes are the DeviceClasses of the rendered manifests.
const classes = manifests + "/deviceclasses.yaml"

// image returns repository and tag of the image of `make image`.
func (c *cluster) image() (repository, tag string) {
	c.Helper()
	text, err := os.ReadFile(filepath.Join(layout, "index.json"))
	if err != nil {
		c.Fatal(err)
	}
	var index struct {
		Manifests []struct{ Annotations map[string]string }
	}
	if err := json.Unmarshal(text, &index); err != nil || len(index.Manifests) != 1 {
		c.Fatalf("%s: %v", text, err)
	}
	repository, tag, ok := strings.Cut(index.Manifests[0].Annotations["io.containerd.image.name"], ":")
	if !ok {
		c.Fatalf("the image has no tag: %s", text)
	}
	return repository, tag
}

// importImage gives the engine the image of `make image`, as a pull does.
func (c *cluster) importImage() {
	c.Helper()
	c.mustDo("ctr", "--address", c.in("containerd.sock"), "--namespace", "k8s.io", "images", "import", archive)
}

// importNextVersion gives the engine the image with the plugin of nextVersion, and returns the tag.
func (c *cluster) importNextVersion() string {
	c.Helper()
	const rootfs = "../../bin/image" // of make image
	repository, _ := c.image()
	dir := filepath.Join(c.TempDir(), "rootfs")
	c.mustDo("cp", "-a", rootfs, dir)
	c.mustDo("cp", next, filepath.Join(dir, "usr/bin/peerlane-kubelet"))
	layer, err := oci.Layer(dir, time.Unix(0, 0))
	if err != nil {
		c.Fatal(err)
	}
	path := filepath.Join(c.TempDir(), "next.tar")
	file, err := os.Create(path)
	if err != nil {
		c.Fatal(err)
	}
	made := oci.Image{Name: repository + ":" + nextVersion, Architecture: runtime.GOARCH, Time: time.Unix(0, 0),
		Config: map[string]any{"Entrypoint": []string{"/usr/bin/peerlane-kubelet"}, "Env": []string{"PATH=/usr/bin"}}}
	if err := errors.Join(made.WriteArchive(file, layer), file.Close()); err != nil {
		c.Fatal(err)
	}
	c.mustDo("ctr", "--address", c.in("containerd.sock"), "--namespace", "k8s.io", "images", "import", path)
	return nextVersion
}

// values imports the image into the engine, and returns the settings of the chart for the cluster
// of a test, with the image.
func (c *cluster) values() []string {
	c.Helper()
	c.importImage()
	repository, tag := c.image()
	return append(c.hostValues(), "--set", "image.repository="+repository+
		",image.pullPolicy=Never,existingSecret=peerlane-key", "--set-string", "image.tag="+tag)
}

// hostValues returns the settings of the chart for the cluster of a test: a node without a pod network, with a
// separate root of the host.
func (c *cluster) hostValues() []string {
	c.Helper()
	host, port, _ := strings.Cut(strings.TrimPrefix(apiServer, "https://"), ":")
	return []string{"--set", strings.Join([]string{"hostNetwork=true", "apiServer.host=" + host,
		"hostRoot=" + c.Layout.Root, "sysfs=" + c.Plan.Source.Sysfs}, ","), "--set-string", "apiServer.port=" + port}
}

// plugins returns the pods of the DaemonSet, and an error unless each pod is ready and of the last
// revision.
func (c *cluster) plugins() ([]corev1.Pod, error) {
	set, err := c.client.AppsV1().DaemonSets(namespace).Get(c.Context(), "peerlane", metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	pods, err := c.client.CoreV1().Pods(namespace).List(c.Context(), metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	s, nodes := set.Status, 1
	if c.options.twoNodes {
		nodes = 2
	}
	if s.ObservedGeneration != set.Generation || int(s.DesiredNumberScheduled) != nodes ||
		int(s.UpdatedNumberScheduled) != nodes || int(s.NumberAvailable) != nodes || len(pods.Items) != nodes {
		text := fmt.Sprintf("the DaemonSet is %+v", s)
		for _, p := range pods.Items {
			text += fmt.Sprintf("; pod %s: %s %v %v", p.Name, p.Status.Phase, p.Status.InitContainerStatuses,
				p.Status.ContainerStatuses)
		}
		events, err := c.client.CoreV1().Events(namespace).List(c.Context(), metav1.ListOptions{})
		if err == nil {
			for _, e := range events.Items {
				text += "; " + e.Message
			}
		}
		return nil, errors.New(text)
	}
	return pods.Items, nil
}

func (c *cluster) untilDeployed() corev1.Pod {
	c.Helper()
	var pods []corev1.Pod
	took := c.until(2*patience, "the DaemonSet is ready", func() string {
		var err error
		if pods, err = c.plugins(); err != nil {
			return err.Error()
		}
		return ""
	})
	c.Logf("the DaemonSet is ready after %v", took.Round(100*time.Millisecond))
	return pods[0]
}

// useInstalledHook makes the CDI specifications name the hook that the chart installed, like the
// refresh of the chart's units on a host with systemd.
func (c *cluster) useInstalledHook() (programs string) {
	c.Helper()
	programs = filepath.Join(c.Layout.Root, hostinstall.Prefix, "libexec/peerlane")
	// Without the key relay.binary the hook starts the relay in the hook's directory.
	if err := c.Configure(func(to *config.Config) { c.configureRelays(to); to.Relay.Binary = "" }); err != nil {
		c.Fatal(err)
	}
	specs, err := filepath.Glob(filepath.Join(c.CDIDir(), "*"))
	if err != nil {
		c.Fatal(err)
	}
	changed := 0
	for _, path := range specs {
		text, err := os.ReadFile(path)
		if err != nil {
			c.Fatal(err)
		}
		n := bytes.Count(text, []byte(c.HookBinary()))
		if n == 0 {
			continue
		}
		changed += n
		text = bytes.ReplaceAll(text, []byte(c.HookBinary()), []byte(filepath.Join(programs, "peerlane-hook")))
		if _, err := hostinstall.WriteFile(path, text, 0o644); err != nil {
			c.Fatal(err)
		}
	}
	if changed == 0 {
		c.Fatalf("no specification of %v names the hook %s", specs, c.HookBinary())
	}
	return programs
}

// relays returns the running relay of each generation, by generation.
func (c *cluster) relays() map[string]int {
	c.Helper()
	list, err := generation.List(c.Layout)
	if err != nil {
		c.Fatal(err)
	}
	relays := map[string]int{}
	for _, g := range list {
		if g.Status.Relay == nil || g.Status.State != generation.StateReady {
			c.Fatalf("the relay of generation %s is %s", g.ID, g.Status.State)
		}
		relays[g.ID] = g.Status.Relay.PID
	}
	return relays
}

// key runs peerlane key on files of the test, and stores the resulting key in the cluster's Secret.
func (c *cluster) key(do string) (text []byte) {
	c.Helper()
	root := c.in("keys")
	c.mustDo(filepath.Join(peerlanes, "peerlane"), "--root", root, "key", do)
	path := filepath.Join(root, "etc/peerlane/cluster.key")
	text, err := os.ReadFile(path)
	if err != nil {
		c.Fatal(err)
	}
	manifest := c.mustDo("kubectl", "create", "secret", "generic", "peerlane-key", "--namespace", namespace,
		"--from-file=cluster.key="+path, "--dry-run=client", "--output=yaml")
	c.apply(manifest)
	return text
}

// untilHostHasKey waits until the host has a cluster key.
func (c *cluster) untilHostHasKey(want []byte) {
	c.Helper()
	path := c.Layout.ClusterKey()
	took := c.until(maxDelay, "the host has the cluster key", func() string {
		got, err := os.ReadFile(path)
		if err == nil && bytes.Equal(got, want) {
			return ""
		}
		return fmt.Sprintf("another key: %v", err)
	})
	c.Logf("the host has the cluster key after %v", took.Round(100*time.Millisecond))
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		c.Errorf("the cluster key: %v, %v", info.Mode(), err)
	}
}

// metrics returns the metrics of the DaemonSet.
func (c *cluster) metrics() string {
	c.Helper()
	r, err := http.Get("http://127.0.0.1:9836/metrics")
	if err != nil {
		c.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		c.Fatalf("%s %v", r.Status, err)
	}
	return string(text)
}

// mustBeLimitedToItsNode tries writes of ResourceSlices with the token of a pod of the DaemonSet.
func (c *cluster) mustBeLimitedToItsNode(pod corev1.Pod) {
	c.Helper()
	token := strings.TrimSpace(c.mustDo("kubectl", "create", "token", "peerlane", "--namespace", namespace,
		"--bound-object-kind=Pod", "--bound-object-name="+pod.Name))
	for node, words := range map[string]string{nodeName: "", "n2": "may not write a slice of node 'n2'"} {
		x := exec.Command("kubectl", "--server", apiServer, "--insecure-skip-tls-verify", "--token", token, "create",
			"--filename=-")
		x.Env = append(os.Environ(), "KUBECONFIG=/dev/null")
		x.Stdin = strings.NewReader(`apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: try-` + node + `}
spec: {driver: try.peerlane.dev, nodeName: ` + node + `, pool: {name: try, generation: 1, resourceSliceCount: 1}, devices: []}
`)
		out, err := x.CombinedOutput()
		if refused := err != nil; refused != (words != "") || !strings.Contains(string(out), words) {
			c.Errorf("a slice of node %s: %v: %s", node, err, out)
		}
	}
}

func TestClusterInstallsAndUpgradesByTheChart(t *testing.T) {
	c := startCluster(t, options{accounts: true})
	c.startNVIDIA()
	c.mustDo("kubectl", "create", "namespace", namespace)
	key := c.key("generate")
	values := c.values()
	c.mustDo(append([]string{"helm", "install", "peerlane", chart, "--namespace", namespace}, values...)...)
	plugin := c.untilDeployed()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.untilHostHasKey(key)
	c.mustBeLimitedToItsNode(plugin)
	for _, name := range []string{"etc/systemd/system/peerlane-relay.socket", "etc/udev/rules.d/90-peerlane.rules",
		"etc/modprobe.d/peerlane.conf", "opt/peerlane/bin/peerlane", "opt/peerlane/lib/peerlane/libpeerlane.so.0"} {
		if _, err := os.Stat(filepath.Join(c.Layout.Root, name)); err != nil {
			t.Error(err)
		}
	}

	// Pods use the hook and the relay that the init container installed.
	programs := c.useInstalledHook()
	c.mustDo("kubectl", "apply", "-f", "../examples")
	c.create(claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"), "gpu-with-staged-lane"))
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	list, err := generation.List(c.Layout)
	if err != nil || len(list) != 2 {
		t.Fatalf("%d generations, %v", len(list), err)
	}
	for _, g := range list {
		if filepath.Dir(g.Relay.Path) != programs {
			t.Errorf("the relay is %s; the chart installed %s", g.Relay.Path, programs)
		}
		series := fmt.Sprintf(`peerlane_relay_up{container=%q`, g.Container.ID)
		if text := c.metrics(); !strings.Contains(text, series) {
			t.Errorf("no series begins %s: %s", series, text)
		}
	}

	// An upgrade to another version of the plugin: the new pod registers beside the old pod, and relays keep
	// transferring.
	before, containers := c.relays(), c.containers("a", "b")
	c.mustDo(slices.Concat([]string{"helm", "upgrade", "peerlane", chart, "--namespace", namespace, "--set",
		"metrics.enabled=false,evict=true"}, values, []string{"--set-string", "image.tag=" + c.importNextVersion()})...)
	round, upgraded := 1, false
	for begun := time.Now(); !upgraded || round < 3; round++ {
		now, err := c.plugins()
		upgraded = err == nil && now[0].Name != plugin.Name
		if !upgraded && time.Since(begun) > 5*time.Minute {
			t.Fatalf("the DaemonSet is not upgraded: %v", err)
		}
		c.exchanged(round+1, "a", "b")
	}
	t.Logf("%d rounds during the upgrade", round-1)
	if after := c.relays(); !maps.Equal(before, after) {
		t.Errorf("the relays are %v, and were %v before the upgrade", after, before)
	}
	if after := c.containers("a", "b"); !slices.Equal(containers, after) {
		t.Errorf("containers and generations are %v, and were %v", after, containers)
	}

	c.until(maxDelay, "every lane has the attribute of the new version", func() string {
		for name, d := range c.untilPublished(len(c.Plan.Lanes) + 1) {
			if v := d.Attributes[lanes.AttributeVersion].VersionValue; v == nil || *v != nextVersion {
				return fmt.Sprintf("%s: %v", name, d.Attributes)
			}
		}
		return ""
	})

	// A rotation of the key reaches the host, and restarts neither pods nor relays.
	rotated := c.key("rotate")
	if bytes.Equal(rotated, key) {
		t.Fatal("the rotation changed nothing")
	}
	c.untilHostHasKey(rotated)
	c.exchanged(round+1, "a", "b")
	if after := c.relays(); !maps.Equal(before, after) {
		t.Errorf("the relays are %v, and were %v before the rotation", after, before)
	}
	c.remove("a", "b")

	// The new instance prepares claims.
	c.clearRounds()
	c.create(claiming(c.pod("c", "d"), "gpu-with-staged-lane"), claiming(c.pod("d", "c"), "gpu-with-staged-lane"))
	c.untilRunning("c", "d")
	c.exchanged(1, "c", "d")
	c.remove("c", "d")
	c.mustDo("helm", "uninstall", "peerlane", "--namespace", namespace, "--wait")
	c.untilPublished(0)
}

// commands returns the commands of the page's first shell block.
func commands(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, found := strings.Cut(string(text), "\n```sh\n")
	block, _, ended := strings.Cut(block, "\n```\n")
	lines := strings.Split(block, "\n")
	if !found || !ended || len(lines) != 10 {
		t.Fatalf("the page has no block of ten commands: %q", lines)
	}
	return lines
}

// jobOfTheTest returns the page's job with the image and the program of the test. Each pod has every GPU
// of a node: the simulated host has eight, too.
func (c *cluster) jobOfTheTest() string {
	c.Helper()
	const name = "../examples/jobs/two-nodes.yaml"
	text, err := os.ReadFile(name)
	if err != nil {
		c.Fatal(err)
	}
	job := string(text)
	begin, end := strings.Index(job, "          image:"), strings.Index(job, "          securityContext:")
	if begin < 0 || end < begin {
		c.Fatalf("%s has another form", name)
	}
	job = job[:begin] + c.expand(`          image: $IMAGE
          imagePullPolicy: Never
          command: [/usr/bin/test-peerlane, job]
          volumeMounts: [{name: reports, mountPath: `+reportsDir+`}]
`) + job[end:]
	job = strings.Replace(job, "      containers:\n", "      volumes: [{name: reports, hostPath: {path: "+c.reports+
		"}}]\n      containers:\n", 1)
	if err := os.WriteFile(filepath.Join(c.reports, roundFile(1)), nil, 0o644); err != nil {
		c.Fatal(err)
	}
	path := filepath.Join(c.TempDir(), "job.yaml")
	if err := os.WriteFile(path, []byte(job), 0o644); err != nil {
		c.Fatal(err)
	}
	return path
}

func TestClusterRunsTheCommandsOfThePage(t *testing.T) {
	c := startCluster(t, options{accounts: true, twoNodes: true})
	c.startNVIDIA()
	second := c.startSecondNode()
	values := c.hostValues()
	c.startRegistry()
	// The test replaces paths in the page's text, and adds the values of the cluster.
	replace := strings.NewReplacer(
		"bin/peerlane --root", filepath.Join(peerlanes, "peerlane")+" --root",
		"=cluster/", "="+c.in("keys")+"/", `"$PWD/cluster"`, c.in("keys"),
		"helm install peerlane kubernetes/chart", "helm install peerlane "+chart+" "+strings.Join(values, " "),
		"kubernetes/examples/jobs/two-nodes.yaml", c.jobOfTheTest(), "--timeout 10m", "--timeout 2m",
		"oci-archive:dist/image.tar", "oci-archive:"+archive)
	_, tag := c.image()
	t.Setenv("IMAGE", registry+"/peerlane-kubelet")
	t.Setenv("TAG", tag)
	t.Setenv("SSL_CERT_FILE", c.in("registry.crt")) // of the registry, for skopeo
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.mustDo("sh", "-c", "kubectl describe pods --namespace default; cat $0/*", c.reports))
		}
	})
	before := c.carried()
	for _, command := range commands(t) {
		if command == "make image" {
			continue // by make test-cluster
		}
		begun := time.Now()
		out := c.mustDo("sh", "-c", replace.Replace(command))
		t.Logf("%s (%v): %s", command, time.Since(begun).Round(100*time.Millisecond), out)
		if strings.Contains(command, "rollout status") {
			c.useInstalledHook()
			second.order(nodeUseHook)
		}
	}
	pods, err := c.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(pods.Items) != 2 {
		t.Fatalf("%d pods, %v", len(pods.Items), err)
	}
	var nodes []string
	for _, p := range pods.Items {
		if nodes = append(nodes, p.Spec.NodeName); p.Status.Phase != corev1.PodSucceeded {
			t.Errorf("pod %s is %s", p.Name, p.Status.Phase)
		}
	}
	slices.Sort(nodes)
	if want := []string{nodeName, secondNode}; !slices.Equal(nodes, want) {
		t.Errorf("the pods ran on %v instead of %v", nodes, want)
	}
	if n := c.carried() - before; n < bytesPerDirection {
		t.Errorf("the network between the nodes carried %d bytes; the pods exchanged %d", n, bytesPerDirection)
	}
	c.mustDo("kubectl", "delete", "job", "two-nodes", "--wait")
}

func TestClusterManifestsAreThoseOfTheChart(t *testing.T) {
	rendered := t.TempDir()
	render := exec.Command("sh", "../manifests/render", rendered)
	if out, err := render.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.Command("diff", "-r", "--exclude=render", rendered, manifests).CombinedOutput()
	if err != nil {
		t.Errorf("run kubernetes/manifests/render kubernetes/manifests: %v: %s", err, out)
	}
}
