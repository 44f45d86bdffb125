package hook

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// LanesAnnotation requests lanes through a directory of hooks, without CDI. Its value is "3",
// "3,5", "all", "auto" or a group, as in peerlane.dev/lane=3.
const LanesAnnotation = "peerlane.dev/lanes"

// CreateAnnotated is Create for the lanes in a container's annotation, if the administrator
// permits such requests. A hook cannot add a mount to config.json, so the engine must have mounted
// the anchor. An image can set the annotation, but cannot mount the anchor.
func CreateAnnotated(a Ahead, s State, runtimeRoot string) (warning, err error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	if !config.Hook.Annotations {
		return nil, annotationRefused(s, errAnnotationsOff,
			"an administrator can set annotations = true in [hook] of "+a.layout.ConfigFile())
	}
	plan, err := a.plan()
	if err != nil {
		return nil, err
	}
	devices := Devices{Auto: s.Annotations[LanesAnnotation] == "auto"}
	if !devices.Auto {
		if devices.Lanes, err = parseAnnotation(plan, s.Annotations[LanesAnnotation]); err != nil {
			return nil, &fault.Error{Operation: takeAnnotation, Object: strconv.Quote(s.ID), Cause: err}
		}
	}
	if err := hasAnchor(a.layout, s); err != nil {
		return nil, err
	}
	return Create(a, s, runtimeRoot, devices)
}

// hasAnchor checks that a container's mounts contain the anchor, and its error names the remedy.
// Attach checks the mount itself.
func hasAnchor(l paths.Layout, s State) error {
	spec, err := ocispec.Read(s.Bundle)
	if err != nil {
		return fmt.Errorf("container %q: %w", s.ID, err)
	}
	for _, m := range spec.Mounts {
		if filepath.Clean(m.Destination) == paths.ContainerDir && filepath.Clean(m.Source) == l.Anchor() {
			return nil
		}
	}
	return annotationRefused(s, errNoAnchor, fmt.Sprintf(
		"have the engine mount the anchor: --mount type=bind,src=%s,dst=%s,ro=true", l.Anchor(), paths.ContainerDir))
}

// Causes of a refused annotation.
var (
	errAnnotationsOff = errors.New("the configuration does not permit it")
	errNoAnchor       = errors.New("it has no mount point for the relay's socket")
	errNoLaneAtAll    = errors.New("no GPU of the plan has a lane; `peerlane plan` says why")
)

const takeAnnotation = "take the annotation " + LanesAnnotation + " of container"

// annotationRefused returns the error of an annotation that the host does not serve.
func annotationRefused(s State, cause error, remedy string) error {
	return &fault.Error{Code: fault.Annotation, Operation: takeAnnotation, Object: strconv.Quote(s.ID), Cause: cause,
		Remedy: remedy}
}

// parseAnnotation returns the GPUs in an annotation's value, in the form of Devices.Lanes.
func parseAnnotation(plan *planner.Plan, value string) ([]string, error) {
	var names []string
	for word := range strings.SplitSeq(value, ",") {
		gpus, err := meant(plan, strings.TrimSpace(word))
		if err != nil {
			return nil, err
		}
		for _, gpu := range gpus {
			if name := gpu.UUID + "@" + gpu.BusID; !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names, nil
}

// meant returns the GPUs of one word: every GPU with a lane, the GPUs of a group, or one GPU.
func meant(plan *planner.Plan, word string) ([]topo.GPU, error) {
	var members []string
	switch i := slices.IndexFunc(plan.Groups, func(g planner.Group) bool { return g.Name == word }); {
	case word == "all":
		for _, lane := range plan.Lanes {
			if lane.Role != planner.RoleRefused {
				members = append(members, lane.GPU)
			}
		}
		if len(members) == 0 {
			return nil, errNoLaneAtAll
		}
	case i >= 0:
		members = plan.Groups[i].GPUs
	default:
		members = []string{word}
	}
	var gpus []topo.GPU
	for _, name := range members {
		gpu, err := plan.GPU(name)
		if err != nil {
			return nil, err
		}
		gpus = append(gpus, gpu)
	}
	return gpus, nil
}
