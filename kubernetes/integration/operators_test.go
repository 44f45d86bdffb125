//go:build cluster

package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/engines"
)

// TestClusterAcceptsTheExamplesOfJobs applies the manifests of operators to an API server with the
// operators' schemas. Without the operators no pod starts.
func TestClusterAcceptsTheExamplesOfJobs(t *testing.T) {
	c := startCluster(t, options{})
	cache, err := engines.Cache()
	if err != nil {
		t.Fatal(err)
	}
	crds := filepath.Join(cache, operatorsKey())
	// A definition is too long for the annotation of a client-side apply.
	c.mustDo("kubectl", "apply", "--server-side", "--filename", crds)
	c.mustDo("kubectl", "wait", "--for=condition=established", "--timeout=30s", "--filename", crds)
	for _, name := range []string{"jobset", "leaderworkerset", "pytorchjob", "kueue"} {
		path := "../examples/jobs/" + name + ".yaml"
		c.mustDo("kubectl", "apply", "--validate=strict", "--filename", path)
		// The schema refuses a field that the operator does not know.
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		wrong := exec.Command("kubectl", "apply", "--validate=strict", "--dry-run=server", "--filename=-")
		wrong.Env = append(os.Environ(), "KUBECONFIG="+c.in("kubeconfig"))
		wrong.Stdin = strings.NewReader(strings.Replace(string(text), "\nspec:\n", "\nspec:\n  unknownField: 1\n", 1))
		if out, err := wrong.CombinedOutput(); err == nil || !strings.Contains(string(out), "unknownField") {
			t.Errorf("%s with a wrong field: %v: %s", name, err, out)
		}
	}
}
