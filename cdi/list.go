package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config/paths"
)

// Device is one device of a specification, with the effects on a container.
type Device struct {
	// Name is the device for an engine, "peerlane.dev/lane=3". Aliases are the other names with
	// the same edits, without the kind.
	Name    string   `json:"name"`
	Aliases []string `json:"aliases"`
	// File is the path of the specification; empty if the specification is not installed.
	File string `json:"file,omitempty"`
	// Ignored is the reason why engines ignore this definition; empty if engines use it.
	Ignored string `json:"ignored,omitempty"`

	Nodes       []*specs.DeviceNode     `json:"nodes"`
	Mounts      []*specs.Mount          `json:"mounts"`
	Environment []string                `json:"environment"`
	Hooks       []HookCall              `json:"hooks"`
	NetDevices  []*specs.LinuxNetDevice `json:"netDevices,omitempty"`
	Groups      []uint32                `json:"additionalGIDs,omitempty"`
	IntelRdt    *specs.IntelRdt         `json:"intelRdt,omitempty"`
}

// HookCall is a program that the runtime calls on the host.
type HookCall struct {
	// Stage is the stage of the container, "createRuntime".
	Stage string `json:"stage"`
	Path  string `json:"path"`
	// Args begins with the program's name.
	Args []string `json:"args"`
	// Does describes the purpose in a sentence, and Brief in one or two words.
	Does  string `json:"does"`
	Brief string `json:"-"`
}

// Devices returns the devices of files. Devices with the same definition appear once.
func Devices(files []File) []Device {
	var all []Device
	for _, f := range files {
		if f.spec == nil {
			continue
		}
		for _, names := range sameEdits(f.spec) {
			d := newDevice(f.spec, names)
			d.File, d.Ignored = f.Path, ignored(files, f, names)
			all = append(all, d)
		}
	}
	return all
}

// sameEdits groups the devices of a specification by their edits, in order.
func sameEdits(spec *specs.Spec) (groups [][]specs.Device) {
	place := map[string]int{}
	for _, d := range spec.Devices {
		text, err := json.Marshal(d.ContainerEdits)
		if err != nil {
			text = []byte(d.Name) // numbers and texts always have JSON
		}
		i, known := place[string(text)]
		if !known {
			i = len(groups)
			place[string(text)] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], d)
	}
	return groups
}

func newDevice(spec *specs.Spec, same []specs.Device) Device {
	d := Device{
		Name: spec.Kind + "=" + same[0].Name, Aliases: []string{},
		Nodes: []*specs.DeviceNode{}, Mounts: []*specs.Mount{}, Environment: []string{}, Hooks: []HookCall{},
	}
	for _, alias := range same[1:] {
		d.Aliases = append(d.Aliases, alias.Name)
	}
	// Engines apply the edits of the device, and then the common edits.
	for _, e := range []specs.ContainerEdits{same[0].ContainerEdits, spec.ContainerEdits} {
		d.Nodes = append(d.Nodes, e.DeviceNodes...)
		d.Mounts = append(d.Mounts, e.Mounts...)
		d.Environment = append(d.Environment, e.Env...)
		d.NetDevices = append(d.NetDevices, e.NetDevices...)
		d.Groups = append(d.Groups, e.AdditionalGIDs...)
		if e.IntelRdt != nil {
			d.IntelRdt = e.IntelRdt
		}
		for _, h := range e.Hooks {
			call := HookCall{Stage: h.HookName, Path: h.Path, Args: append([]string{}, h.Args...)}
			call.Does, call.Brief = describeHook(h)
			d.Hooks = append(d.Hooks, call)
		}
	}
	return d
}

