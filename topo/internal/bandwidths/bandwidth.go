package bandwidths

import (
	"strconv"
	"strings"
)

// PCIeSpeed is a PCIe speed of NCCL's table, and the rate of a lane, in 100 Mbit/s.
type PCIeSpeed struct {
	Begins string
	lane   float64
}

// PCIeSpeeds is the table kvDictPciGen of src/graph/topo.cc. PCIe compares the beginning of a text
// with the entries in order.
var PCIeSpeeds = []PCIeSpeed{
	{"2.5 GT/s", 15}, {"5 GT/s", 30}, {"8 GT/s", 60}, {"16 GT/s", 120}, {"32 GT/s", 240}, // Linux before 5.7
	{"5.0 GT/s PCIe", 30}, {"8.0 GT/s PCIe", 60}, {"16.0 GT/s PCIe", 120}, {"32.0 GT/s PCIe", 240},
	{"64.0 GT/s PCIe", 480},
}

// PCIe is the usable bandwidth of a PCIe link, GB/s in each direction.
// speed is the kernel's max_link_speed ("16.0 GT/s PCIe") or NCCL's link_speed
// ("16 GT/s"). Like NCCL, PCIe assumes 8 GT/s for an empty or unknown speed, and 16 lanes for an
// unknown width; 255 lanes, the kernel's value for unknown, count as 255.
func PCIe(speed string, width int) float64 {
	lane := 60.0
	for _, known := range PCIeSpeeds {
		if strings.HasPrefix(speed, known.Begins) {
			lane = known.lane
			break
		}
	}
	if width <= 0 {
		width = 16
	}
	return float64(width) * lane / 80
}

// LinkSpeed reads "16.0 GT/s PCIe", 10^9 transfers a second. LinkSpeed returns 0 for a text
// without a speed: "Unknown" or "".
func LinkSpeed(text string) float64 {
	number, _, _ := strings.Cut(text, " ")
	transfers, err := strconv.ParseFloat(number, 64)
	if err != nil || !(transfers > 0) || transfers > 1024 {
		return 0
	}
	return transfers
}

// Socket is NCCL's figure for the link between two NUMA nodes, GB/s in
// each direction (src/graph/topo.cc, ncclTopoGetInterCpuBw). arch is "x86_64",
// "arm64" or "ppc64", vendor as CPUID has it. For a processor
// outside NCCL's table, Socket returns Local: the link is no limit.
func Socket(arch, vendor string, family, model int) float64 {
	switch {
	case strings.HasPrefix(arch, "ppc64"):
		return 32
	case strings.HasPrefix(arch, "arm64"):
		return 6
	case !strings.HasPrefix(arch, "x86_64"):
		return Local
	case vendor == "AuthenticAMD":
		return 16
	case vendor == "CentaurHauls" || strings.TrimSpace(vendor) == "Shanghai":
		if family == 7 && model == 0x5B { // Yongfeng
			return 9
		}
		return 6
	case vendor != "GenuineIntel":
		return Local
	case family == 6 && model >= 0xCF: // Emerald Rapids
		return 40
	case family == 6 && model >= 0x8F: // Sapphire Rapids
		return 22
	case family == 6 && model >= 0x55: // Skylake
		return 10
	}
	return 6 // Broadwell
}

// NVLink returns NCCL's figure for an NVLink, GB/s in each direction, by compute capability
// times ten, 90 for 9.0 (src/graph/topo.h, ncclTopoNVLinkBw).
func NVLink(capability int) float64 {
	switch {
	case capability >= 100:
		return 40.1
	case capability >= 90:
		return 20.6
	case capability == 86:
		return 12
	case capability >= 60 && capability < 70:
		return 18
	}
	return 20
}

// XGMI returns RCCL's figure for an xGMI link, GB/s in each direction, by the number of the
// architecture, "942" or "gfx942" (RCCL's src/graph/topo.h, ncclTopoXGMISpeed).
func XGMI(gcn string) float64 {
	gcn = strings.TrimPrefix(gcn, "gfx")
	switch {
	case strings.HasPrefix(gcn, "94"), strings.HasPrefix(gcn, "95"):
		return 48
	case strings.HasPrefix(gcn, "90a"), gcn == "910": // old files write 910
		return 36
	}
	return 24 // Vega, MI100
}

// Local is NCCL's rate of a path without links (LOC_BW).
const Local = 5000
