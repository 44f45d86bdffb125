package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// Phases of --installed measure this host's packages as users run them: containers of runc with
// peerlane.dev/lane=auto, and no NCCL variable. Configuration, plan and CDI specifications are
// those of the host.

// installedPrefix begins the names of the phases that use the packages.
const installedPrefix = "installed-"

// Sizes that --installed measures, and checks by all_reduce.
var installedSizes = []int{8, 64 << 10, mib, 16 * mib, 256 * mib, 1024 * mib}

// byHand are settings for the largest messages. The plugin sets no fewer channels then.
var byHand = []string{"NCCL_MIN_NCHANNELS=32", "NCCL_NCHANNELS_PER_NET_PEER=16"}

func planInstalled(o options) (list []settings) {
	reduce := append(rates(0.4, installedSizes, "all_reduce"), latency)
	measured := append(slices.Clone(reduce), rates(0.2, installedSizes, operations[1:]...)...)
	// Sockets take seconds for 1 GiB.
	bySockets := append(slices.Clone(reduce), rates(0.2, installedSizes[:len(installedSizes)-1], operations[1:]...)...)
	add := func(name, by string, j job, variables ...string) *settings {
		if by == byPeerlane {
			variables = append(variables, o.set...)
		}
		list = append(list, settings{Name: name, By: by, Job: j, Variables: variables})
		return &list[len(list)-1]
	}
	var checked []check
	for _, size := range installedSizes {
		checked = append(checked, check{"all_reduce", size, types[0]})
	}
	add(installedPrefix+"default", byPeerlane, job{Rates: measured, Checks: append(checked, checks(5*mib+24)...)})
	add(installedPrefix+"log", byPeerlane, job{Rates: rates(0.4, []int{256 * mib}, "all_reduce")}, "NCCL_DEBUG=INFO",
		"NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV,TUNING")
	add(installedPrefix+"hand-32", byPeerlane, job{Rates: reduce}, byHand...)
	add("socket-default", bySocket, job{Rates: bySockets})
	add("nvlink", byNVLink, job{Rates: measured, Checks: checked})
	// The plugin must not slow down traffic within the container.
	add("nvlink-with-lanes", byNVLink, job{Rates: measured, Checks: checked}).Lanes = true
	for _, v := range [][2]int{{4, 4}, {8, 8}, {2, 8}, {8, 2}} {
		add(fmt.Sprintf("socket-%dx%d", v[0], v[1]), bySocket,
			job{Rates: append(slices.Clone(reduce), rates(0.2, []int{256 * mib}, operations[1:]...)...)},
			fmt.Sprintf("NCCL_NSOCKS_PERTHREAD=%d", v[0]), fmt.Sprintf("NCCL_SOCKET_NTHREADS=%d", v[1]))
	}
	return list
}

// judgeInstalled compares the everyday command with the best settings by hand.
func (r *result) judgeInstalled() {
	for _, size := range []int{16 * mib, 256 * mib, 1024 * mib} {
		row := rate{Operation: "all_reduce", Bytes: size}
		name := fmt.Sprintf("all_reduce %d MiB without a variable against ", size/mib)
		r.ratio(name+"the best settings by hand", row, installedPrefix+"default", installedPrefix+"hand", goal{})
		r.ratio(name+"default NET/Socket", row, installedPrefix+"default", "socket-default", goal{})
		r.ratio(name+"the best NET/Socket", row, installedPrefix+"default", "socket-", goal{})
		of := goal{}
		if size == 256*mib {
			of.Min = 0.75
		}
		r.ratio(name+"NVLink in one container", row, installedPrefix+"default", "nvlink", of)
		r.ratio(fmt.Sprintf("all_reduce %d MiB over NVLink in one container, with lanes against without", size/mib), row,
			"nvlink-with-lanes", "nvlink", goal{Min: 0.98})
	}
	for _, o := range operations[1:] {
		of := goal{}
		if o == "all_to_all" || o == "send_recv" {
			of.Min = 0.4
		}
		r.ratio(o+" 256 MiB without a variable against NVLink in one container", rate{Operation: o, Bytes: 256 * mib},
			installedPrefix+"default", "nvlink", of)
	}
	r.ratio("all_reduce 8 bytes queued on the GPU without a variable, time, against default NET/Socket",
		rate{Operation: "all_reduce", Bytes: 8, Queued: true}, installedPrefix+"default", "socket-default", goal{Max: 0.75})
}

