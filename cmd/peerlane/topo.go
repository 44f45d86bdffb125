package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/nvml"
)

// hostFlags say which host a command looks at.
type hostFlags struct {
	cmd                *cobra.Command
	input, sysfs, proc string
	software           bool
	anyVendor          bool
}

// addHost gives a command the flags that choose a host.
func addHost(cmd *cobra.Command) *hostFlags {
	f := addLiveHost(cmd)
	cmd.Flags().StringVar(&f.input, "input", "", "read `FILE` in place of this host: a capture, NCCL's or hwloc's XML, or nvidia-smi topo -m")
	completeFiles(cmd, "input", "xml", "txt", "gz")
	return f
}

// addLiveHost is addHost without files.
func addLiveHost(cmd *cobra.Command) *hostFlags {
	f := &hostFlags{cmd: cmd}
	cmd.Flags().StringVar(&f.sysfs, "sysfs", "/sys", "read sysfs from `DIR`")
	cmd.Flags().StringVar(&f.proc, "proc", "/proc", "read procfs from `DIR`")
	completeDirectories(cmd, "sysfs", "proc")
	return f
}

// addSoftware lets plans use software RDMA.
func (f *hostFlags) addSoftware() {
	f.cmd.Flags().BoolVar(&f.software, "software", false, "plan with software RDMA (rxe, siw), too, which cannot reach a GPU's memory")
}

func (f *hostFlags) read() (*topo.Host, error) {
	if f.input != "" && (f.cmd.Flags().Changed("sysfs") || f.cmd.Flags().Changed("proc")) {
		return nil, usageError{f.cmd.CommandPath(), errors.New("--input reads a file, --sysfs and --proc a host: give one or the other")}
	}
	return topo.Read(f.input, f.options())
}

// options are those of a host, not of a file.
func (f *hostFlags) options() topo.Options {
	o := topo.Options{Sysfs: f.sysfs, Proc: f.proc}
	if f.sysfs == "/sys" && f.proc == "/proc" {
		o.NVML = nvml.New() // it knows the running host only
	}
	return o
}

func newTopoCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topo",
		Short: "Show GPUs, RDMA NICs, and how near they are to each other",
		Long: `Show the GPUs and RDMA NICs of this host, or of a file, and for each pair the
type and the bandwidth of the path between them.

A file is told by its content: a capture (peerlane topo capture), a topology of
NCCL (NCCL_TOPO_DUMP_FILE) or of hwloc 2 (lstopo --of xml), or the text of
nvidia-smi topo -m, which has path types and no bandwidths.`,
		Example: `  peerlane topo
  peerlane topo --input topo.xml
  peerlane topo -o json | jq '.paths[] | select(.to == "mlx5_0")'`,
		Args: noArgs,
	}
	cmd.AddCommand(newCaptureCommand(a))
	host, form, rules := addHost(cmd), addForm(cmd), string(topo.RulesNCCL)
	cmd.Flags().StringVar(&rules, "rules", rules, "name paths by the `RULES` of nccl or smi (nvidia-smi)")
	complete(cmd, "rules", string(topo.RulesNCCL), string(topo.RulesSMI))
	cmd.RunE = func(*cobra.Command, []string) error {
		by, err := topo.ParseRules(rules)
		if err != nil {
			return usageError{cmd.CommandPath(), err}
		}
		h, err := host.read()
		if err != nil {
			return err
		}
		pairs := h.Paths(by)
		if *form == formJSON {
			return a.printJSON(topology{topologyVersion, by, withLists(h), pairs})
		}
		a.printTopo(h, pairs)
		return nil
	}
	return cmd
}

// topologyVersion is that of the JSON, which docs/topology.schema.json describes.
const topologyVersion = 1

// topology is what "peerlane topo -o json" prints.
type topology struct {
	Version int        `json:"version"`
	Rules   topo.Rules `json:"rules"`
	*topo.Host
	Paths []topo.Pair `json:"paths"`
}

// withLists is a host whose lists are lists in JSON when they are empty, too.
func withLists(h *topo.Host) *topo.Host {
	with := *h
	with.CPUs = append([]topo.CPU{}, h.CPUs...)
	with.Switches = append([]topo.Switch{}, h.Switches...)
	with.GPUs = append([]topo.GPU{}, h.GPUs...)
	with.NICs = append([]topo.NIC{}, h.NICs...)
	for i := range with.NICs {
		with.NICs[i].Ports = append([]topo.Port{}, with.NICs[i].Ports...)
	}
	return &with
}

