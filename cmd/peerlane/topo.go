package main

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/nvml"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/virtualswitch"
)

// hostFlags are the flags that select the host of a command.
type hostFlags struct {
	cmd                *cobra.Command
	input, sysfs, proc string
	// one is the name of a host in a file that describes several.
	one       string
	software  bool
	anyVendor bool
}

// addHost adds the flags that select a host or a file to a command.
func addHost(cmd *cobra.Command) *hostFlags {
	f := addLiveHost(cmd)
	cmd.Flags().StringVar(&f.input, "input", "",
		"read `FILE` (- for standard input) instead of this host: a capture, XML of NCCL or hwloc, or nvidia-smi topo -m")
	completeFiles(cmd, "input", "xml", "txt", "gz")
	return f
}

// addLiveHost adds the flags that select a host to a command.
func addLiveHost(cmd *cobra.Command) *hostFlags {
	f := &hostFlags{cmd: cmd}
	cmd.Flags().StringVar(&f.sysfs, "sysfs", "/sys", "read sysfs from `DIR`")
	cmd.Flags().StringVar(&f.proc, "proc", "/proc", "read procfs from `DIR`")
	completeDirectories(cmd, "sysfs", "proc")
	return f
}

// addSoftware adds the flag that lets plans use software RDMA.
func (f *hostFlags) addSoftware() {
	f.cmd.Flags().BoolVar(&f.software, "software", false,
		"also use software RDMA (rxe, siw), which cannot reach GPU memory")
}

func (f *hostFlags) read() (*topo.Host, error) {
	if f.input != "" && (f.cmd.Flags().Changed("sysfs") || f.cmd.Flags().Changed("proc")) {
		return nil, usageError{f.cmd.CommandPath(), errors.New(
			"--input reads a file; --sysfs and --proc read a host: give one or the other")}
	}
	for flag, dir := range map[string]string{"sysfs": f.sysfs, "proc": f.proc} {
		if info, err := os.Stat(dir); f.cmd.Flags().Changed(flag) && (err != nil || !info.IsDir()) {
			return nil, fmt.Errorf("--%s %s: not a readable directory; name the directory of a host's files", flag, dir)
		}
	}
	if !f.cmd.Flags().Changed("host") {
		return reader.Read(f.input, f.options())
	}
	if f.input == "" {
		return nil, usageError{f.cmd.CommandPath(), errors.New("--host is a host of a file: give --input as well")}
	}
	h, err := reader.Read(f.input, f.options())
	if err != nil {
		return nil, err
	}
	h, err = h.Only(f.one)
	if err != nil {
		return nil, fmt.Errorf("--host of %s: %w", f.input, err)
	}
	return h, nil
}

