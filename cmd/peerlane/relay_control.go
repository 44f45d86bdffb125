//go:build !front

package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/nvml"
)

// relayNames describes the argument that these commands share.
const relayNames = `NAME is a container's name or id, as docker ps, podman ps and crictl ps show them, a
pod's name or NAMESPACE/POD, a generation, or the beginning of an id or generation.`

func newInspectCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect NAME...",
		Short: "Show a container's relay in detail",
		Long: `Show a container's relay in detail: lanes, sockets, processes and control group, the
relay's report on clients, memory and CUDA contexts, and the end of its log.

` + relayNames,
		Example: `  peerlane relay inspect trainer
  peerlane relay inspect 4f2a -o json`,
	}
	return a.onNamedRelays(cmd, func(infos []generation.Info, form string) error {
		list := []control.Inspection{}
		for _, info := range infos {
			i, err := control.Inspect(a.layout, info.ID)
			if err != nil {
				return asRoot(err)
			}
			list = append(list, i)
		}
		if form == formJSON {
			return a.printJSON(list)
		}
		for n, i := range list {
			if n > 0 {
				a.out.Println()
			}
			a.printInspection(i)
		}
		return nil
	})
}

// onNamedRelays completes a command whose arguments name relays.
func (a *app) onNamedRelays(cmd *cobra.Command, run func(infos []generation.Info, form string) error) *cobra.Command {
	cmd.Args, cmd.ValidArgsFunction = someNames, a.completeRelays
	form := addForm(cmd)
	cmd.RunE = func(_ *cobra.Command, names []string) error {
		infos, err := a.findRelays(names)
		if err != nil {
			return asRoot(err)
		}
		return run(infos, form.value)
	}
	return cmd
}

// onNamedOrAllRelays is onNamedRelays for a command with the flag --all. forAll runs first if the flag
// is set.
func (a *app) onNamedOrAllRelays(
	cmd *cobra.Command,
	usage string,
	forAll func(paths.Layout) error,
	run func(infos []generation.Info, err error, all bool, form string) error,
) *cobra.Command {
	all := false
	cmd.Flags().BoolVar(&all, "all", false, usage)
	form := addForm(cmd)
	cmd.Args, cmd.ValidArgsFunction = namesOr(&all), a.completeRelays
	cmd.RunE = func(_ *cobra.Command, names []string) error {
		if all {
			if err := forAll(a.layout); err != nil {
				return asRoot(err)
			}
		}
		infos, err := a.relaysOrAll(names, all)
		return run(infos, err, all, form.value)
	}
	return cmd
}

func (a *app) printInspection(i control.Inspection) {
	t := a.newTable("WHAT", "VALUE")
	row := func(what, value string) { t.AppendRow(table.Row{what, dash(value)}) }
	row("generation", i.ID)
	row("container", i.Container.ID)
	row("name", strings.Join(control.Names(i.Container), ", "))
	row("runtime root", i.Container.RuntimeRoot)
	row("bundle", i.Container.Bundle)
	init := strconv.Itoa(i.Init.PID)
	if !i.Alive {
		init += ", which has ended"
	}
	row("init", init)
	row("created", fmt.Sprintf("%s, %s", i.Created.Format(time.RFC3339), humanize.Time(i.Created)))
	t.AppendRow(table.Row{"state", a.relayState(i.Info)})
	row("starts", strconv.Itoa(i.Status.Starts))
	row("last error", i.Status.Error)
	for _, lane := range i.Config.Lanes {
		row("lane", laneLine(lane))
	}
	for _, p := range i.Pairs {
		row("pair", pairWords(p))
	}
	for _, t := range i.Triples {
		row("triple", tripleWords(t))
	}
	for _, sentence := range i.Ignored {
		row("without effect", sentence)
	}
	row("copies", tuningWords(i.Config))
	row("route, transport", i.Config.Route+", "+i.Config.Transport)
	if i.Config.Reserve == launch.ReserveStart {
		row("staging taken", "when the container started")
	}
	for _, p := range i.Processes {
		text := fmt.Sprintf("process %d, %s of memory, %.2f s of CPU", p.PID, humanize.Bytes(p.Resident), p.CPU)
		if len(p.Devices) > 0 {
			text += ", holds " + strings.Join(p.Devices, ", ")
		}
		row(p.Role, text)
	}
	printNCCLConf(row, i.NCCLConf)
	printSandbox(row, i.Sandbox)
	row("control group", i.Cgroup)
	row("clients' socket", i.ClientSocket)
	row("peers' socket", i.PeerSocket)
	row("log", i.Log)
	if r := i.Report; r != nil {
		printReport(row, r, i.Config)
	} else {
		row("no report", i.NoReport)
	}
	a.out.Println(t.Render())
	for _, line := range i.LogTail {
		a.out.Println("  " + strings.ReplaceAll(line, "\t", "        "))
	}
}

