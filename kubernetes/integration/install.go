package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/peerlane/peerlane/integration/engines"
	"github.com/peerlane/peerlane/integration/pinned"
)

// Versions of programs, which the modules pin.
const (
	kubernetesVersion = "1.37.2"
	kubernetesMinor   = "37"
)

// Both the installer and the tests run in the folder of this package.
const (
	modules        = "modules"
	enginesModules = "../../integration/engines/modules"
)

// names lists the modules of a cluster's programs, in the order of the builds.
var names = []string{"runc", "containerd", "etcd", "kubernetes", "helm"}

// builds returns the modules of a cluster's programs, by name.
func builds() map[string]pinned.Module {
	const component = " -X k8s.io/component-base/version."
	all := engines.Modules(enginesModules)
	delete(all, "docker")
	all["etcd"] = pinned.Module{
		Folder:   filepath.Join(modules, "etcd"),
		Packages: []string{"go.etcd.io/etcd/server/v3"},
		Ldflags:  "-s -w",
	}
	all["helm"] = pinned.Module{
		Folder:   filepath.Join(modules, "helm"),
		Packages: []string{"helm.sh/helm/v4/cmd/helm"},
		Ldflags:  "-s -w",
	}
	all["kubernetes"] = pinned.Module{
		Folder: filepath.Join(modules, "kubernetes"),
		Packages: []string{
			"k8s.io/kubernetes/cmd/kube-apiserver", "k8s.io/kubernetes/cmd/kube-controller-manager",
			"k8s.io/kubernetes/cmd/kube-scheduler", "k8s.io/kubernetes/cmd/kubectl", "k8s.io/kubernetes/cmd/kubelet",
		},
		// Without a version the kubelet names itself v0.0.0.
		Ldflags: "-s -w" + component + "gitVersion=v" + kubernetesVersion + component +
			"gitMajor=1" + component + "gitMinor=" +
			kubernetesMinor,
	}
	return all
}

// Install builds the missing programs of a cluster into the cache of the container engines, and
// reports steps to progress.
func Install(ctx context.Context, progress pinned.Progress) error {
	dir, err := engines.Cache()
	if err != nil {
		return err
	}
	cache := pinned.Cache{Dir: dir, Progress: progress}
	unlock, err := cache.Open(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	all := builds()
	for _, name := range names {
		key, keyErr := all[name].Key()
		if keyErr == nil {
			keyErr = cache.Once(key, func(dir string) error { return all[name].Build(ctx, dir) })
		}
		err = errors.Join(err, keyErr)
	}
	return errors.Join(err, cache.Once(operatorsKey(), func(dir string) error { return copyCRDs(ctx, dir) }))
}

// find returns the directories of a cluster's programs, as Install builds them.
func find() (dirs []string, err error) {
	cache, err := engines.Cache()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		key, err := builds()[name].Key()
		if err != nil {
			return nil, err
		}
		dir := filepath.Join(cache, key)
		if _, err := os.Stat(dir); err != nil {
			return nil, fmt.Errorf("programs of %s: %w; build them with `make test-cluster`", name, err)
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}
