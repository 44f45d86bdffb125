package picture

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// describe sets the tooltip of a lane.
func (p *Picture) describe(l *lane) {
	lines := []string{l.start.name + ": " + p.route(l)}
	if e := l.estimate; e != nil {
		lines = append(lines,
			fmt.Sprintf("All GPUs busy: %s (NCCL today %s, GPUDirect off %s)", gbs(e.Relay), figure(e.NCCL),
				figure(e.HostMemory)),
			fmt.Sprintf("Alone: %s (NCCL today %s, GPUDirect off %s)", gbs(e.Alone.Relay), figure(e.Alone.NCCL),
				figure(e.Alone.HostMemory)))
		if e.Limit != "" {
			lines = append(lines, "Full: "+e.Limit)
		}
	}
	if l.Pinned {
		lines = append(lines, "Configuration assigns it")
	}
	lines = append(lines, "Reason: "+l.Reason)
	l.detail = joinPlain(lines)
}

// route returns a short description of a lane's route.
func (p *Picture) route(l *lane) string {
	to := list(l.NICs)
	if shares := p.shares(l); shares != "" {
		return shares
	}
	switch l.Kind {
	case planner.KindDirect:
		return "direct to " + to
	case planner.KindStaged:
		return "staged on " + p.serverNames(l) + ", to " + to
	case planner.KindBounce:
		return "bounces through host memory, to " + to
	}
	return "no lane (" + l.Role + ")"
}

// shares lists the share of each route of a lane; empty for routes of equal kind and share.
func (p *Picture) shares(l *lane) string {
	alike := true
	for _, m := range l.Members {
		alike = alike && m.Weight == l.Members[0].Weight && l.KindOf(m) == l.KindOf(l.Members[0])
	}
	if alike {
		return ""
	}
	var parts []string
	for _, m := range l.Members {
		percent := fmt.Sprintf("%d %% ", (100*m.Weight+l.Weights()/2)/l.Weights())
		switch l.KindOf(m) {
		case planner.KindDirect:
			percent += "direct to "
		case planner.KindBounce:
			percent += "through host memory to "
		default:
			if n := p.tree.gpus[m.Server]; n != nil {
				percent += "staged on " + n.name + ", to "
			}
		}
		parts = append(parts, percent+m.NIC)
	}
	return strings.Join(parts, "; ")
}

func (p *Picture) serverNames(l *lane) string {
	var names []string
	for _, s := range l.Servers {
		if n := p.tree.gpus[s]; n != nil {
			names = append(names, n.name)
		}
	}
	return list(names)
}

// joinPlain joins lines, without empty lines and unprintable characters.
func joinPlain(lines []string) string {
	var kept []string
	for _, l := range lines {
		if l != "" {
			kept = append(kept, plain(l))
		}
	}
	return strings.Join(kept, "\n")
}

// detail returns the tooltip of a node.
func (n *node) detail(role string) string {
	var lines []string
	add := func(what, value string) {
		if value != "" {
			lines = append(lines, what+": "+value)
		}
	}
	switch n.kind {
	case kindRoot:
		lines = append(lines, n.name)
		add("Host", n.host)
		add("Processors", n.cpu.CPUs)
		add("Architecture", n.cpu.Arch)
		add("Maker", n.cpu.Vendor)
		if n.cpu.Family > 0 {
			add("Family and model", fmt.Sprintf("%d, %d", n.cpu.Family, n.cpu.Model))
		}
	case kindSwitch:
		lines = append(lines, n.name+" "+n.sw.BusID)
		add("Passes traffic beside the CPU to", strings.Join(n.sw.Peers, ", "))
		add("Device", n.sw.Device.Vendor+" "+n.sw.Device.Device)
	case kindGPU:
		g := n.gpu
		lines = append(lines, n.name+" "+strings.TrimSpace(g.Vendor+" "+g.Name))
		add("Address", g.BusID)
		add("UUID", g.UUID)
		add("Role", role)
		for _, l := range g.NVLinks {
			to := "NVSwitches"
			if l.Peer != "" {
				to = l.Peer
			}
			add(n.nvlink()+"s to "+to, fmt.Sprintf("%d, %s", l.Count, gbs(l.Bandwidth)))
		}
		if chip, bandwidth := n.chip(); chip != "" {
			add(chip+" to the CPU", gbs(bandwidth))
		}
		add("It cannot be relayed", g.Reason)
	case kindNIC:
		nic := n.nic
		lines = append(lines, n.name)
		add("Address", nic.BusID)
		add("Data Direct function", nic.DataDirect)
		add("Driver", nic.Driver)
		add("Protocol", nic.Protocol)
		add("GUID", nic.GUID)
		for _, p := range nic.Ports {
			words := []string{p.State, p.LinkLayer}
			if p.RateGbps > 0 {
				words = append(words, figure(p.RateGbps)+" Gb/s")
			}
			add("Port "+strconv.Itoa(p.Number), strings.Join(strings.Fields(strings.Join(words, " ")), " "))
		}
		add("It serves no lane", nic.Reason)
	case kindMemory:
		lines = append(lines, "Lanes that bounce go through this memory: from the GPU to it, and from it to the NIC")
	}
	return joinPlain(lines)
}

// linkDetail returns the tooltip of the link upwards.
func (n *node) linkDetail(source topo.Source) string {
	link, bandwidth, assumed := linkLabel(n.place, source)
	what := strings.TrimSpace(n.name + " " + n.address)
	if n.kind == kindNIC && n.address == "" {
		what = n.name
	}
	lines := []string{"Link of " + what + " upwards"}
	if link == "" {
		lines = append(lines, "The source does not state its bandwidth")
	} else {
		lines = append(lines, link+", "+bandwidth+" in each direction")
	}
	if n.place.LinkSpeed != "" {
		lines = append(lines, "Speed: "+n.place.LinkSpeed)
	}
	if assumed {
		lines = append(lines, "The source describes the link only in part; the bandwidth is NCCL's assumption")
	}
	if chip, at := n.chip(); chip != "" {
		lines = append(lines, chip+" to the CPU: "+gbs(at))
	}
	return joinPlain(lines)
}

// nvlinks summarises a GPU's NVLinks: "18 NVLinks, 371 GB/s".
func (n *node) nvlinks() string {
	links, bandwidth := 0, 0.0
	for _, l := range n.gpu.NVLinks {
		links += l.Count
		bandwidth += l.Bandwidth
	}
	if links == 0 {
		return ""
	}
	words := count(links, n.nvlink())
	if bandwidth > 0 {
		words += ", " + gbs(bandwidth)
	}
	return words
}

// nvlink returns the maker's name of the links between GPUs.
func (n *node) nvlink() string {
	if n.gpu.Vendor == "AMD" {
		return "xGMI link"
	}
	return "NVLink"
}

// state summarises a NIC's fabric and rate: "InfiniBand, 400 Gb/s".
func (n *node) state() (fabric, rate string) {
	nic := n.nic
	fabric = nic.Protocol
	switch {
	case nic.Reason == notThere:
		fabric = "not in the topology"
	case nic.Ethernet:
		fabric = "no RDMA"
	case nic.Software:
		fabric = "software"
	case fabric == "":
		for _, p := range nic.Ports {
			fabric = p.LinkLayer
		}
	}
	switch {
	case !nic.Active():
		rate = "no active port"
	case nic.RateGbps() > 0:
		rate = figure(nic.RateGbps()) + " Gb/s"
	}
	return plain(fabric), rate
}