// printReport prints a relay's own report.
func printReport(row func(what, value string), r *launch.Report, config launch.Config) {
	row("CUDA contexts", strings.Join(r.Contexts, ", "))
	for _, w := range r.Writes {
		row("short copies", writesWords(w))
	}
	for _, s := range r.Staging {
		row("staging", stagingWords(s))
	}
	printNetwork(row, r.Network)
	for _, c := range r.Connections {
		row("connection", fmt.Sprintf("%d of process %d, route %s, transport %s: %s", c.Number, c.PID, c.Route,
			dash(c.Transport), dash(c.Path)))
		if c.Registration != "" {
			row("  memory", c.Registration)
		}
	}
	for _, c := range r.Clients {
		row("client", clientWords(c))
	}
	if r.MoreClients > 0 {
		row("client", fmt.Sprintf("and %d more", r.MoreClients))
	}
	row("sent, received", fmt.Sprintf("%s, %s (staged %s, direct %s)", humanize.Bytes(r.Sent),
		humanize.Bytes(r.Received), humanize.Bytes(r.Staged), humanize.Bytes(r.Direct)))
	of := func(used, limit int) string { return fmt.Sprintf("%d of %d", used, limit) }
	row("in use", fmt.Sprintf(
		"clients %s, memories %s, connections %s, files %s, host memory %s of %s, staging memory of clients %s of %s", of(
			r.Used.Clients, r.Limits.Clients),
		of(r.Used.Memories, r.Limits.Memories), of(r.Used.Connections, r.Limits.Connections), of(r.Used.Descriptors,
			r.Limits.Descriptors),
		humanize.IBytes(r.Used.HostMemory), humanize.IBytes(r.Limits.HostMemory), humanize.IBytes(
			r.Used.Staging), humanize.IBytes(r.Limits.Staging)))
	if own := config.OwnHostMemory; own > 0 {
		row("host memory limit", fmt.Sprintf("%s for clients, slots and rings together, from the container's memory limit",
			humanize.IBytes(own)))
	}
	row("wrong handles", strconv.FormatUint(r.BadHandles, 10))
}

// laneLine describes a lane with its GPUs and NICs.
func laneLine(lane launch.Lane) string {
	var servers []string
	for _, s := range lane.Servers {
		servers = append(servers, strconv.Itoa(s.Index))
	}
	var spares []string
	for _, s := range lane.Spares {
		spares = append(spares, strconv.Itoa(s.Index))
	}
	return fmt.Sprintf("GPU %d (%s, %s), %s; servers %s; spares %s; NICs %s", lane.GPU.Index, lane.GPU.BusID,
		dash(lane.GPU.UUID), lane.Role,
		dash(strings.Join(servers, ", ")), dash(strings.Join(spares, ", ")), dash(strings.Join(lane.NICs, ", ")))
}

// stagingWords describes staging memory.
func stagingWords(s launch.Staging) string {
	text := humanize.IBytes(s.Bytes)
	if s.Bytes != s.Wanted {
		text += " of " + humanize.IBytes(s.Wanted)
	}
	if s.Transport != "" {
		text += fmt.Sprintf(" in host memory for transport %s: the lane of %s", s.Transport, s.Lane)
	} else if s.Host {
		text += " in host memory: the lane of " + s.Lane + " bounces"
	} else {
		text += " on " + s.GPU
	}
	if s.Slots > 0 {
		text += fmt.Sprintf(", %d slots of %s each way by %d streams", s.Slots, humanize.IBytes(s.SlotBytes), s.Streams)
	}
	if s.Pages != "" {
		text += ", in " + s.Pages
	}
	if s.Note != "" {
		text += ": " + s.Note
	}
	if s.Clients > 0 {
		text += fmt.Sprintf(", and %s for clients that copy themselves", humanize.IBytes(s.Clients))
	}
	return text
}