// completeHosts completes the name of a host in the file of --input. A completion must not read
// standard input, so "-" has no completion.
func (f *hostFlags) completeHosts() ([]string, cobra.ShellCompDirective) {
	if f.input == "" || f.input == "-" {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	h, err := reader.Read(f.input, f.options())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for n, hash := range h.Hosts() {
		names = append(names, fmt.Sprintf("%d\t%s", n, hash))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// live reports whether the flags select this running host.
func (f *hostFlags) live() bool { return f.input == "" && f.sysfs == "/sys" }

// options returns the options for reading a host (not a file).
func (f *hostFlags) options() topo.Options {
	o := topo.Options{Sysfs: f.sysfs, Proc: f.proc}
	if f.sysfs == "/sys" && f.proc == "/proc" {
		o.NVML = nvml.New() // NVML describes only the running host
	}
	return o
}

func newTopoCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topo",
		Short: "Show GPUs, RDMA NICs and the paths between them",
		Long: `Show the GPUs and RDMA NICs of this host, or of a file, and for each pair the type and
the bandwidth of the path between them.

The content of a file identifies its format: a capture (peerlane topo capture), a
topology of NCCL (NCCL_TOPO_DUMP_FILE) or of hwloc 2 (lstopo --of xml), or the output of
nvidia-smi topo -m, which has path types and no bandwidths.

With -o xml the output is a topology file of NCCL 2.30, for NCCL_TOPO_FILE. With
--virtual it describes the virtual switch: beside each GPU a virtual NIC peerlane_N,
with the GUID and the speed of the NIC that the plan assigns to GPU N. The configuration
file affects the plan.

With -o svg or -o html the output is a picture in one file: NUMA nodes, PCIe switches,
GPUs and NICs as a tree, with the rate of each link. peerlane plan also draws lanes.`,
		Example: `  peerlane topo
  peerlane topo --nics
  peerlane topo --input topo.xml
  peerlane topo -o xml > topo.xml
  peerlane topo -o xml --virtual > virtual.xml
  peerlane topo -o svg > host.svg
  peerlane topo -o json | jq '[.gpus[].busid, .nics[].name] as $d | .paths as $p |
    .pairs[] | {from: $d[.[0]], to: $d[.[1]]} + $p[.[2]] | select(.to == "mlx5_0")'`,
		Args: noArgs,
	}
	cmd.AddCommand(newCaptureCommand(a))
	host, form, rules, virtual, facts, functions := addHost(cmd), addForm(cmd, formXML, formSVG,
		formHTML), string(topo.RulesNCCL), false, false, false
	cmd.Flags().StringVar(&rules, "rules", rules, "name paths by the `RULES` of nccl or smi (nvidia-smi)")
	complete(cmd, "rules", string(topo.RulesNCCL), string(topo.RulesSMI))
	cmd.Flags().BoolVar(&virtual, "virtual", false, "write the virtual switch instead of the host; needs -o xml")
	cmd.Flags().BoolVar(&functions, "functions", false,
		"show virtual functions and subfunctions as separate NICs; JSON always does")
	cmd.Flags().BoolVar(&facts, "nics", false, "show only the facts of ibstat: firmware, GUIDs, states, LIDs")
	cmd.RunE = func(*cobra.Command, []string) error {
		by, err := topo.ParseRules(rules)
		switch {
		case err != nil:
			return usageError{cmd.CommandPath(), err}
		case facts && form.value != formTable:
			return usageError{cmd.CommandPath(),
				fmt.Errorf("--nics prints a table, and -o %s has every field: give one or the other", form.value)}
		case virtual && form.value != formXML:
			return usageError{cmd.CommandPath(), errors.New("--virtual goes with -o xml")}
		case form.value == formXML && cmd.Flags().Changed("rules"):
			return usageError{cmd.CommandPath(),
				errors.New("--rules changes path names, and -o xml has none: give one or the other")}
		case form.picture() && cmd.Flags().Changed("rules"):
			return usageError{cmd.CommandPath(),
				fmt.Errorf("--rules changes path names, and -o %s has none: give one or the other", form.value)}
		}
		h, err := host.read()
		if err != nil {
			return err
		}
		if !functions && form.value != formJSON && !virtual {
			all, left := h, topo.Functions(nil)
			if h, left = all.FoldFunctions(nil); left != nil {
				h.Notes = append(slices.Clone(h.Notes), foldedFunctions(h, left)...)
			}
		}
		if facts {
			a.printNICs(h)
			return nil
		}
		if form.picture() {
			return a.printPicture(form.value, h, nil)
		}
		if form.value == formXML {
			return a.printXML(h, virtual)
		}
		if form.value == formJSON {
			// Most of the heap is tables of pairs, which the command uses until its end.
			defer debug.SetGCPercent(debug.SetGCPercent(20))
			return a.printTopology(topology{Version: topologyVersion, Rules: by, Host: withLists(h)}, graph.NewPathTable(h, by))
		}
		a.printTopo(h, graph.NewTable(h, by))
		return nil
	}
	return cmd
}

// printXML prints a host, or its virtual switch, as NCCL's topology file.
func (a *app) printXML(h *topo.Host, virtual bool) error {
	if virtual {
		p, err := a.planFor(h, false, false)
		if err != nil {
			return err
		}
		if h, err = virtualswitch.New(h, p.plan); err != nil {
			return err
		}
	}
	text, err := ncclxml.Write(h)
	if err != nil {
		return err
	}
	_, err = a.out.Document().Write(text)
	return err
}

// topologyVersion is the version of the JSON document, which docs/topology.schema.json describes.
const topologyVersion = 3

// topology is the JSON document of `peerlane topo -o json`.
type topology struct {
	Version int        `json:"version"`
	Rules   topo.Rules `json:"rules"`
	*topo.Host
	Paths []graph.DistinctPath `json:"paths"`
	Pairs [][4]int             `json:"pairs"`
}

// withLists returns a copy of h with empty lists in place of nil, which JSON would write as null.
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

// foldedFunctions returns a sentence for each NIC whose functions the table omits.
func foldedFunctions(h *topo.Host, functions topo.Functions) (sentences []string) {
	for _, n := range h.NICs {
		if names := functions.Of(n); len(names) > 0 {
			sentences = append(sentences,
				fmt.Sprintf("%s has %d virtual functions or subfunctions, %s to %s: they share its port, and are as near as it "+
					"is; --functions shows them",
					onHost(n.Host, n.Name), len(names), names[0], names[len(names)-1]))
		}
	}
	return sentences
}

func (a *app) printTopo(h *topo.Host, paths *graph.Table) {
	a.out.Printf("Host read from %s\n\n", origin(h.Source))
	if len(h.GPUs) == 0 {
		a.out.PrintLines("No GPU.\n\n")
	} else {
		a.section("GPUs", a.gpuTable(h.GPUs))
	}
	if len(h.NICs) == 0 {
		a.out.PrintLines("No RDMA NIC.\n\n")
	} else {
		a.section("NICs", a.nicTable(h.NICs))
	}
	if len(paths.Paths) > 0 {
		labels, legend := matrixLabels(h)
		types, occur, counted := a.typeCells(h, paths)
		a.printMatrix("Path types", labels, paths, types, affinities(h)...)
		if h.Matrix == nil {
			a.printMatrix("Bandwidths, GB/s in one direction", labels, paths, bandwidthCells(paths))
		}
		a.printLegend(occur, counted)
		for _, line := range legend {
			a.out.Println(line)
		}
	}
	a.printNotes(append(reasons(h), h.Notes...))
}

// printNICs prints the NICs of a host, without GPUs and paths.
func (a *app) printNICs(h *topo.Host) {
	a.out.Printf("Host read from %s\n\n", origin(h.Source))
	if len(h.NICs) == 0 {
		a.out.PrintLines("No RDMA NIC.\n\n")
		return
	}
	a.section("NICs", a.factsTable(h.NICs))
}

// reasons returns a sentence for each unusable device.
func reasons(h *topo.Host) (sentences []string) {
	for _, g := range h.GPUs {
		if g.Reason != "" {
			sentences = append(sentences, fmt.Sprintf("%s cannot be relayed: %s", onHost(g.Host, fmt.Sprintf("GPU%d", g.Index)),
				g.Reason))
		}
	}
	for _, n := range h.NICs {
		if n.Reason != "" {
			sentences = append(sentences, fmt.Sprintf("%s serves no lane: %s", onHost(n.Host, n.Name), n.Reason))
		}
	}
	return sentences
}

// onHost adds the host, if any, to the name of a device.
func onHost(host, name string) string {
	if host == "" {
		return name
	}
	return host + "/" + name
}

// printNotes prints the notes of a host or a plan.
func (a *app) printNotes(notes []string) {
	for _, n := range notes {
		a.out.Printf("%s %s\n", a.paint("Note:", yellow), n)
	}
}

func origin(s topo.Source) string {
	if s.File != "" {
		return s.File + " (" + s.Kind + ")"
	}
	return s.Sysfs
}

func (a *app) gpuTable(gpus []topo.GPU) *table.Writer {
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
			onHost(g.Host, strconv.Itoa(g.Index)), g.BusID, dash(name), dash(g.UUID), numa(g.NUMA), dash(node), linkRate(
				g.Place), dash(nvlinks(g)),
		})
	}
	return t
}

