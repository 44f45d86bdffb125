package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peerlane/peerlane/topo"
)

var nicChecks = []Check{
	{
		Name: "port-state", subject: "NICs",
		source: "/sys/class/infiniband/*/ports/*/state",
		why:    "only an ACTIVE port carries data; without an active port the NIC serves no lane",
		remedy: "check the cable and the switch port; on Ethernet: ip link set NETDEV up; on InfiniBand INIT means " +
			"that no subnet manager has configured the port; exclude an unused port by plan.exclude.nics in config.toml",
		run: checkState,
	},
	{
		Name: "port-physical", subject: "NICs",
		source: "/sys/class/infiniband/*/ports/*/phys_state",
		why:    "a port that is not LinkUp has no signal",
		remedy: "check the cable, the transceiver and the port at the other end; Disabled: ip link set NETDEV up, or " +
			"ibportstate",
		run: checkPhysical,
	},
	{
		Name: "port-rate", subject: "NICs",
		source: "/sys/class/infiniband/*/ports/*/rate, compared with the rates of the NIC's slot and of NICs of the " +
			"same model",
		why:    "a narrow slot, or a slow cable or switch, limits every lane over the NIC",
		remedy: "put the NIC into a wider slot; use a cable and a switch port of its rate",
		run:    checkRate,
	},
	{
		Name: "link-layer", subject: "NICs",
		source: "/sys/class/infiniband/*/ports/*/link_layer",
		why:    "InfiniBand lanes cannot reach Ethernet lanes",
		remedy: "mlxconfig -d ADDRESS set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet), then restart; or exclude the " +
			"NICs of one kind by plan.exclude.nics in config.toml",
		run: checkLinkLayer,
	},
	{
		Name: "subnet-manager", subject: "NICs",
		source: "/sys/class/infiniband/*/ports/*/sm_lid of InfiniBand ports whose link is up",
		why:    "without a subnet manager an InfiniBand port stays in INIT",
		remedy: "start a subnet manager on a switch, or on a host of the fabric: systemctl enable --now opensm",
		run:    checkSubnetManager,
	},
	{
		Name: "nic-firmware", subject: "NICs",
		source: "/sys/class/infiniband/*/fw_ver of NICs of the same model",
		why:    "different firmware behaves differently under load",
		remedy: "install the same version: mlxfwmanager -u, or the maker's tool, then restart",
		run:    checkFirmware,
	},
	{
		Name: "nic-flush", subject: "NICs",
		source: "/sys/class/infiniband/*/node_type, and the driver",
		why:    "iWARP, and eRDMA in iWARP mode, cannot flush writes into GPU memory",
		remedy: "eRDMA: its compatible mode",
		run:    checkFlush,
	},
	{
		Name: "error-counters", subject: "NICs",
		source: "/sys/class/infiniband/*/ports/*/counters and hw_counters, twice",
		why:    "rising errors are lost packets: a bad cable, dirty optics, or missing flow control",
		remedy: "clean or replace cable and transceiver; on Ethernet configure the same PFC or ECN on NIC and switch",
		run:    checkCounters,
	},
}

// aboutPorts calls look for each port of NICs that the configuration does not exclude.
func (h *Host) aboutPorts(fine string, look func(topo.NIC, topo.Port) []Finding) []Finding {
	nics, list := h.nics()
	if nics == nil {
		return list
	}
	c, err := h.configuration()
	for _, n := range nics {
		if err == nil && slices.Contains(c.Plan.Exclude.NICs, n.Name) {
			continue
		}
		for _, p := range n.Ports {
			list = append(list, look(n, p)...)
		}
	}
	return orFine(list, "%s", fine)
}

func portName(n topo.NIC, p topo.Port) string { return fmt.Sprintf("%s port %d", n.Name, p.Number) }

func (h *Host) portFile(n topo.NIC, p topo.Port, elem ...string) string {
	return h.sys(append([]string{"class/infiniband", n.Name, "ports", strconv.Itoa(p.Number)}, elem...)...)
}

// touches returns the lanes that a NIC carries. A NIC without lanes, such as a NIC whose link is
// down, affects every lane that it could carry.
func (h *Host) touches(n topo.NIC) []int {
	if lanes := h.lanesOfNIC(n.Name); len(lanes) > 0 {
		return lanes
	}
	return nil
}

// amongOthers returns warning if another port of the host is usable, because lanes then have an
// alternative, and failure otherwise.
func (h *Host) amongOthers() func(on, format string, args ...any) Finding {
	t, err := h.topology()
	if err == nil && slices.ContainsFunc(t.NICs, func(other topo.NIC) bool {
		return other.Active() && !other.Software &&
			len(other.Ports) > 0
	}) {
		return warning
	}
	return failure
}