// clientWords describes a client process.
func clientWords(c launch.Client) string {
	host := ""
	if c.HostMemory > 0 {
		host = fmt.Sprintf(" (%s of the host's)", humanize.IBytes(c.HostMemory))
	}
	if c.Staging > 0 {
		host += fmt.Sprintf(" (%s on server GPUs)", humanize.IBytes(c.Staging))
	}
	if c.IPCMemories > 0 {
		host += fmt.Sprintf(" (%d by CUDA IPC)", c.IPCMemories)
	}
	program := ""
	if c.Program != "" {
		program = " of " + c.Program
	}
	return fmt.Sprintf("process %d%s: %d memories with %s%s, %d connections", c.PID, program, c.Memories,
		humanize.IBytes(c.Bytes), host, c.Connections)
}

// printNCCLConf prints the file that sets NCCL's variables in the container.
func printNCCLConf(row func(what, value string), c control.NCCLConf) {
	switch c.File {
	case control.NCCLConfPeerlane:
		row("/etc/nccl.conf", "Peerlane's: the host's /etc/peerlane/nccl.conf, as it was when the container started")
	case control.NCCLConfContainer:
		row("/etc/nccl.conf", "the container's own: of its image, a volume or a program in it")
	default:
		row("/etc/nccl.conf", "none: "+c.Reason)
	}
	for _, e := range c.Environment {
		row("  comes first", e)
	}
}

// printNetwork prints the relay's network address, and the relays of other hosts that are
// connected to it.
func printNetwork(row func(what, value string), n *launch.NetworkReport) {
	switch {
	case n == nil:
		return
	case n.Listening == "":
		row("network", "none: "+n.Error)
		return
	}
	row("network", "listening at "+n.Listening)
	if v := n.Verbs; v != nil {
		for _, nic := range v.NICs {
			row("RDMA", nic)
		}
		for _, resources := range v.Resources {
			row("  of "+resources.NIC, resources.String())
		}
		if v.Error != "" {
			row("RDMA", "none: "+v.Error)
		}
	}
	for _, r := range n.Rails {
		row("  "+r.Interface, networkRail(r))
	}
	for _, p := range n.Peers {
		who := "from"
		if p.Dialed {
			who = "to"
		}
		row("other relay",
			fmt.Sprintf("%s %s: %d connections of clients, %d messages in %d writes, %d writes of data over tcp, %d of them "+
				"with the messages",
				who, p.Name, p.Channels, p.Messages, p.Batches, p.Writes, p.Eager))
		switch p.Transport {
		case launch.TransportVerbs:
			row("  its data", "over verbs, "+p.Way)
		case launch.TransportTCP:
			row("  its data", "over tcp: "+dash(p.Way))
		}
		if p.Zerocopy != "" && p.Transport != launch.TransportVerbs {
			row("  MSG_ZEROCOPY", p.Zerocopy)
		}
	}
}

// networkRail describes an interface and its traffic.
func networkRail(r launch.NetworkRail) string {
	words := []string{"no rail"}
	if r.Rail >= 0 {
		words[0] = fmt.Sprintf("rail %d", r.Rail)
	}
	if r.Device != "" {
		words = append(words, "RDMA device "+r.Device)
	}
	if r.Listening != "" {
		words = append(words, "listening at "+r.Listening)
	}
	if r.Down {
		words = append(words, "down")
	}
	return fmt.Sprintf("%s: sent %s, received %s", strings.Join(words, ", "), humanize.Bytes(r.Sent),
		humanize.Bytes(r.Received))
}

