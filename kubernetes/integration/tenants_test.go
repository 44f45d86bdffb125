//go:build cluster

package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// reportOf waits for the report of a pod's first round.
func (c *cluster) reportOf(name string) (r report) {
	c.Helper()
	c.until(patience, "pod "+name+" reports", func() string {
		text, err := os.ReadFile(filepath.Join(c.reports, reportFile(name, 1)))
		if err == nil {
			err = json.Unmarshal(text, &r)
		}
		if err != nil {
			return err.Error()
		}
		return ""
	})
	return r
}

func TestClusterNamespacesRefuseEachOther(t *testing.T) {
	c := startCluster(t, options{accounts: true, twoNodes: true, tenants: "io.kubernetes.cri.sandbox-namespace"})
	c.startNVIDIA()
	second := c.startSecondNode()
	for _, name := range []string{namespace, "red", "blue"} {
		c.mustDo("kubectl", "create", "namespace", name)
	}
	key := c.key("generate")
	c.mustDo(append([]string{"helm", "install", "peerlane", chart, "--namespace", namespace}, c.values()...)...)
	c.untilDeployed()
	c.untilHostHasKey(key)
	c.useInstalledHook()
	second.order(nodeUseHook)
	if err := os.WriteFile(filepath.Join(c.reports, roundFile(1)), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	limits := map[corev1.ResourceName]string{"nvidia.com/gpu": "2", "peerlane.dev/lanes": "1"}
	on := func(namespace, node, name, other string) *corev1.Pod {
		p := limited(c.pod(name, other), limits)
		p.Namespace, p.Spec.NodeSelector = namespace, map[string]string{corev1.LabelHostname: node}
		return p
	}
	c.create(on("red", nodeName, "a", "b"), on("red", secondNode, "b", "a"))
	for _, name := range []string{"a", "b"} {
		if r := c.reportOf(name); r.Error != "" || r.Exchange.BytesReceived < bytesPerDirection ||
			len(r.Exchange.Failures) > 0 {
			t.Errorf("pods of one namespace: error %q, exchange %+v", r.Error, r.Exchange)
		}
	}
	c.create(on("red", nodeName, "c", "d"), on("blue", secondNode, "d", "c"))
	for _, name := range []string{"c", "d"} {
		r := c.reportOf(name)
		if text, err := json.Marshal(r); err != nil || r.Exchange.BytesReceived > 0 ||
			!strings.Contains(string(text), "tenants' keys differ (network.tenant_annotation)") {
			t.Errorf("pods of two namespaces: error %q, exchange %+v, %v", r.Error, r.Exchange, err)
		}
	}
	for _, name := range []string{"red", "blue"} {
		c.mustDo("kubectl", "delete", "pods", "--all", "--namespace", name, "--wait")
	}
}