// useInstallation uses configuration, plan and relays of this host; on the simulator those of the
// test bed, which has the same files.
func (h *host) useInstallation() error {
	if h.Simulated {
		if paths.MountsAnchor() {
			if err := h.Layout.MountAnchor(); err != nil {
				return err
			}
		}
		h.specs = h.CDIDir()
		// The content of packaging/etc/nccl.conf.
		written := os.WriteFile(h.Layout.NCCLConf(), []byte("NCCL_NET_PLUGIN=peerlane\n"), 0o644)
		return errors.Join(written, h.configure(settings{Route: launch.RouteAuto}))
	}
	// The GPU vendor's specification, which NVIDIA's toolkit writes on other hosts.
	if err := h.configure(settings{Route: launch.RouteAuto}); err != nil {
		return err
	}
	h.Layout, h.specs = paths.New(""), "/etc/cdi"
	if _, err := os.Stat(h.Layout.PlanFile()); err != nil {
		return fmt.Errorf(
			"--installed measures the packages of this host: %w; install the packages and run peerlane cdi generate "+
				"--spec-dir /etc/cdi", err)
	}
	return nil
}

// findContainers finds runc and creates a network for each container.
func (h *host) findContainers(ctx context.Context) error {
	h.findRuntime(ctx)
	if h.runtime == nil {
		return fmt.Errorf("--installed needs containers: %s", h.why)
	}
	var err error
	if h.network, err = newNetwork(h.work, h.ranks); err != nil {
		h.network, h.alone = nil, err.Error()
	}
	return nil
}

// inject injects GPUs into a container, as NVIDIA's toolkit does, and lanes.
func (h *host) inject(b *bundle.Bundle, s settings, gpus []topo.GPU) error {
	if !h.installed {
		return b.Inject(h.CDIDir(), testbed.Devices(gpus[0])...)
	}
	var names []string
	for _, g := range gpus {
		names = append(names, fmt.Sprintf("nvidia.com/gpu=%d", g.Index))
	}
	if err := b.Inject(h.CDIDir(), names...); err != nil {
		return err
	}
	if s.By == bySocket || s.By == byNVLink && !s.Lanes {
		return nil
	}
	return b.Inject(h.specs, cdi.KindLane+"=auto")
}

// copyEtc gives a container a private /etc without nccl.conf, as in an image.
func copyEtc(root string) error {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if out, err := exec.Command("cp", "-a", "/etc", root).CombinedOutput(); err != nil {
		return fmt.Errorf("copy /etc for a container: %w: %s", err, out)
	}
	for _, name := range []string{"nccl.conf", filepath.Base(cdi.NCCLTopology)} {
		if err := os.RemoveAll(filepath.Join(root, "etc", name)); err != nil {
			return err
		}
	}
	return nil
}

// chooses reports whether a variable of this program would select NCCL's transport.
// NCCL_NVLS_ENABLE stays: machines set it to protect a shared switch.
func chooses(variable string) bool {
	name, _, _ := strings.Cut(variable, "=")
	return strings.HasPrefix(name, "NCCL_") && name != "NCCL_NVLS_ENABLE" || strings.HasPrefix(name, "PEERLANE_") &&
		name != behaviourOfTests || name == "CUDA_VISIBLE_DEVICES"
}

// behaviourOfTests is the variable by which this package's tests select the behaviour of ranks.
const behaviourOfTests = "PEERLANE_TEST_RANK"

// ofMachine returns the variables of NCCL that ranks inherit from this program.
func ofMachine() (list []string) {
	for _, v := range os.Environ() {
		if strings.HasPrefix(v, "NCCL_") && !chooses(v) {
			list = append(list, v)
		}
	}
	return list
}