func printSandbox(row func(what, value string), s control.Confinement) {
	row("sandbox", s.Mode)
	if r := s.Relay; r != nil {
		row("  uid, gid, groups", fmt.Sprintf("%d, %d, %s", r.UID, r.GID, dash(strings.Trim(fmt.Sprint(r.Groups), "[]"))))
		capabilities := "none"
		if r.Capabilities != 0 {
			capabilities = fmt.Sprintf("%#x", r.Capabilities)
		}
		row("  capabilities", capabilities)
		for _, part := range []struct {
			what string
			so   bool
		}{{"no_new_privs", r.NoNewPrivs}, {"seccomp filter", r.Seccomp}, {"own root", r.OwnRoot}, {"own network",
			r.OwnNetwork}} {
			row("  "+part.what, map[bool]string{true: "yes", false: "no"}[part.so])
		}
		landlock := "no"
		if s.Landlock > 0 {
			landlock = fmt.Sprintf("yes, version %d", s.Landlock)
		}
		row("  Landlock", landlock)
	}
	for _, missing := range s.Missing {
		row("  missing", missing)
	}
}

func newStopCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stop NAME...",
		Short: "Stop a container's relay until it is resumed",
		Long: `End a container's relay, by SIGKILL after 5 seconds. The operations of clients fail, and
the relay's socket refuses clients with the reason, until peerlane relay resume.

` + relayNames,
		Example: `  peerlane relay stop trainer
  peerlane relay stop 4f2a -o json`,
	}
	return a.onNamedRelays(cmd, func(infos []generation.Info, form string) error {
		relays := awaited{}
		err := a.all(infos, control.Stop)
		if err == nil {
			relays, err = a.await(infos, generation.StateStopped, 30*time.Second, form)
		}
		return a.printAwaited(relays, err, form)
	})
}

// awaited is the JSON document of a command that waits for relays.
type awaited struct {
	Relays []awaitedRelay `json:"relays"`
}

type awaitedRelay struct {
	ID        string `json:"id"`
	Container string `json:"container"`
	// State is a state of package generation, or "ended" if the container has ended.
	State string `json:"state"`
}

// printAwaited prints the JSON document of a command that waited for relays. With form table, await
// has printed the progress.
func (a *app) printAwaited(relays awaited, err error, form string) error {
	if form == formJSON && relays.Relays != nil {
		return errors.Join(asRoot(err), a.printJSON(relays))
	}
	return asRoot(err)
}

func newDrainCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "drain NAME... | --all",
		Short: "Make relays release the GPUs, for a driver update or a reset",
		Long: `Make relays release the GPUs: a relay starts no new work, unmaps memory after the last
copy, and ends, and with it its CUDA context. Clients get the error that the relay was
drained, and new clients are refused until peerlane relay resume.

With --all, containers that start later get no relay either, until peerlane relay resume
--all or the next boot: they start, and their clients are refused with the reason.

The command waits until the relays have ended, and then lists the other processes that
use a GPU, including processes of the containers. Exit status 1: the timeout expired;
the relays still end when their work has ended.

/proc shows the processes with an open GPU device; NVML, if installed, shows processes
with a compute or graphics context, and their GPU memory.

` + relayNames,
		Example: `  peerlane relay drain --all && nvidia-smi --gpu-reset -i 3
  peerlane relay drain trainer --timeout 10s`,
	}
	timeout := time.Minute
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "maximum time to wait")
	const usage = "every relay of this host, and those of containers that start later"
	drain := func(infos []generation.Info, err error, _ bool, form string) error {
		relays := awaited{[]awaitedRelay{}}
		if err == nil {
			err = a.all(infos, control.Drain)
		}
		if err == nil {
			relays, err = a.await(infos, generation.StateDrained, timeout, form)
		}
		holders, looked := a.holders(nvml.New())
		if looked != nil {
			return asRoot(errors.Join(err, looked))
		}
		if form == formJSON {
			return errors.Join(asRoot(err), a.printJSON(struct {
				awaited
				Holders []control.Holder `json:"holders"`
			}{relays, holders}))
		}
		a.printHolders(holders, err == nil)
		return asRoot(err)
	}
	return a.onNamedOrAllRelays(cmd, usage, generation.DrainAll, drain)
}

