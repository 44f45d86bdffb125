package doctor

import (
	"context"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

var pcieChecks = []Check{
	{
		Name: "pcie-link", subject: "PCIe",
		source: "current_link_width, max_link_width, current_link_speed and max_link_speed of GPUs and NICs in " +
			"/sys/bus/pci/devices",
		why: "a narrow or slow link limits every lane over the device",
		remedy: "reseat the card, clean the contacts, try another slot or riser; see the slot's " +
			"width in the firmware's setup",
		run: checkLinks,
	},
	{
		Name: "acs", subject: "PCIe",
		source: "the Access Control Services of switch ports between GPUs and NICs, in /sys/bus/pci/devices/*/config",
		why:    "with redirection, traffic below one switch passes the CPU: GPUDirect RDMA and copies are slow or wrong",
		remedy: "on a host that passes no device to a virtual machine setpci until the next start, and for each start " +
			"the kernel's parameter \"pci=disable_acs_redir=...\", in quotation marks",
		run: checkACS,
	},
	{
		Name: "iommu", subject: "PCIe",
		source: "the type of the IOMMU group of GPUs and NICs, /sys/bus/pci/devices/*/iommu_group/type",
		why: "translation sends transfers over the CPU, and with DMA-BUF can give a NIC wrong addresses " +
			"(open-gpu-kernel-modules#1324)",
		remedy: "start the kernel with iommu=pt (and on Intel intel_iommu=on); hosts that pass devices to virtual " +
			"machines need translation",
		run: checkIOMMU,
	},
}

// link is the PCIe link of a device in sysfs. saves reports that the device lowers the speed when
// idle.
type link struct {
	on, busID string
	saves     bool
	lanes     []int
}

// links returns the links of GPUs and NICs, each function once.
func (h *Host) links() ([]link, error) {
	t, err := h.topology()
	if err != nil {
		return nil, err
	}
	var list []link
	for _, g := range t.GPUs {
		if g.Vendor == "" {
			list = append(list, link{gpuName(g), g.BusID, true, h.lanesOfGPU(g.BusID)})
		}
	}
	for _, n := range t.NICs {
		// The functions of a card, as NCCL defines it, share the link of the card.
		busID := or(n.Card, n.BusID)
		if busID == "" || slices.ContainsFunc(list, func(l link) bool { return l.busID == busID }) {
			continue
		}
		list = append(list, link{n.Name, busID, false, h.lanesOfNIC(n.Name)})
	}
	return list, nil
}

func checkLinks(_ context.Context, h *Host) []Finding {
	devices, err := h.links()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if len(devices) == 0 {
		return notApplicable("there is neither a GPU nor a NIC")
	}
	var list []Finding
	for _, d := range devices {
		value := func(name string) string {
			text, _ := read(h.sys("bus/pci/devices", d.busID, name)) // virtual machines lack the attributes
			return text
		}
		width, maxWidth := number(value("current_link_width")), number(value("max_link_width"))
		// The kernel reports width 255 for an unknown width; 0 means no link.
		if width > 0 && width < 64 && maxWidth < 64 && width < maxWidth {
			list = append(list, warning(d.on, "its link has %g of %g lanes", width, maxWidth).touching(d.lanes))
			continue
		}
		speed, top := value("current_link_speed"), value("max_link_speed")
		if !d.saves && number(speed) > 0 && number(speed) < number(top) {
			list = append(list, warning(d.on, "its link runs at %s, and the device can do %s", speed, top).touching(d.lanes))
		}
	}
	return orFine(list,
		"the links of %d devices are as wide and fast as the devices can do (GPUs lower their speed when idle)", len(devices))
}

// number parses the first word of an attribute ("32.0 GT/s PCIe"), or returns 0.
func number(text string) float64 {
	first, _, _ := strings.Cut(text, " ")
	n, err := strconv.ParseFloat(first, 64)
	if err != nil || n < 0 || n > 1e9 {
		return 0
	}
	return n
}

func checkACS(_ context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	redirect, hidden := t.ACSRedirects()
	bySwitch := map[string][]string{}
	var order []string
	for _, p := range redirect {
		if bySwitch[p.Above] == nil {
			order = append(order, p.Above)
		}
		bySwitch[p.Above] = append(bySwitch[p.Above], p.BusID)
	}
	var list []Finding
	for _, upstream := range order {
		ports := bySwitch[upstream]
		var lines []string
		for _, p := range ports {
			// Clear only the bits of request redirect, completion redirect and egress control, as
			// pci=disable_acs_redir does.
			lines = append(lines, "setpci -s "+p+" ECAP_ACS+6.w=0:2c")
		}
		list = append(list, warning("switch "+upstream, "its ports %s redirect", strings.Join(ports, ", ")).
			// GRUB's shell ends a command at a semicolon that has no quotation marks.
			remedy("on a host that passes no device to a virtual machine, for ACS keeps these apart: %s; for each start: the "+
				"kernel's parameter \"pci=disable_acs_redir=%s\", in quotation marks as GRUB would cut it at a "+
				"semicolon", strings.Join(lines, "; "), strings.Join(ports, ";")).
			touching(h.lanesBelow(t, ports)))
	}
	if len(hidden) > 0 {
		list = append(list, unknown("host", "the kernel shows ACS of %d switch ports to root alone",
			len(hidden)).remedy("sudo peerlane doctor"))
	}
	return orFine(list, "no switch redirects what GPUs and NICs send to each other")
}

// lanesBelow returns the lanes of devices below these ports.
func (h *Host) lanesBelow(t *topo.Host, ports []string) []int {
	above := map[string]string{}
	for _, p := range t.PCIePorts {
		above[p.BusID] = p.Above
	}
	below := func(busID string) bool {
		for at, steps := busID, 0; at != "" && steps < 64; at, steps = above[at], steps+1 {
			if slices.Contains(ports, at) {
				return true
			}
		}
		return false
	}
	nics := map[string]bool{}
	for _, n := range t.NICs {
		nics[n.Name] = n.BusID != "" && below(n.BusID)
	}
	return h.lanesWith(func(l planner.Lane) bool {
		return below(l.GPU) || slices.ContainsFunc(l.Servers, below) ||
			slices.ContainsFunc(l.NICs, func(n string) bool { return nics[n] })
	})
}

func checkIOMMU(_ context.Context, h *Host) []Finding {
	devices, err := h.links()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	var translated []string
	lanes := map[int]bool{}
	kind := ""
	for _, d := range devices {
		group, err := filepath.EvalSymlinks(h.sys("bus/pci/devices", d.busID, "iommu_group"))
		if absent(err) {
			continue // no IOMMU
		}
		var text string
		if err == nil {
			text, err = read(filepath.Join(group, "type"))
		}
		switch {
		case err != nil:
			list = append(list, unknown(d.on, "%s", denied(err)).touching(d.lanes))
		case text != "identity": // DMA, DMA-FQ, auto before a driver has the device
			kind = text
			translated = append(translated, d.on)
			for _, l := range d.lanes {
				lanes[l] = true
			}
		}
	}
	if len(translated) > 0 {
		touched := []int{}
		for l := range lanes {
			touched = append(touched, l)
		}
		slices.Sort(touched)
		list = append(list, warning(strings.Join(translated, ", "), "the IOMMU translates for them (type %s)",
			kind).touching(touched))
	}
	return orFine(list, "no IOMMU translates for GPUs and NICs")
}
