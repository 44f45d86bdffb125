package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/relay/launch"
)

var limitChecks = []Check{
	{
		Name: "memlock-init", subject: "limits",
		source: "the limit of locked memory of the first process of containers with gpu=, /proc/PID/limits",
		why:    "with a low limit ibv_reg_mr fails (ENOMEM) and NCCL uses TCP; lane= needs none",
		remedy: "start the container with --ulimit memlock=-1",
		run:    checkInitMemlock,
	},
	{
		Name: "memlock-exec", subject: "limits",
		source: "the limit of locked memory of dockerd, containerd and crio, /proc/PID/limits",
		why:    "exec gets the engine's limit; with gpu= and nic= programs register memory themselves",
		remedy: "give the engine's unit LimitMEMLOCK=infinity; it has effect after a restart of the engine; a restart " +
			"of Docker ends its containers, unless live-restore is on",
		run: checkExecMemlock,
	},
}

// enough is the memlock limit that a process requires to register a GPU's memory. The default of
// every distribution is lower: 8 MiB at most.
const enough = 1 << 30

// memlock returns the soft limit of locked memory of a process in bytes.
func (h *Host) memlock(pid int) (uint64, error) {
	text, err := read(h.proc(strconv.Itoa(pid), "limits"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		rest, found := strings.CutPrefix(line, "Max locked memory")
		if !found {
			continue
		}
		f := strings.Fields(rest)
		if len(f) == 0 {
			break
		}
		if f[0] == "unlimited" {
			return ^uint64(0), nil
		}
		return strconv.ParseUint(f[0], 10, 64)
	}
	return 0, fmt.Errorf("/proc/%d/limits does not name locked memory", pid)
}

// singleTenant reports whether a container of this host can register memory itself.
func (h *Host) singleTenant() (bool, error) {
	c, err := h.configuration()
	return err == nil && c.CDI.Tenancy != config.TenancyMulti, err
}

func checkInitMemlock(_ context.Context, h *Host) []Finding {
	shared, err := h.singleTenant()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if !shared {
		return notApplicable("containers of this host register no memory (cdi.tenancy)")
	}
	generations, err := h.generations()
	var list []Finding
	if err != nil {
		list = append(list, unknown("host", "%s", denied(err)))
	}
	looked := 0
	for _, g := range generations {
		// With lane=, a container registers no memory. With gpu=, its client copies itself.
		if !g.Alive || !slices.ContainsFunc(g.Config.Lanes, func(l launch.Lane) bool { return l.Copy }) {
			continue
		}
		on := "container " + cut(g.Container.ID)
		limit, err := h.memlock(g.Init.PID)
		lanes := []int{}
		for _, l := range g.Config.Lanes {
			lanes = append(lanes, l.GPU.Index)
		}
		switch {
		case absent(err): // the process has ended
			continue
		case err != nil:
			list = append(list, unknown(on, "%s", denied(err)).touching(lanes))
		case limit < enough:
			list = append(list, warning(on, "its first process may lock %s", humanize.IBytes(limit)).touching(lanes))
		}
		looked++
	}
	return orFine(list, "%d containers have gpu=, and none has a low limit", looked)
}

// units maps the processes that start containers to their units.
var units = map[string]string{"dockerd": "docker", "containerd": "containerd", "crio": "crio"}

func checkExecMemlock(_ context.Context, h *Host) []Finding {
	shared, err := h.singleTenant()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if !shared {
		return notApplicable("containers of this host register no memory (cdi.tenancy)")
	}
	found, err := h.processes(func(comm string) bool { return units[comm] != "" })
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if len(found) == 0 {
		return notApplicable("no engine runs as a daemon; Podman's exec has the limit of whoever calls it (ulimit -l)")
	}
	var list []Finding
	for _, pid := range slices.Sorted(maps.Keys(found)) {
		on := fmt.Sprintf("%s (process %d)", found[pid], pid)
		limit, err := h.memlock(pid)
		switch unit := units[found[pid]]; {
		case absent(err):
		case err != nil:
			list = append(list, unknown(on, "%s", denied(err)))
		case limit < enough:
			list = append(list, warning(on, "it may lock %s, and so may what exec starts", humanize.IBytes(limit)).
				remedy(`mkdir -p /etc/systemd/system/%s.service.d && printf '[Service]\nLimitMEMLOCK=infinity\n' > /etc/systemd/system/%s.service.d/memlock.conf && systemctl daemon-reload # It has effect with the next start: %s`, unit, unit, restarts[unit]))
		}
	}
	return orFine(list, "%d engines have no low limit", len(found))
}
