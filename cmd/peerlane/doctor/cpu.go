package doctor

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

var cpuChecks = []Check{{
	Name: "cpu-governor", subject: "processors",
	source: "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
	why:    "a processor that wakes at a low frequency slows small messages",
	remedy: "cpupower frequency-set -g performance",
	run:    checkGovernor,
}}

func checkGovernor(_ context.Context, h *Host) []Finding {
	files, err := filepath.Glob(h.sys("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"))
	if err != nil {
		return []Finding{unknown("host", "%v", err)}
	}
	others := map[string]int{}
	for _, file := range files {
		switch governor, err := read(file); {
		case absent(err): // went offline since the listing
		case err != nil:
			return []Finding{unknown("host", "%s", denied(err))}
		case governor != "performance":
			others[cut(governor)]++
		}
	}
	if len(others) == 0 {
		if len(files) == 0 {
			return notApplicable("the kernel does not scale frequencies")
		}
		return []Finding{ok("host", "it is performance")}
	}
	count := 0
	for _, n := range others {
		count += n
	}
	return []Finding{warning("host", "it is %s for %d of %d processors",
		strings.Join(slices.Sorted(maps.Keys(others)), ", "), count, len(files))}
}