// holders returns the processes that use GPUs: from NVML, which knows the processes of its driver,
// or else from /proc, which shows every process with an open GPU device, for any purpose.
func (a *app) holders(library interface {
	Processes() ([]topo.GPUProcess, error)
}) ([]control.Holder, error) {
	named, err := library.Processes()
	if err != nil && !errors.Is(err, topo.ErrNoNVML) {
		a.log.Warnf("NVML does not name all processes that use GPUs, and /proc alone says who has one open: %s",
			strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return control.Holders(a.layout, named)
}

// printHolders lists the processes that use GPUs. It prints that no process does only if all
// relays are drained.
func (a *app) printHolders(holders []control.Holder, drained bool) {
	if len(holders) > 0 {
		a.out.Println("These processes use GPUs:")
		a.out.Println(a.holderTable(holders).Render())
	} else if drained {
		a.out.Println("No process uses a GPU.")
	}
}

func (a *app) holderTable(holders []control.Holder) *table.Writer {
	t := a.newTable("PID", "COMMAND", "CONTAINER", "USES", "HAS OPEN")
	for _, h := range holders {
		var uses []string
		for _, u := range h.Uses {
			text := fmt.Sprintf("GPU %d to %s", u.GPU, u.Kind)
			if u.Memory > 0 {
				text += " with " + humanize.IBytes(u.Memory)
			}
			uses = append(uses, text)
		}
		t.AppendRow(table.Row{
			strconv.Itoa(h.PID), dash(h.Command), dash(h.Container),
			dash(strings.Join(uses, ", ")), dash(strings.Join(h.Devices, ", ")),
		})
	}
	a.wrapLast(t, "HAS OPEN")
	return t
}

func newResumeCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resume NAME... | --all",
		Short: "Restart relays that are stopped, drained or down",
		Long: `Start relays again that were stopped or drained, or that are down after repeated
failures. --all reverts drain --all and starts every drained relay. A stopped relay
starts only by name.

` + relayNames,
		Example: `  peerlane relay resume trainer
  peerlane relay resume --all`,
	}
	const usage = "every drained relay of this host, and those of containers that start later"
	resume := func(infos []generation.Info, err error, all bool, form string) error {
		if err != nil {
			return asRoot(err)
		}
		var chosen []generation.Info
		for _, info := range infos {
			drained := info.Status.State == generation.StateDrained || info.Status.State == generation.StateDraining
			if !all || drained {
				chosen = append(chosen, info)
			}
		}
		relays := awaited{}
		if err = a.all(chosen, control.Resume); err == nil {
			relays, err = a.await(chosen, generation.StateReady, 30*time.Second, form)
		}
		return a.printAwaited(relays, err, form)
	}
	return a.onNamedOrAllRelays(cmd, usage, generation.ResumeAll, resume)
}