// nvlinks describes a GPU's links: "18 to switches", "4 to 3 GPUs".
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

func (a *app) nicTable(nics []topo.NIC) *table.Writer {
	const address = 2 // index of the address column
	heading := []any{"NIC", "ADDRESS", "DRIVER", "PORT", "STATE", "LINK LAYER", "RATE", "NUMA", "DEVICE"}
	dataDirect := slices.ContainsFunc(nics, func(n topo.NIC) bool { return n.DataDirect != "" })
	if dataDirect {
		heading = slices.Insert(heading, address, any("DATA DIRECT"))
	}
	t := a.newTable(heading...)
	add := func(row table.Row, n topo.NIC) {
		if dataDirect {
			cell := ""
			if row[0] != "" {
				cell = dash(n.DataDirect)
			}
			row = slices.Insert(row, address, any(cell))
		}
		t.AppendRow(row)
	}
	for _, n := range nics {
		node := ""
		if n.Uverbs != "" {
			node = "/dev/infiniband/" + n.Uverbs
		}
		if len(n.Ports) == 0 {
			add(table.Row{onHost(n.Host, n.Name), dash(n.BusID), dash(n.Driver), "-", "-", linkLayer(n, ""), "-", numa(n.NUMA),
				dash(node)}, n)
		}
		for i, p := range n.Ports {
			row := table.Row{onHost(n.Host, n.Name), dash(n.BusID), dash(n.Driver), strconv.Itoa(p.Number), a.state(p),
				linkLayer(n, p.LinkLayer), rate(p.RateGbps, "Gb/s"), numa(n.NUMA), dash(node)}
			if i > 0 {
				row[0], row[1], row[2], row[7], row[8] = "", "", "", "", ""
			}
			add(row, n)
		}
	}
	return t
}