func (a *app) printTopo(h *topo.Host, pairs []topo.Pair) {
	fmt.Fprintf(a.out, "Host read from %s\n\n", origin(h.Source))
	if len(h.GPUs) == 0 {
		fmt.Fprint(a.out, "No GPU.\n\n")
	} else {
		a.section("GPUs", a.gpuTable(h.GPUs))
	}
	if len(h.NICs) == 0 {
		fmt.Fprint(a.out, "No RDMA NIC.\n\n")
	} else {
		a.section("NICs", a.nicTable(h.NICs))
	}
	if len(pairs) > 0 {
		a.section("Path types", a.matrix(h, pairs, func(p topo.Path) string {
			return a.paint(p.Type.String(), typeColours(p.Type)...)
		}))
		if h.Matrix == nil {
			a.section("Bandwidths, GB/s in one direction", a.matrix(h, pairs, bandwidthOf))
		}
		a.printLegend(pairs)
	}
	a.printNotes(append(reasons(h), h.Notes...))
}

// reasons say of each device that cannot be used why that is.
func reasons(h *topo.Host) (sentences []string) {
	for _, g := range h.GPUs {
		if g.Reason != "" {
			sentences = append(sentences, fmt.Sprintf("%s cannot be relayed: %s", onHost(g.Host, fmt.Sprintf("GPU%d", g.Index)), g.Reason))
		}
	}
	for _, n := range h.NICs {
		if n.Reason != "" {
			sentences = append(sentences, fmt.Sprintf("%s serves no lane: %s", onHost(n.Host, n.Name), n.Reason))
		}
	}
	return sentences
}

// onHost names a device of one of several hosts.
func onHost(host, name string) string {
	if host == "" {
		return name
	}
	return host + "/" + name
}

// printNotes prints the sentences that go with a host or a plan.
func (a *app) printNotes(notes []string) {
	for _, n := range notes {
		fmt.Fprintf(a.out, "%s %s\n", a.paint("Note:", text.FgYellow), n)
	}
}

func origin(s topo.Source) string {
	if s.File != "" {
		return s.File + " (" + s.Kind + ")"
	}
	return s.Sysfs
}

func (a *app) gpuTable(gpus []topo.GPU) table.Writer {
	t := a.newTable("GPU", "ADDRESS", "NAME", "UUID", "NUMA", "DEVICE", "PCIE", "NVLINK")
	for _, g := range gpus {
		node := ""
		if g.Minor >= 0 {
			node = fmt.Sprintf("/dev/nvidia%d", g.Minor)
		}
		name := strings.TrimSpace(g.Vendor + " " + g.Name)
		if g.MIG {
			name += " (MIG)"
		}
		t.AppendRow(table.Row{
			onHost(g.Host, strconv.Itoa(g.Index)), g.BusID, dash(name), dash(g.UUID), numa(g.NUMA), dash(node), linkRate(g.Place), dash(nvlinks(g)),
		})
	}
	return t
}

// nvlinks counts a GPU's links: "18 to switches", "4 to 3 GPUs".
func nvlinks(g topo.GPU) string {
	switches, links, peers := 0, 0, 0
	for _, l := range g.NVLinks {
		if l.Peer == "" {
			switches += l.Count
		} else {
			links += l.Count
			peers++
		}
	}
	var parts []string
	if switches > 0 {
		parts = append(parts, fmt.Sprintf("%d to NVSwitches", switches))
	}
	if peers > 0 {
		parts = append(parts, fmt.Sprintf("%d to %d GPUs", links, peers))
	}
	return strings.Join(parts, ", ")
}

func (a *app) nicTable(nics []topo.NIC) table.Writer {
	t := a.newTable("NIC", "ADDRESS", "DRIVER", "PORT", "STATE", "LINK LAYER", "RATE", "NUMA", "DEVICE")
	for _, n := range nics {
		node := ""
		if n.Uverbs != "" {
			node = "/dev/infiniband/" + n.Uverbs
		}
		if len(n.Ports) == 0 {
			t.AppendRow(table.Row{onHost(n.Host, n.Name), dash(n.BusID), dash(n.Driver), "-", "-", linkLayer(n, ""), "-", numa(n.NUMA), dash(node)})
		}
		for i, p := range n.Ports {
			row := table.Row{onHost(n.Host, n.Name), dash(n.BusID), dash(n.Driver), strconv.Itoa(p.Number), a.state(p), linkLayer(n, p.LinkLayer), rate(p.RateGbps, "Gb/s"), numa(n.NUMA), dash(node)}
			if i > 0 {
				row[0], row[1], row[2], row[7], row[8] = "", "", "", "", ""
			}
			t.AppendRow(row)
		}
	}
	return t
}

