package integration

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// operator is a Go module with the CustomResourceDefinitions of an operator that runs jobs.
type operator struct {
	module string // with the version
	sum    string // as in go.sum
	crds   []string
}

var operators = []operator{
	{"sigs.k8s.io/jobset@v0.10.1", "h1:u8QKifNsrWVrlRFe6w2ofYTqFT9ma2DRHxfeB2m9xyU=",
		[]string{"config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"}},
	{"sigs.k8s.io/lws@v0.7.0", "h1:qWfzX8+UBak+Hq0+m/PuE3uO0mp/3dmm5q/h/7z31A8=",
		[]string{"config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"}},
	{"github.com/kubeflow/training-operator@v1.8.1", "h1:mVvoBSCInbMBX0gGSn4+Ihj3ycwoLO1iEAw+0qPhQfc=",
		[]string{"manifests/base/crds/kubeflow.org_pytorchjobs.yaml"}},
	{"sigs.k8s.io/kueue@v0.17.0", "h1:7hzb38M4eKGzYW+CFv2s1L+swzzacUCHOCXxZmAV90I=",
		[]string{"config/components/crd/bases/kueue.x-k8s.io_clusterqueues.yaml",
			"config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml",
			"config/components/crd/bases/kueue.x-k8s.io_resourceflavors.yaml"}},
}

// operatorsKey is the key of the CustomResourceDefinitions in the cache of the programs.
func operatorsKey() string {
	return fmt.Sprintf("crds-%x", sha256.Sum256(fmt.Append(nil, operators)))[:len("crds-")+32]
}

// copyCRDs downloads the modules of operators, and copies the CustomResourceDefinitions to dir.
func copyCRDs(ctx context.Context, dir string) error {
	for _, o := range operators {
		download := exec.CommandContext(ctx, "go", "mod", "download", "-json", o.module)
		download.Dir = dir // outside of a module, whose requirements would be read
		text, err := download.Output()
		if err != nil {
			return fmt.Errorf("go mod download %s: %w: %s", o.module, err, text)
		}
		var module struct{ Dir, Sum string }
		if err := json.Unmarshal(text, &module); err != nil {
			return fmt.Errorf("go mod download %s: %w", o.module, err)
		}
		if module.Sum != o.sum {
			return fmt.Errorf("module %s has the checksum %s instead of %s", o.module, module.Sum, o.sum)
		}
		for _, name := range o.crds {
			if err := copyFile(filepath.Join(module.Dir, name), filepath.Join(dir, filepath.Base(name))); err != nil {
				return err
			}
		}
	}
	return nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