// factsTable returns a table with the columns of ibstat, with a row for each port.
func (a *app) factsTable(nics []topo.NIC) *table.Writer {
	t := a.newTable("NIC", "FIRMWARE", "NODE GUID", "PORT", "PORT GUID", "STATE", "PHYSICAL STATE", "LID", "SM LID",
		"RATE", "LINK LAYER")
	for _, n := range nics {
		of := []any{onHost(n.Host, n.Name), dash(n.Firmware), dash(n.GUID)}
		if len(n.Ports) == 0 {
			t.AppendRow(append(of, "-", "-", "-", "-", "-", "-", "-", linkLayer(n, "")))
		}
		for i, p := range n.Ports {
			if i > 0 {
				of = []any{"", "", ""}
			}
			t.AppendRow(append(of, strconv.Itoa(p.Number), dash(p.GUID), a.state(p), dash(p.PhysicalState), lid(p.LID),
				lid(p.SMLID), rate(p.RateGbps, "Gb/s"), linkLayer(n, p.LinkLayer)))
		}
	}
	return t
}

func lid(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
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

// linkRate formats the maximum rate of a link, and the current rate if lower.
func linkRate(p topo.Place) string {
	if p.LinkNow > 0 && p.LinkNow < p.Link {
		return gigabytes(p.Link) + " GB/s (now " + gigabytes(p.LinkNow) + ")"
	}
	return rate(p.Link, "GB/s")
}

func (a *app) state(p topo.Port) terminal.Styled {
	if p.Active() {
		return a.paint(dash(p.State), green)
	}
	return a.paint(p.State, red)
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

// gigabytes formats a figure with its significant digits: 0.001, 0.5, 12.3, 400.
func gigabytes(b float64) string {
	if b > 0 && b < 0.1 {
		return strconv.FormatFloat(b, 'g', 1, 64)
	}
	if b < 99.95 {
		return strings.TrimSuffix(strconv.FormatFloat(b, 'f', 1, 64), ".0")
	}
	return strconv.FormatFloat(b, 'f', 0, 64)
}

// maxLabel is the length of the longest NIC name in a heading of a matrix, mlx5_10. With longer
// headings, sixteen GPUs would be too wide for a screen.
const maxLabel = 7

// matrixLabels returns the headings of GPUs and NICs in a matrix. Long names become NIC0, NIC1 and
// so on, as in nvidia-smi, and the names of several hosts become H0, H1; legend maps these to the
// names.
func matrixLabels(h *topo.Host) (labels, legend []string) {
	hosts := map[string]string{"": ""}
	label := func(host, name string) {
		if _, known := hosts[host]; !known {
			hosts[host] = fmt.Sprintf("H%d", len(hosts)-1)
			legend = append(legend, fmt.Sprintf("%-4s  %s", hosts[host], terminal.Sanitise(host)))
		}
		labels = append(labels, terminal.Sanitise(onHost(hosts[host], name)))
	}
	for _, g := range h.GPUs {
		label(g.Host, fmt.Sprintf("GPU%d", g.Index))
	}
	long := slices.ContainsFunc(h.NICs, func(n topo.NIC) bool { return len(n.Name) > maxLabel })
	for i, n := range h.NICs {
		name := n.Name
		if long {
			name = fmt.Sprintf("NIC%d", i)
		}
		label(n.Host, name)
		if long {
			legend = append(legend, fmt.Sprintf("%-4s  %s", name, terminal.Sanitise(onHost(hosts[n.Host], n.Name))))
		}
	}
	return labels, legend
}

// nvlinkCounts holds the number of NVLinks between two GPUs by index.
type nvlinkCounts struct {
	direct   map[[2]int]int
	switches []int
}

func newNVLinkCounts(h *topo.Host) nvlinkCounts {
	places := map[string]int{}
	for i, g := range h.GPUs {
		places[onHost(g.Host, g.BusID)] = i
	}
	c := nvlinkCounts{map[[2]int]int{}, make([]int, len(h.GPUs))}
	for from, g := range h.GPUs {
		for _, l := range g.NVLinks {
			if l.Peer == "" {
				c.switches[from] = l.Count
			} else if to, known := places[onHost(g.Host, l.Peer)]; known {
				// Both ends list the same links.
				c.direct[[2]int{from, to}] = max(c.direct[[2]int{from, to}], l.Count)
				c.direct[[2]int{to, from}] = max(c.direct[[2]int{to, from}], l.Count)
			}
		}
	}
	return c
}

// of returns the number of NVLinks of a path between two devices; 0 for a path without NVLink or
// with an unknown number.
func (c nvlinkCounts) of(from, to int, p topo.Path) int {
	if p.Type != topo.NVL || max(from, to) >= len(c.switches) {
		return 0
	}
	if n := c.direct[[2]int{from, to}]; n > 0 {
		return n
	}
	return min(c.switches[from], c.switches[to])
}

// typeCells returns path types in the notation of nvidia-smi, with the number of NVLinks if known.
// occur holds the types of these paths, and counted reports whether any path has a count.
func (a *app) typeCells(h *topo.Host, paths *graph.Table) (c cells, occur map[topo.PathType]bool, counted bool) {
	links := newNVLinkCounts(h)
	places := map[int]int32{} // indices in the texts, by number of NVLinks
	occur = map[topo.PathType]bool{}
	for _, p := range paths.Paths {
		c.texts = append(c.texts, a.paint(p.Type.String(), typeColours(p.Type)...))
	}
	seen := make([]bool, len(paths.Paths)) // indices of paths without NVLinks
	for from := range len(h.GPUs) + len(h.NICs) {
		if paths.First(from) != from {
			continue // a row with the same paths and without NVLinks
		}
		for to, at := range paths.Row(from) {
			if at < 0 || seen[at] && paths.Paths[at].Type != topo.NVL {
				continue
			}
			p := paths.Paths[at]
			n := links.of(from, to, p)
			if n == 0 {
				seen[at], occur[p.Type] = true, true
				continue
			}
			counted = true
			if _, known := places[n]; !known {
				places[n] = int32(len(c.texts))
				c.texts = append(c.texts, a.paint(fmt.Sprintf("NV%d", n), typeColours(p.Type)...))
			}
		}
	}
	if !counted {
		return c, occur, false
	}
	c.at = func(from, to int, path int32) int32 {
		if n := links.of(from, to, paths.Paths[path]); n > 0 {
			return places[n]
		}
		return path
	}
	return c, occur, counted
}

// bandwidthCells returns the bandwidths of paths.
func bandwidthCells(paths *graph.Table) (c cells) {
	for _, p := range paths.Paths {
		c.texts = append(c.texts, terminal.Paint(bandwidthOf(p)))
	}
	return c
}

// affinities returns columns with the local processors and the NUMA node of each GPU, if known.
func affinities(h *topo.Host) []column {
	cpus, nodes := column{heading: "CPU AFFINITY"}, column{heading: "NUMA AFFINITY"}
	known, knownNode := false, false
	for _, g := range h.GPUs {
		list := ""
		for _, c := range h.CPUs {
			if c.Host == g.Host && c.NUMA == g.NUMA {
				list = c.CPUs
			}
		}
		known, knownNode = known || list != "", knownNode || g.NUMA >= 0
		cpus.cells, nodes.cells = append(cpus.cells, dash(list)), append(nodes.cells, numa(g.NUMA))
	}
	for range h.NICs { // like nvidia-smi, which prints no affinity of NICs
		cpus.cells, nodes.cells = append(cpus.cells, ""), append(nodes.cells, "")
	}
	var columns []column
	if known {
		columns = append(columns, cpus)
	}
	if knownNode {
		columns = append(columns, nodes)
	}
	return columns
}

// bandwidthOf formats the bandwidth of a path: a dash if the source does not state it, 0 without a
// path.
func bandwidthOf(p topo.Path) string {
	if p.Bandwidth == 0 && p.Type != topo.DIS {
		return "-"
	}
	return gigabytes(p.Bandwidth)
}

// typeColours returns the SGR attributes of a path type, from bright green (nearest) to red
// (farthest).
func typeColours(t topo.PathType) []int {
	switch {
	case t <= topo.C2C:
		return []int{brightGreen}
	case t <= topo.PXB:
		return []int{green}
	case t <= topo.PHB:
		return []int{yellow}
	default:
		return []int{red}
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
	topo.DIS:  "no path",
}

// printLegend explains the path types that occur, nearest first.
func (a *app) printLegend(occur map[topo.PathType]bool, counted bool) {
	if counted {
		a.out.Printf("%s  %s\n", a.paint("NV# ", typeColours(topo.NVL)...), "so many NVLinks")
	}
	for t := topo.LOC; t <= topo.DIS; t++ {
		if occur[t] && meanings[t] != "" {
			a.out.Printf("%s  %s\n", a.paint(fmt.Sprintf("%-4s", t), typeColours(t)...), meanings[t])
		}
	}
}