// all calls do for each relay and joins the errors. It ignores containers that have ended in
// between.
func (a *app) all(infos []generation.Info, do func(paths.Layout, string) error) error {
	var errs []error
	for _, info := range infos {
		err := do(a.layout, info.ID)
		if err != nil {
			now, listed := generation.List(a.layout)
			gone := !slices.ContainsFunc(now, func(other generation.Info) bool { return other.ID == info.ID && other.Alive })
			if listed == nil && gone {
				continue
			}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// await waits until each relay has the state or its container has ended, and prints the pending
// relays. It returns the last states even with an error.
func (a *app) await(infos []generation.Info, state string, limit time.Duration, form string) (awaited, error) {
	printed := map[string]string{}
	printState := func(info generation.Info, state string) {
		if form != formJSON && printed[info.ID] != state {
			a.out.Printf("%s (container %s): %s\n", info.ID, info.Container.ID, state)
		}
		printed[info.ID] = state
	}
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		now, err := generation.List(a.layout)
		if err != nil {
			return awaited{}, err
		}
		states := map[string]generation.Info{}
		for _, info := range now {
			states[info.ID] = info
		}
		relays := awaited{[]awaitedRelay{}}
		var waiting []string
		var down error
		for _, info := range infos {
			current, ok := states[info.ID]
			relay := awaitedRelay{info.ID, info.Container.ID, current.Status.State}
			switch {
			case !ok || !current.Supervised:
				printState(info, "its container has ended")
				relay.State = "ended"
			case current.Status.State == state:
				printState(info, state)
			case current.Status.State == generation.StateDown:
				down = errors.Join(down, fmt.Errorf("the relay of container %s is down: %s; its log: %s",
					terminal.Sanitise(current.Container.ID), terminal.Sanitise(current.Status.Error), a.layout.GenerationDir(
						current.ID)+"/relay.log"))
			default:
				word := current.Status.State
				if current.Status.Relay != nil {
					word += fmt.Sprintf(", process %d", current.Status.Relay.PID)
				}
				printState(info, word)
				waiting = append(waiting, fmt.Sprintf("container %s (%s)", terminal.Sanitise(current.Container.ID), word))
			}
			relays.Relays = append(relays.Relays, relay)
		}
		if down != nil || len(waiting) == 0 {
			return relays, down
		}
		if time.Now().After(end) {
			return relays, fmt.Errorf("not %s after %v: %s; end a relay that does not drain with peerlane relay stop", state,
				limit, strings.Join(waiting, ", "))
		}
	}
}

func (a *app) findRelays(names []string) ([]generation.Info, error) {
	var all []generation.Info
	for _, name := range names {
		found, err := control.Find(a.layout, name)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

func (a *app) relaysOrAll(names []string, all bool) ([]generation.Info, error) {
	if !all {
		return a.findRelays(names)
	}
	infos, err := generation.List(a.layout)
	var watched []generation.Info
	for _, info := range infos {
		if info.Supervised {
			watched = append(watched, info)
		}
	}
	return watched, err
}

// completeRelays completes ids of containers and, after the first letter, generations.
func (a *app) completeRelays(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	if err := a.start(cmd); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	infos, _ := generation.List(a.layout) // unreadable relays have no completion
	var names []string
	for _, info := range infos {
		names = append(names, terminal.Sanitise(info.Container.ID)+"\t"+(&app{}).relayState(info).String())
		for _, name := range control.Names(info.Container) {
			names = append(names, terminal.Sanitise(name)+"\t"+terminal.Sanitise(shortID(info.Container.ID)))
		}
		if begun != "" && strings.HasPrefix(info.ID, begun) {
			names = append(names, info.ID+"\t"+terminal.Sanitise(info.Container.ID))
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func someNames(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return nil
	}
	return usageError{cmd.CommandPath(), fmt.Errorf("%s takes the names of containers or generations", cmd.CommandPath())}
}

// namesOr requires names or --all, but not both.
func namesOr(all *bool) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if *all != (len(args) > 0) {
			return nil
		}
		return usageError{cmd.CommandPath(),
			fmt.Errorf("%s takes names of containers or generations, or --all, but not both", cmd.CommandPath())}
	}
}

// writesWords describes the methods of short copies out of host memory, with the reason.
func writesWords(w launch.Writes) string {
	text := fmt.Sprintf("into %s: ", w.GPU)
	if w.Stores > 0 {
		text += fmt.Sprintf("stores of the CPU up to %d bytes; of memory that is not mapped in BAR1, ", w.Stores)
	}
	text += fmt.Sprintf("words up to %d bytes, then two rows up to 32 KiB", w.Words)
	var times []string
	for _, m := range w.Measured {
		one := fmt.Sprintf("%d B %s and %.1f", m.Bytes, microsecondsOr(m.Words), m.Rows)
		if w.Stores > 0 {
			one = fmt.Sprintf("%d B %s, %s and %.1f", m.Bytes, microsecondsOr(m.Stores), microsecondsOr(m.Words), m.Rows)
		}
		times = append(times, one)
	}
	methods := "words and rows"
	if w.Stores > 0 {
		methods = "stores, words and rows"
	}
	switch {
	case len(times) == 0:
		text += " (not measured)"
	default:
		text += fmt.Sprintf(" (%s, µs: %s)", methods, strings.Join(times, ", "))
	}
	if w.NoStores != "" {
		text += "; no stores: " + w.NoStores
	}
	return text
}

// microsecondsOr formats a time in microseconds, or a dash for no measurement.
func microsecondsOr(t float64) string {
	if t == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f", t)
}