func checkState(_ context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err == nil && len(t.NICs) == 0 {
		return []Finding{warning("host", "there is no RDMA device: lanes reach containers of this host alone").remedy(
			"if there is a NIC, load its driver: modprobe mlx5_ib")}
	}
	return h.aboutPorts("all ports are ACTIVE", func(n topo.NIC, p topo.Port) []Finding {
		on := portName(n, p)
		switch {
		case p.State == "":
			return []Finding{unknown(on, "the kernel tells no state").touching(h.touches(n))}
		case !p.Active():
			return []Finding{h.amongOthers()(on, "it is %s", p.State).touching(h.touches(n))}
		}
		return nil
	})
}

func checkPhysical(_ context.Context, h *Host) []Finding {
	return h.aboutPorts("all ports have LinkUp", func(n topo.NIC, p topo.Port) []Finding {
		on := portName(n, p)
		text, err := read(h.portFile(n, p, "phys_state"))
		if err != nil {
			return []Finding{unknown(on, "%s", denied(err)).touching(h.touches(n))}
		}
		// "5: LinkUp"
		if _, state, _ := strings.Cut(text, ": "); state != "LinkUp" {
			return []Finding{h.amongOthers()(on, "it is %q", cut(text)).touching(h.touches(n))}
		}
		return nil
	})
}

// model returns a key that identical NICs have in common; "" for software devices.
func model(n topo.NIC) string {
	d := n.Device
	if d.Vendor == "" || n.Software {
		return ""
	}
	return strings.Join([]string{d.Vendor, d.Device, d.SubsystemVendor, d.SubsystemDevice}, " ")
}

func checkRate(_ context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	best := map[string]topo.NIC{}
	for _, n := range t.NICs {
		if m := model(n); m != "" && n.RateGbps() > best[m].RateGbps() {
			best[m] = n
		}
	}
	return h.aboutPorts("each port's rate is that of its model, and its slot carries it",
		func(n topo.NIC, p topo.Port) []Finding {
			if n.Software || !p.Active() {
				return nil // no slot, or an unknown rate
			}
			on := portName(n, p)
			if p.RateGbps == 0 {
				return []Finding{unknown(on, "the kernel tells no rate").touching(h.touches(n))}
			}
			var list []Finding
			// Packet headers take about 15 % of a nominal link rate. Link is NCCL's figure without
			// headers, so a 400 Gb/s NIC in a PCIe 5.0 x16 slot is correct.
			const room = 0.95
			if n.Link > 0 && n.BusID != "" && n.Link < room*p.RateGbps/8 {
				list = append(list, warning(on, "its rate is %g Gb/s, and its slot carries %.0f Gb/s (%s x%d)", p.RateGbps,
					n.Link*8, or(n.LinkSpeed, "unknown speed"), n.LinkWidth).
					remedy("put %s into a slot with more lanes, or of a newer PCIe", n.Name).touching(h.touches(n)))
			}
			if twin, known := best[model(n)]; known && p.RateGbps < twin.RateGbps() {
				list = append(list, warning(on, "its rate is %g Gb/s, and that of %s, the same model, is "+
					"%g", p.RateGbps, twin.Name,
					twin.RateGbps()).
					remedy("use a cable and a switch port of %g Gb/s for %s", twin.RateGbps(), n.Name).touching(h.touches(n)))
			}
			return list
		})
}

func checkLinkLayer(_ context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	by := map[string][]string{}
	for _, n := range t.NICs {
		if n.Software {
			continue
		}
		for _, p := range n.Ports {
			if p.LinkLayer != "" {
				by[p.LinkLayer] = append(by[p.LinkLayer], portName(n, p))
			}
		}
	}
	if len(by) < 2 {
		return []Finding{ok("host", "all ports have the same, or there is none")}
	}
	var words []string
	for _, layer := range slices.Sorted(maps.Keys(by)) {
		words = append(words, fmt.Sprintf("%s: %s", layer, strings.Join(by[layer], ", ")))
	}
	return []Finding{warning("host", "NICs have different ones; %s", strings.Join(words, "; "))}
}

func checkSubnetManager(_ context.Context, h *Host) []Finding {
	return h.aboutPorts("each InfiniBand port has one, or there is no InfiniBand",
		func(n topo.NIC, p topo.Port) []Finding {
			if p.LinkLayer != "InfiniBand" {
				return nil
			}
			on := portName(n, p)
			if physical, err := read(h.portFile(n, p, "phys_state")); err == nil && !strings.HasSuffix(physical, "LinkUp") {
				return nil // no configuration can change this
			}
			text, err := read(h.portFile(n, p, "sm_lid"))
			if err != nil {
				return []Finding{unknown(on, "%s", denied(err)).touching(h.touches(n))}
			}
			if lid, err := strconv.ParseUint(text, 0, 32); err != nil {
				return []Finding{unknown(on, "its sm_lid is %.20q, which is no number", text).touching(h.touches(n))}
			} else if lid == 0 {
				return []Finding{failure(on, "no subnet manager has configured it (sm_lid 0)").touching(h.touches(n))}
			}
			return nil
		})
}

