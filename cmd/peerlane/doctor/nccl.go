package doctor

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
)

var ncclChecks = []Check{
	{
		Name: "nccl", subject: "relays", source: "NCCL's variables in processes of containers " +
			"(/proc/PID/environ, nccl.conf)",
		why:    "NCCL bypasses the lane, or is slow",
		remedy: "unset the variable (docs/nccl/images.md)",
		run:    checkNCCL,
	},
}

// ncclEffect is the effect of variables of NCCL on the lane of a container.
type ncclEffect struct {
	// Variable has the effect.
	Variable string
	Found    string
	// Remedy is empty for the remedy of the check.
	Remedy string
}

// ncclRule finds an effect of a variable. value is empty for a variable that is not set.
type ncclRule struct {
	variable string
	// wrong reports whether the value keeps NCCL from the lane, or slows it.
	wrong  func(value string, all map[string]string) bool
	found  string
	remedy string
	// last marks an effect after which further variables have none: NCCL does not use the lane.
	last bool
}

var ncclRules = []ncclRule{
	{
		variable: "NCCL_NET", last: true,
		wrong: func(value string, _ map[string]string) bool {
			return value != "" && !strings.EqualFold(value, "peerlane")
		},
		found:  "NCCL uses this network or fails, and does not use the lane",
		remedy: "unset NCCL_NET, or set NCCL_NET=Peerlane",
	},
	{
		variable: "NCCL_NET_PLUGIN", last: true,
		wrong: func(value string, all map[string]string) bool {
			_, set := all["NCCL_NET_PLUGIN"]
			return set && !slices.ContainsFunc(strings.Split(value, ","), isPlugin)
		},
		found:  "NCCL does not load Peerlane's plugin, and does not use the lane",
		remedy: "unset NCCL_NET_PLUGIN, or set NCCL_NET_PLUGIN=peerlane",
	},
	{
		variable: "NCCL_NET_PLUGIN", last: true,
		wrong: func(_ string, all map[string]string) bool { _, set := all["NCCL_NET_PLUGIN"]; return !set },
		found: "/etc/nccl.conf of the container is not Peerlane's: NCCL does not load Peerlane's plugin, and does not " +
			"use the lane",
		remedy: "set NCCL_NET_PLUGIN=peerlane in the container; peerlane relay inspect CONTAINER shows the reason",
	},
	{
		variable: "NCCL_TOPO_FILE",
		wrong: func(value string, _ map[string]string) bool {
			return value != "" && value != path.Join(paths.ContainerDir, paths.TopologyName) && value != virtualTopology
		},
		found: "NCCL reads another topology than the container's, and can pair a GPU with the lane of another GPU",
	},
	{
		variable: "NCCL_TUNER_PLUGIN",
		wrong: func(value string, all map[string]string) bool {
			return value != "" && !strings.Contains(strings.ToLower(value), "peerlane") && allowsLL128(all["NCCL_PROTO"])
		},
		found:  "the tuner replaces Peerlane's, and can choose LL128, which no lane carries",
		remedy: "unset NCCL_TUNER_PLUGIN, or set NCCL_PROTO=^LL128",
	},
	{
		variable: "NCCL_CUMEM_ENABLE",
		wrong:    func(value string, _ map[string]string) bool { return value == "0" },
		found:    "NCCL cannot share its buffers with the relay: data goes through host memory",
		remedy:   "set NCCL_CUMEM_ENABLE=1",
	},
	{
		variable: "NCCL_NET_GDR_LEVEL",
		wrong: func(value string, _ map[string]string) bool {
			return value == "0" || strings.EqualFold(value, "LOC")
		},
		found:  "NCCL exchanges no GPU memory with lanes: data goes through host memory",
		remedy: "unset NCCL_NET_GDR_LEVEL",
	},
}

// virtualTopology is the container's path of the file of `peerlane topo -o xml --virtual`.
const virtualTopology = "/etc/nccl-topology.xml"

// isPlugin reports whether an element of NCCL_NET_PLUGIN is Peerlane's plugin: NCCL accepts the name,
// the file and its path.
func isPlugin(element string) bool {
	name := strings.TrimSuffix(strings.TrimPrefix(path.Base(element), "libnccl-net-"), ".so")
	return name == "peerlane"
}

// allowsLL128 reports whether a value of NCCL_PROTO leaves LL128 to the tuner.
func allowsLL128(protocols string) bool {
	list, except := strings.CutPrefix(strings.ToUpper(protocols), "^")
	return protocols == "" || slices.Contains(strings.Split(list, ","), "LL128") != except
}

// ncclEffects returns the effects of the variables of a process, of which the first can be the only
// one.
func ncclEffects(variables map[string]string) (list []ncclEffect) {
	for _, rule := range ncclRules {
		value := variables[rule.variable]
		if !rule.wrong(value, variables) {
			continue
		}
		found := rule.variable + " is not set: " + rule.found
		if _, set := variables[rule.variable]; set {
			found = fmt.Sprintf("%s=%s: %s", rule.variable, cut(value), rule.found)
		}
		list = append(list, ncclEffect{Variable: rule.variable, Found: found, Remedy: rule.remedy})
		if rule.last {
			break
		}
	}
	return list
}

func checkNCCL(_ context.Context, h *Host) []Finding {
	generations, err := h.generations()
	var list []Finding
	if err != nil {
		list = append(list, unknown("host", "%s", denied(err)))
	}
	looked := 0
	for _, g := range generations {
		if !g.Alive {
			continue
		}
		on := "container " + cut(g.Container.ID)
		settings, err := control.NCCLSettings(h.Proc, g)
		if err != nil {
			list = append(list, unknown(on, "%s", denied(err)).touching(lanesOf(g)))
			continue
		}
		looked++
		// Processes of a container share most variables.
		shown := map[string]bool{}
		for _, s := range settings {
			for _, e := range ncclEffects(s.Variables) {
				if shown[e.Found] {
					continue
				}
				shown[e.Found] = true
				f := warning(on, "%s (process %d)", e.Found, s.PIDs[0]).touching(lanesOf(g))
				if e.Remedy != "" {
					f = f.remedy("%s", e.Remedy)
				}
				list = append(list, f)
			}
		}
	}
	return orFine(list, "%d containers have a lane, and no variable keeps NCCL from it", looked)
}