func linkLayer(n topo.NIC, layer string) string {
	switch {
	case n.Ethernet:
		return "Ethernet, no RDMA"
	case n.Software:
		return strings.TrimSpace(layer + " (software)")
	}
	return dash(layer)
}

// linkRate is what a link can do, and what it does now where that is less.
func linkRate(p topo.Place) string {
	if p.LinkNow > 0 && p.LinkNow < p.Link {
		return gigabytes(p.Link) + " GB/s (now " + gigabytes(p.LinkNow) + ")"
	}
	return rate(p.Link, "GB/s")
}

func (a *app) state(p topo.Port) string {
	if p.Active() {
		return a.paint(dash(p.State), text.FgGreen)
	}
	return a.paint(p.State, text.FgRed)
}

func numa(node int) string {
	if node < 0 {
		return "-"
	}
	return strconv.Itoa(node)
}

func rate(r float64, unit string) string {
	if r == 0 {
		return "-"
	}
	return gigabytes(r) + " " + unit
}

// gigabytes prints a figure with as many digits as tell something: 0.5, 12.3,
// 400.
func gigabytes(b float64) string {
	if b < 99.95 {
		return strings.TrimSuffix(strconv.FormatFloat(b, 'f', 1, 64), ".0")
	}
	return strconv.FormatFloat(b, 'f', 0, 64)
}

// matrix has a row and a column for each device, in the manner of `nvidia-smi
// topo -m`.
func (a *app) matrix(h *topo.Host, pairs []topo.Pair, cell func(topo.Path) string) table.Writer {
	labels := make([]string, 0, len(h.GPUs)+len(h.NICs))
	for _, g := range h.GPUs {
		labels = append(labels, onHost(g.Host, fmt.Sprintf("GPU%d", g.Index)))
	}
	for _, n := range h.NICs {
		labels = append(labels, onHost(n.Host, n.Name))
	}
	heading := []any{""}
	for _, l := range labels {
		heading = append(heading, l)
	}
	t := a.newTable(heading...)
	for i, label := range labels {
		row := table.Row{label}
		for j := range labels {
			if i == j {
				row = append(row, "X")
				continue
			}
			row = append(row, cell(pairs[0].Path))
			pairs = pairs[1:]
		}
		t.AppendRow(row)
	}
	return t
}

// bandwidthOf is a path's; a path whose source does not tell one has a dash, and
// one that there is not has 0.
func bandwidthOf(p topo.Path) string {
	if p.Bandwidth == 0 && p.Type != topo.DIS {
		return "-"
	}
	return gigabytes(p.Bandwidth)
}

// typeColours tells at a glance what passes the CPU.
func typeColours(t topo.PathType) []text.Color {
	switch {
	case t <= topo.C2C:
		return []text.Color{text.FgHiGreen}
	case t <= topo.PXB:
		return []text.Color{text.FgGreen}
	case t <= topo.PHB:
		return []text.Color{text.FgYellow}
	default:
		return []text.Color{text.FgRed}
	}
}

var meanings = map[topo.PathType]string{
	topo.NVL:  "NVLink",
	topo.NVB:  "NVLink through another GPU",
	topo.C2C:  "the chip-to-chip link of CPU and GPU",
	topo.PIX:  "one PCIe switch",
	topo.PXB:  "several PCIe switches",
	topo.P2C:  "the chip-to-chip link, then PCIe",
	topo.PXN:  "NVLink to a GPU that is near the NIC",
	topo.PHB:  "a PCIe host bridge (the CPU)",
	topo.NODE: "several host bridges of one NUMA node",
	topo.SYS:  "the link between NUMA nodes",
	topo.DIS:  "no way at all",
}

// printLegend explains the path types that occur, nearest first.
func (a *app) printLegend(pairs []topo.Pair) {
	occurs := map[topo.PathType]bool{}
	for _, p := range pairs {
		occurs[p.Type] = true
	}
	for t := topo.LOC; t <= topo.DIS; t++ {
		if occurs[t] && meanings[t] != "" {
			fmt.Fprintf(a.out, "%s  %s\n", a.paint(fmt.Sprintf("%-4s", t), typeColours(t)...), meanings[t])
		}
	}
}
