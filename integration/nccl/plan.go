package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/nccl"
)

// Transports between the ranks of a phase.
const (
	byPeerlane = "peerlane" // the plugin, with one rank per node
	bySocket   = "socket"   // NCCL's own network, with one rank per node
	byNVLink   = "nvlink"   // NCCL's transports within one node
)

// Victims of a kill during a phase.
const (
	killRank  = "rank"
	killRelay = "relay"
)

// settings are the parameters of a phase.
type settings struct {
	Name  string `json:"name"`
	By    string `json:"by"`
	Route string `json:"route,omitempty"`
	// Transport is the transport between the relays: empty for that of Route; tcp as between two
	// hosts, over the host's loopback, with the given number of Streams.
	Transport string `json:"transport,omitempty"`
	Streams   int    `json:"streams,omitempty"`
	// Hosts starts the relays in two network namespaces, as on two hosts. A cable joins the
	// namespaces. Hosts needs Transport tcp and two ranks.
	Hosts bool `json:"hosts,omitempty"`
	// Pace is the rate in GB/s of the software device that the ranks share on route staged; 0 for no
	// bound.
	Pace      float64  `json:"pace,omitempty"`
	Variables []string `json:"variables"` // "NAME=value", in addition to the common variables
	// Topology makes NCCL read the lanes' virtual switch from a file; otherwise NCCL takes each NIC
	// for a far NIC.
	Topology bool   `json:"topology,omitempty"`
	Kill     string `json:"kill,omitempty"`
	// Lanes gives the single container of byNVLink the lanes of its GPUs. Only with --installed.
	Lanes bool `json:"lanes,omitempty"`
	// Plugin is the plugin's file name among the binaries; empty for the default.
	Plugin string `json:"plugin,omitempty"`
	// Torchrun starts each rank as a separate node.
	Torchrun bool `json:"torchrun,omitempty"`
	Job      job  `json:"job"`
}

// job is the input of rank.py in JSON.
type job struct {
	Limit   int     `json:"limit"` // seconds
	Checks  []check `json:"checks,omitempty"`
	Rates   []rate  `json:"rates,omitempty"`
	Groups  [][]int `json:"groups,omitempty"` // groups of ranks, in addition to the group of every rank
	Endless bool    `json:"endless,omitempty"`
	Train   *train  `json:"train,omitempty"`
	// Of NIXL: kv.py has no other job.
	Backend string `json:"backend,omitempty"`
	Memory  string `json:"memory,omitempty"` // cuMemCreate or cudaMalloc
	Lists   []list `json:"lists,omitempty"`
}

type check struct {
	Operation string `json:"operation"`
	Bytes     int    `json:"bytes"`
	Type      string `json:"dtype"`
}

type rate struct {
	Operation string  `json:"operation"`
	Bytes     int     `json:"bytes"`
	Seconds   float64 `json:"seconds"`
	// Queued blocks the GPU until every operation is queued, so that the measurement excludes the
	// time of Python and NCCL to start an operation, which is longer than the operation.
	Queued bool `json:"queued,omitempty"`
}

// train is a run of a small transformer. At step SleepAt the last rank sleeps.
type train struct {
	Steps   int  `json:"steps"`
	SleepAt int  `json:"sleep_at,omitempty"`
	Sleep   int  `json:"sleep,omitempty"` // seconds
	Graphs  bool `json:"graphs,omitempty"`
}

var operations = []string{"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"}

// types are the types of elements.
var types = []string{"float32", "bfloat16"}

const mib = 1 << 20

// checks returns every operation at the sizes, in both types.
func checks(sizes ...int) (list []check) {
	for _, size := range sizes {
		for _, o := range operations {
			for _, t := range types {
				list = append(list, check{o, size, t})
			}
		}
	}
	return list
}

func rates(seconds float64, sizes []int, names ...string) (list []rate) {
	for _, size := range sizes {
		for _, o := range names {
			list = append(list, rate{Operation: o, Bytes: size, Seconds: seconds})
		}
	}
	return list
}

// latency measures 8 bytes, queued.
var latency = rate{Operation: "all_reduce", Bytes: 8, Seconds: 0.4, Queued: true}

// groups returns the sub-communicators of eight ranks.
func groups(ranks int) (list [][]int) {
	if ranks != 8 {
		return nil
	}
	return [][]int{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 2, 4, 6}}
}