func checkFirmware(_ context.Context, h *Host) []Finding {
	versions, devices := map[string]map[string][]string{}, map[string]string{}
	unread := h.aboutNICs(func(n topo.NIC) []Finding {
		m := model(n)
		if m == "" {
			return nil
		}
		text, err := read(h.sys("class/infiniband", n.Name, "fw_ver"))
		if err != nil {
			return []Finding{unknown(n.Name, "%s", denied(err)).touching(h.touches(n))}
		}
		if versions[m] == nil {
			versions[m] = map[string][]string{}
		}
		versions[m][cut(text)] = append(versions[m][cut(text)], n.Name)
		devices[m] = n.Device.Vendor + ":" + n.Device.Device
		return nil
	})
	list := slices.DeleteFunc(unread, func(f Finding) bool { return f.Status <= OK })
	for _, m := range slices.Sorted(maps.Keys(versions)) {
		if len(versions[m]) < 2 {
			continue
		}
		var words []string
		for _, v := range slices.Sorted(maps.Keys(versions[m])) {
			words = append(words, fmt.Sprintf("%s on %s", v, strings.Join(versions[m][v], ", ")))
		}
		list = append(list, warning("model "+devices[m], "its NICs have different firmware: "+
			"%s", strings.Join(words, "; ")))
	}
	return orFine(list, "NICs of one model have the same firmware")
}

// badCounters count lost or damaged packets.
var badCounters = []string{
	"counters/symbol_error", "counters/link_error_recovery", "counters/link_downed", "counters/port_rcv_errors",
	"counters/port_rcv_remote_physical_errors", "counters/port_xmit_discards", "counters/local_link_integrity_errors",
	"counters/excessive_buffer_overrun_errors",
	"hw_counters/out_of_sequence", "hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err",
	"hw_counters/implied_nak_seq_err",
	"hw_counters/rx_icrc_encapsulated", "hw_counters/roce_slow_restart", "hw_counters/out_of_buffer",
}

// counted returns the counters of a host by file below /sys/class/infiniband.
func (h *Host) counted(t *topo.Host) map[string]uint64 {
	all := map[string]uint64{}
	for _, n := range t.NICs {
		for _, p := range n.Ports {
			for _, name := range badCounters {
				text, err := read(h.portFile(n, p, name))
				if err != nil {
					continue // some drivers lack the counter
				}
				if value, err := strconv.ParseUint(text, 10, 64); err == nil {
					all[portName(n, p)+" "+name] = value
				}
			}
		}
	}
	return all
}

func checkCounters(ctx context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if len(t.NICs) == 0 {
		return notApplicable("there is no RDMA device")
	}
	before := h.counted(t)
	if len(before) == 0 {
		return []Finding{unknown("host", "the kernel shows no counter of errors").remedy(
			"nothing: drivers of emulated devices have none")}
	}
	h.pause(ctx)
	after := h.counted(t)
	var list []Finding
	for _, n := range t.NICs {
		for _, p := range n.Ports {
			var rising []string
			for _, name := range badCounters {
				key := portName(n, p) + " " + name
				old, knownBefore := before[key]
				if current, knownAfter := after[key]; knownBefore && knownAfter && current > old {
					rising = append(rising, fmt.Sprintf("%s by %d to %d", name[strings.IndexByte(name, '/')+1:], current-old, current))
				}
			}
			if len(rising) > 0 {
				list = append(list, warning(portName(n, p), "in %v rose %s", h.Interval,
					strings.Join(rising, ", ")).touching(h.touches(n)))
			}
		}
	}
	return orFine(list, "none of %d rose in %v", len(after), h.Interval)
}

// pause waits between two readings of counters.
func (h *Host) pause(ctx context.Context) {
	if h.wait != nil {
		h.wait(ctx, h.Interval)
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(h.Interval):
	}
}

func checkFlush(_ context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	for _, n := range t.NICs {
		if lanes := h.touches(n); n.CannotFlush() && len(lanes) > 0 {
			list = append(list, warning(n.Name, "%s cannot flush its writes into GPU memory: %s", n.Protocol,
				topo.CannotFlush).touching(lanes))
		}
	}
	return orFine(list, "all NICs of lanes can flush")
}
