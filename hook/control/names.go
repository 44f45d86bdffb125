package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
)

// nameAnnotations are the annotations of config.json with an engine's name of a container.
var nameAnnotations = []string{"io.kubernetes.cri.container-name", "io.kubernetes.container.name", "nerdctl/name"}

// podAnnotations are the annotations with the name and the namespace of a container's pod.
var podAnnotations = [][2]string{
	{"io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.sandbox-namespace"},
	{"io.kubernetes.pod.name", "io.kubernetes.pod.namespace"},
}

// Names returns the names of a container that its engine shows, the container's own name first:
// for Docker, Podman and nerdctl the name in `ps`; for a pod the name of the container, the name
// of the pod, and NAMESPACE/POD. They come from the engine's files, which may be gone. The names
// are for users only: the hook does not depend on them.
func Names(c generation.Container) []string {
	var names []string
	add := func(name string) {
		if name = strings.TrimPrefix(name, "/"); name != "" && name != c.ID && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if c.Bundle == "" {
		return nil
	}
	text, err := ocispec.ReadBounded(filepath.Join(c.Bundle, "config.json"), ocispec.MaxBytes)
	if err != nil {
		return nil
	}
	var spec struct {
		Annotations map[string]string
		Mounts      []ocispec.Mount
	}
	if json.Unmarshal(text, &spec) != nil {
		return nil
	}
	for _, m := range spec.Mounts {
		// Docker keeps the files of a container, including these two, in one directory.
		if m.Destination == "/etc/hostname" || m.Destination == "/etc/resolv.conf" {
			add(dockerName(filepath.Dir(m.Source), c.ID))
		}
	}
	add(podmanName(c))
	for _, a := range nameAnnotations {
		add(spec.Annotations[a])
	}
	for _, a := range podAnnotations {
		pod, namespace := spec.Annotations[a[0]], spec.Annotations[a[1]]
		add(pod)
		if pod != "" && namespace != "" {
			add(namespace + "/" + pod)
		}
	}
	return names
}

// maxEngineFile is the maximum number of bytes to read from an engine's file.
const maxEngineFile = 16 << 20

// dockerName returns the name in Docker's file of a container.
func dockerName(dir, id string) string {
	if filepath.Base(dir) != id {
		return ""
	}
	var c struct{ ID, Name string }
	text, err := ocispec.ReadBounded(filepath.Join(dir, "config.v2.json"), maxEngineFile)
	if err != nil || json.Unmarshal(text, &c) != nil || c.ID != id {
		return ""
	}
	return c.Name
}

// podmanName returns the name in Podman's list of containers. The list is beside the directories
// of the containers, which contain the bundles: overlay-containers/ID/userdata.
func podmanName(c generation.Container) string {
	dir := filepath.Dir(c.Bundle)
	if filepath.Base(c.Bundle) != "userdata" || filepath.Base(dir) != c.ID {
		return ""
	}
	var list []struct {
		ID    string
		Names []string
	}
	text, err := ocispec.ReadBounded(filepath.Join(filepath.Dir(dir), "containers.json"), maxEngineFile)
	if err != nil || json.Unmarshal(text, &list) != nil {
		return ""
	}
	for _, one := range list {
		if one.ID == c.ID && len(one.Names) > 0 {
			return one.Names[0]
		}
	}
	return ""
}

// ErrNoRelay is the error of a name without a relay on this host.
var ErrNoRelay = errors.New("no relay has the name; run peerlane relay list")

// Find returns the generations with a name: the id or name of a container, the name of a pod,
// which can have several, a generation, or the unique prefix of an id or a generation.
func Find(l paths.Layout, name string) ([]generation.Info, error) {
	all, err := generation.List(l)
	if err != nil && len(all) == 0 {
		return nil, err // the name may belong to an unreadable generation
	}
	var exact, named, begin []generation.Info
	for _, info := range all {
		switch {
		case info.Container.ID == name || info.ID == name:
			exact = append(exact, info)
		case slices.Contains(Names(info.Container), name):
			named = append(named, info)
		case name != "" && (strings.HasPrefix(info.ID, name) || strings.HasPrefix(info.Container.ID, name)):
			begin = append(begin, info)
		}
	}
	switch {
	case len(exact) > 0:
		return exact, nil
	case len(named) > 0:
		return named, nil
	case len(begin) > 0 && sameContainer(begin):
		return begin, nil
	case len(begin) > 0:
		return nil, fmt.Errorf("%q is a prefix of the ids of %d containers or generations; give a longer prefix", name,
			len(begin))
	}
	return nil, errors.Join(fmt.Errorf("find container or generation %q: %w", name, ErrNoRelay), err)
}

// sameContainer reports whether all generations belong to one container.
func sameContainer(list []generation.Info) bool {
	return !slices.ContainsFunc(list, func(i generation.Info) bool {
		return i.Container.ID != list[0].Container.ID || i.Container.RuntimeRoot != list[0].Container.RuntimeRoot
	})
}