// plainEnvironment returns the variables that PyTorch needs to find the other ranks, and those of
// the phase.
func (h *host) plainEnvironment(s settings, number int, dir, master string) []string {
	list := slices.DeleteFunc(os.Environ(), chooses)
	address, port, _ := strings.Cut(master, " ")
	local := 0
	if s.By == byNVLink {
		local = number
	}
	list = append(list, fmt.Sprintf("RANK=%d", number), fmt.Sprintf("WORLD_SIZE=%d", h.ranks),
		fmt.Sprintf("LOCAL_RANK=%d", local),
		"MASTER_ADDR="+address, "MASTER_PORT="+port, "PYTHONUNBUFFERED=1")
	if slices.Contains(s.Variables, "NCCL_DEBUG=INFO") {
		list = append(list, "NCCL_DEBUG_FILE="+filepath.Join(dir, fmt.Sprintf("nccl-%d.log", number)))
	}
	return append(list, s.Variables...)
}

// enterCommon makes a rank a process of the single container that every rank of the phase shares.
// The first rank starts the container.
func (h *host) enterCommon(ctx context.Context, r *runningRank, s settings, dir string, arguments,
	environment []string) error {
	r.container, r.id = true, h.ContainerID("all-"+s.Name)
	if r.number == 0 {
		b, err := h.bundle(filepath.Join(h.work, r.id), s, h.gpus, dir, "", []string{"/bin/sleep", "infinity"},
			environment...)
		if err != nil {
			return err
		}
		log, err := os.Create(filepath.Join(dir, "container.log"))
		if err != nil {
			return err
		}
		defer log.Close()
		c := h.runtime.Command(ctx, "run", "--detach", "--bundle", b.Dir, r.id)
		c.Stdout, c.Stderr = log, log // a pipe would stay open as long as the container
		if err := c.Run(); err != nil {
			text, _ := os.ReadFile(log.Name())
			return fmt.Errorf("start the shared container: %w: %s", err, strings.TrimSpace(string(text)))
		}
	}
	words := []string{"exec"}
	for _, e := range environment {
		words = append(words, "--env", e)
	}
	r.command = h.runtime.Command(ctx, slices.Concat(words, []string{r.id}, arguments)...)
	return nil
}

// chosen is NCCL's choice of transport, from its log.
type chosen struct {
	Network  string `json:"network,omitempty"`
	Channels string `json:"channels,omitempty"`
	Tuner    string `json:"tuner,omitempty"`
	// Variables that NCCL read, from its log: of the environment, of nccl.conf, and of the plugin.
	Variables []string `json:"variables,omitempty"`
}

func (c *chosen) String() string {
	variables := "none"
	if len(c.Variables) > 0 {
		variables = strings.Join(c.Variables, "; ")
	}
	return fmt.Sprintf("network %s; %s; tuner %s; variables: %s", cmp.Or(c.Network, "unknown"),
		cmp.Or(c.Channels, "channels unknown"), cmp.Or(c.Tuner, "NCCL's own"), variables)
}

var (
	logNetwork  = regexp.MustCompile(`Using network (\S+)`)
	logChannels = regexp.MustCompile(`\d+ coll channels, .*`)
	logTuner    = regexp.MustCompile(`TUNER/Plugin: Using (?:tuner plugin )?(\S+)`)
	logVariable = regexp.MustCompile(
		`NCCL_\w+ set by environment to .*|NET/Peerlane: NCCL_\w+.*|NET/Peerlane: all lanes .*`)
)

// readChosen reads NCCL's log of rank 0, if present.
func (p *phase) readChosen(dir string) {
	text, err := os.ReadFile(filepath.Join(dir, "nccl-0.log"))
	if err != nil {
		return
	}
	c := &chosen{Channels: logChannels.FindString(string(text))}
	if m := logNetwork.FindSubmatch(text); m != nil {
		c.Network = string(m[1])
	}
	if m := logTuner.FindSubmatch(text); m != nil {
		c.Tuner = string(m[1])
	}
	for _, v := range logVariable.FindAllString(string(text), -1) {
		if v = strings.TrimRight(v, ". "); !slices.Contains(c.Variables, v) {
			c.Variables = append(c.Variables, v)
		}
	}
	if c.Network != "" || c.Channels != "" {
		p.Chosen = c
	}
}