// describeHook describes the purpose of a hook, in a sentence and in one or two words.
func describeHook(h *specs.Hook) (sentence, brief string) {
	a := arguments(h)
	const attaches = ", and attaches its socket at " + paths.ContainerDir
	switch {
	case filepath.Base(h.Path) != "peerlane-hook":
		return "runs " + strings.Join(append([]string{h.Path}, a.rest...), " "), filepath.Base(h.Path)
	case a.command == "remove":
		return "removes the remains of ended containers", "cleanup"
	case a.command == "create" && slices.Contains(a.rest, "--auto"):
		return "starts the relay for the lanes of all GPUs of the container" + attaches, "relay, its GPUs"
	case a.command == "create" && len(a.lanes) == 1:
		return "starts the relay for the lane of " + a.lanes[0] + attaches, "relay"
	case a.command == "create" && len(a.lanes) > 1:
		return "starts the relay for the lanes of " + strings.Join(
				a.lanes,
				", ",
			) + attaches, fmt.Sprintf(
				"relay, %d lanes",
				len(a.lanes),
			)
	case a.command == "create" && len(a.nics) > 0:
		return "prepares the container for verbs on " + strings.Join(a.nics, ", "), "verbs"
	}
	return "is given " + strings.Join(a.rest, " "), a.command
}

// hookArguments are the parsed arguments of peerlane-hook in a specification.
type hookArguments struct {
	command string
	// root is "/" by default.
	root        string
	lanes, nics []string
	// rest are the arguments after the program's name.
	rest []string
}

func arguments(h *specs.Hook) hookArguments {
	a := hookArguments{root: "/"}
	if len(h.Args) < 2 {
		return a
	}
	a.rest, a.command = h.Args[1:], h.Args[1]
	for i := 2; i+1 < len(h.Args); i++ {
		value := h.Args[i+1]
		switch h.Args[i] {
		case "--root":
			a.root = value
		case "--lane", "--gpu":
			if !slices.Contains(a.lanes, value) {
				a.lanes = append(a.lanes, value)
			}
		case "--nic":
			a.nics = append(a.nics, value)
		default:
			continue
		}
		i++
	}
	return a
}

// ignored returns the reason why engines do not use the definition of a device in a file.
func ignored(files []File, in File, names []specs.Device) string {
	for _, other := range files {
		if other.Path == in.Path || other.spec == nil || other.spec.Kind != in.spec.Kind ||
			!sharesName(other.spec, names) {
			continue
		}
		if other.priority == in.priority {
			return other.Path + " also defines it, so engines ignore both"
		}
		if other.priority > in.priority {
			return other.Path + " hides it"
		}
	}
	return ""
}

func sharesName(spec *specs.Spec, names []specs.Device) bool {
	return slices.ContainsFunc(spec.Devices, func(a specs.Device) bool {
		return slices.ContainsFunc(names, func(b specs.Device) bool { return a.Name == b.Name })
	})
}

// Find returns the devices with a name: "lane=3", or "peerlane.dev/lane=3".
func Find(all []Device, name string) ([]Device, error) {
	class, device, ok := strings.Cut(strings.TrimPrefix(name, Vendor+"/"), "=")
	if !ok {
		return nil, fmt.Errorf("%q is not a device name such as lane=3", name)
	}
	kind := Vendor + "/" + class
	var found []Device
	var known []string
	for _, d := range all {
		of, first, _ := strings.Cut(d.Name, "=")
		if of == kind && (first == device || slices.Contains(d.Aliases, device)) {
			found = append(found, d)
		}
		known = append(known, strings.TrimPrefix(d.Name, Vendor+"/"))
	}
	if len(found) > 0 {
		return found, nil
	}
	if len(known) == 0 {
		return nil, errors.New(
			"no device is installed; peerlane cdi generate --spec-dir /etc/cdi installs the devices of this host",
		)
	}
	return nil, fmt.Errorf("unknown device %s=%s; installed are %s", kind, device, strings.Join(known, ", "))
}

// GeneratedFiles returns specifications as files that are not installed.
func GeneratedFiles(list []*specs.Spec) (files []File) {
	for _, spec := range list {
		files = append(files, File{spec: spec})
	}
	return files
}

// sameJSON reports whether two values have the same JSON.
func sameJSON(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}
