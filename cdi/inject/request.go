package inject

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
)

// Names of a container's requests. The value is a list of CDI devices, separated by commas.
const (
	variable   = "PEERLANE_DEVICES"
	annotation = "peerlane.dev/devices"
)

// request is a requested device.
type request struct {
	device string
	// by is the variable or annotation of the request; empty for the administrator's.
	by string
}

// parseRequests returns the requests in a config.json.
func parseRequests(text []byte) ([]request, error) {
	var spec struct {
		Process struct {
			Env []string `json:"env"`
		} `json:"process"`
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(text, &spec); err != nil {
		return nil, err
	}
	var all []request
	add := func(names, by string) {
		for name := range strings.SplitSeq(names, ",") {
			if name = strings.TrimSpace(name); name != "" {
				all = append(all, request{name, by})
			}
		}
	}
	add(spec.Annotations[annotation], "the annotation "+annotation)
	// As in runc, the last value of a repeated variable counts.
	for _, e := range slices.Backward(spec.Process.Env) {
		if value, ok := strings.CutPrefix(e, variable+"="); ok {
			add(value, "the variable "+variable)
			break
		}
	}
	return all, nil
}

// permittedDevices returns the devices of requests without duplicates, or an error with the first device
// that the administrator's list does not permit.
func permittedDevices(all []request, allowed []string, configFile string) ([]string, error) {
	var devices []string
	for _, r := range all {
		if _, _, _, err := parser.ParseQualifiedName(r.device); err != nil {
			return nil, &fault.Error{Operation: r.asker() + "the device", Object: strconv.Quote(r.device), Cause: err,
				Remedy: `a device name has the form "peerlane.dev/lane=3"`}
		}
		if r.by != "" &&
			!slices.ContainsFunc(allowed, func(pattern string) bool { return config.DeviceMatches(pattern, r.device) }) {
			return nil, &fault.Error{Code: fault.DeviceNotPermitted, Operation: r.asker() + "the device", Object: r.device,
				Cause:  &notPermittedError{configFile, allowed},
				Remedy: "an administrator can add it, or make a runtime with --peerlane-device=" + r.device}
		}
		if !slices.Contains(devices, r.device) {
			devices = append(devices, r.device)
		}
	}
	return devices, nil
}

func (r request) asker() string {
	if r.by == "" {
		return "--peerlane-device: "
	}
	return r.by + " asks for "
}

// notPermittedError is the error of a device that the administrator's list does not permit.
type notPermittedError struct {
	configFile string
	allowed    []string
}

func (e *notPermittedError) Error() string {
	list := "it is empty"
	if len(e.allowed) > 0 {
		list = "it has " + strings.Join(e.allowed, ", ")
	}
	return fmt.Sprintf("runtime.devices in %s does not permit it (%s)", e.configFile, list)
}