// plan returns the phases, most important first.
func plan(o options, ranks int) (list []settings) {
	if o.installed {
		list = planInstalled(o)
		if slices.ContainsFunc(o.phases, func(name string) bool { return strings.HasPrefix(name, nixlPrefix) }) {
			list = append(list, planNIXL(o)...)
		}
		return list
	}
	largest := []int{256 * mib}
	few, all := rates(0.4, []int{8, 64 << 10, mib, 16 * mib, 256 * mib}, "all_reduce"), rates(0.3, largest,
		operations[1:]...)
	if !o.quick {
		few = rates(0.5, []int{8, 1 << 10, 64 << 10, mib, 4 * mib, 16 * mib, 64 * mib, 256 * mib, 1024 * mib}, "all_reduce")
		all = rates(0.4, []int{mib, 16 * mib, 256 * mib}, operations[1:]...)
	}
	measured := slices.Concat(few, all, []rate{latency})
	add := func(name, by string, j job, variables ...string) {
		s := settings{Name: name, By: by, Job: j, Variables: variables}
		if by == byPeerlane {
			s.Route = launch.RouteDirect
			s.Variables = append(s.Variables, o.set...)
		}
		list = append(list, s)
	}
	add("peerlane-rates", byPeerlane, job{Rates: measured})
	last := func() *settings { return &list[len(list)-1] }
	if o.tune {
		// Vary one setting at a time: channels, the size of a step in the buffer, and NCCL's
		// estimate of the NIC's speed.
		for _, v := range []string{
			"NCCL_MIN_NCHANNELS=4", "NCCL_MIN_NCHANNELS=8", "NCCL_MIN_NCHANNELS=16", "NCCL_MIN_NCHANNELS=32",
			"NCCL_BUFFSIZE=16777216", "NCCL_BUFFSIZE=33554432",
			"NCCL_MIN_NCHANNELS=8 NCCL_BUFFSIZE=16777216", "NCCL_MIN_NCHANNELS=16 " +
				"NCCL_BUFFSIZE=16777216", "NCCL_MIN_NCHANNELS=8 NCCL_BUFFSIZE=33554432", "NCCL_MIN_NCHANNELS=24 " +
				"NCCL_BUFFSIZE=8388608", "NCCL_MIN_NCHANNELS=32 NCCL_BUFFSIZE=8388608",
			"NCCL_MIN_NCHANNELS=32 NCCL_BUFFSIZE=16777216", "NCCL_MIN_NCHANNELS=32 NCCL_BUFFSIZE=33554432",
			"PEERLANE_NCCL_SPEED=400000", "PEERLANE_NCCL_SPEED=3200000",
			"NCCL_ALGO=Ring NCCL_PROTO=Simple", "NCCL_PROTO=LL",
		} {
			name := strings.NewReplacer("NCCL_", "", "PEERLANE_", "", " ", "+").Replace(v)
			add("tune-"+name, byPeerlane, job{Rates: rates(0.4, []int{8, largest[0]}, "all_reduce")}, strings.Fields(v)...)
		}
		return list
	}
	add("socket-default", bySocket, job{Rates: measured})
	add("nvlink", byNVLink, job{Rates: measured})
	sizes := []int{8, 1000, 64 << 10, 5*mib + 24, 64 * mib}
	if o.quick {
		sizes = []int{8, 64 << 10, 5*mib + 24}
	}
	add("peerlane-checks", byPeerlane, job{Checks: checks(sizes...), Groups: groups(ranks)})
	// A channel uses one SM. NCCL uses 32 channels for a fast network and two for this network.
	// Larger buffers give larger chunks.
	many := []string{"NCCL_MIN_NCHANNELS=32", "NCCL_NCHANNELS_PER_NET_PEER=16"}
	add("peerlane-rates-32", byPeerlane, job{Rates: rates(0.4, largest, operations...)}, many...)
	add("peerlane-rates-32x16MiB", byPeerlane, job{Rates: rates(0.4, largest, operations...)},
		append(many[:2:2], "NCCL_BUFFSIZE=16777216")...)
	for _, who := range []string{killRank, killRelay} {
		// PyTorch waits a minute for its own report of an error before it ends a process.
		add("peerlane-kill-"+who, byPeerlane, job{Endless: true}, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1000")
		last().Kill = who
	}
	// NCCL's limit is 64 sockets for each pair of ranks.
	between := slices.Concat(rates(0.4, []int{8, largest[0]}, "all_reduce"),
		rates(0.4, largest, "broadcast", "send_recv"), []rate{latency})
	for _, v := range [][2]int{{4, 4}, {8, 8}, {2, 1}, {1, 16}, {2, 8}, {8, 2}} {
		if o.quick && v[0] != 4 {
			continue
		}
		add(fmt.Sprintf("socket-%dx%d", v[0], v[1]), bySocket, job{Rates: between},
			fmt.Sprintf("NCCL_NSOCKS_PERTHREAD=%d", v[0]), fmt.Sprintf("NCCL_SOCKET_NTHREADS=%d", v[1]))
	}
	add("peerlane-topology", byPeerlane, job{Rates: rates(0.4, []int{8, mib, largest[0]}, "all_reduce")})
	last().Topology = true
	if o.quick {
		return list
	}
	// As between hosts.
	for _, t := range []struct {
		name      string
		streams   int
		variables []string
	}{
		{"4", 4, many},
		{"16", 16, many},
		{"16-8MiB", 16, []string{"NCCL_MIN_NCHANNELS=16", "NCCL_MAX_NCHANNELS=16", "NCCL_NCHANNELS_PER_NET_PEER=16",
			"NCCL_BUFFSIZE=8388608"}},
	} {
		add("peerlane-tcp-"+t.name, byPeerlane, job{Rates: between, Checks: checks(64<<10, 5*mib+24)}, t.variables...)
		last().Route, last().Transport, last().Streams = launch.RouteAuto, launch.TransportTCP, t.streams
	}
	for _, t := range types {
		whole := checks(1024 * mib)
		add("peerlane-checks-1GiB-"+t, byPeerlane, job{Checks: slices.DeleteFunc(whole,
			func(c check) bool { return c.Type != t })})
	}
	for _, t := range []struct {
		name string
		train
	}{{"train", train{Steps: 1000}}, {"graphs", train{Steps: 1000, Graphs: true}}} {
		add("peerlane-"+t.name, byPeerlane, job{Train: &t.train})
		add("nvlink-"+t.name, byNVLink, job{Train: &t.train})
	}
	if ranks == 2 {
		add("peerlane-hosts-train", byPeerlane, job{Train: &train{Steps: 1000}, Checks: checks(64 << 10)})
		last().Route, last().Transport, last().Streams, last().Hosts = launch.RouteAuto, launch.TransportTCP, 4, true
		add("peerlane-hosts-kill-relay", byPeerlane, job{Endless: true}, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1000")
		last().Route, last().Transport, last().Streams, last().Hosts = launch.RouteAuto, launch.TransportTCP, 4, true
		last().Kill = killRelay
	}
	add("peerlane-staged", byPeerlane, job{Rates: few, Checks: checks(64 << 10)})
	last().Route = launch.RouteStaged
	// The data of every rank uses one NIC of 100 Gbit/s.
	add("peerlane-staged-paced", byPeerlane, job{Rates: rates(1, largest, "all_reduce")})
	last().Route, last().Pace = launch.RouteStaged, 12.5
	add("peerlane-torchrun", byPeerlane, job{Checks: checks(64 << 10)})
	last().Torchrun = true
	add("peerlane-host-pointers", byPeerlane, job{Rates: rates(0.4, []int{8, mib, largest[0]}, "all_reduce"),
		Checks: checks(64<<10, 5*mib+24)}, "PEERLANE_NCCL_POINTERS=host")
	// Only the layout of the newest version is tested: NCCL 2.30 accepts it.
	for _, version := range nccl.Versions[:len(nccl.Versions)-1] {
		add(fmt.Sprintf("peerlane-v%d", version), byPeerlane,
			job{Rates: rates(0.3, []int{8, largest[0]}, "all_reduce"), Checks: checks(64<<10, 5*mib+24)})
		last().Plugin = nccl.NameOf(version)
	}
	// Longer than the limit of a phase; runs only on request.
	if slices.Contains(o.phases, sleeping) {
		add(sleeping, byPeerlane, job{Train: &train{Steps: 200, SleepAt: 100, Sleep: 120}})
	}
	return list
}

// sleeping is the phase in which a rank sleeps while the other ranks wait.
const sleeping = "peerlane-sleep"
