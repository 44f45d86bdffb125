package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/nccl"
)

// How the ranks of a phase reach each other.
const (
	byPeerlane = "peerlane" // the plugin, each rank a node of its own
	bySocket   = "socket"   // NCCL's own network, each rank a node of its own
	byNVLink   = "nvlink"   // whatever NCCL has within one node
)

// Who is killed in the middle of a phase.
const (
	killRank  = "rank"
	killRelay = "relay"
)

// settings are what a phase does.
type settings struct {
	Name  string `json:"name"`
	By    string `json:"by"`
	Route string `json:"route,omitempty"`
	// Transport between the relays: empty for what Route says; tcp as between two hosts, over
	// the host's loopback, with so many Streams.
	Transport string `json:"transport,omitempty"`
	Streams   int    `json:"streams,omitempty"`
	// Pace is the rate in GB/s of the emulated NIC that all ranks share on route staged; 0
	// for no bound.
	Pace      float64  `json:"pace,omitempty"`
	Variables []string `json:"variables"` // "NAME=value", beside those that all have
	// Topology has NCCL read the virtual switch of the lanes from a file, instead of
	// taking each NIC for a far one.
	Topology bool   `json:"topology,omitempty"`
	Kill     string `json:"kill,omitempty"`
	// Lanes gives the one container of byNVLink the lanes of its GPUs. With --installed.
	Lanes bool `json:"lanes,omitempty"`
	// Plugin is its file among the binaries; empty for the usual one.
	Plugin string `json:"plugin,omitempty"`
	// Torchrun starts each rank, as a node of one.
	Torchrun bool `json:"torchrun,omitempty"`
	Job      job  `json:"job"`
}

// job is what each rank is told, in JSON; rank.py does it.
type job struct {
	Limit   int     `json:"limit"` // seconds
	Checks  []check `json:"checks,omitempty"`
	Rates   []rate  `json:"rates,omitempty"`
	Groups  [][]int `json:"groups,omitempty"` // of ranks, beside all of them
	Endless bool    `json:"endless,omitempty"`
	Train   *train  `json:"train,omitempty"`
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
	// Queued has the GPU held back until all are queued: what is measured is what they take
	// there and on their way. To start one, Python and NCCL take longer than it takes.
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

// Of elements.
var types = []string{"float32", "bfloat16"}

const mib = 1 << 20

// checks are all operations at sizes, in both types.
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

// latency is 8 bytes, queued.
var latency = rate{Operation: "all_reduce", Bytes: 8, Seconds: 0.4, Queued: true}

// groups are the sub-communicators that eight ranks can have.
func groups(ranks int) (list [][]int) {
	if ranks != 8 {
		return nil
	}
	return [][]int{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 2, 4, 6}}
}

// plan is what is done, in this order: what matters most comes first.
func plan(o options, ranks int) (list []settings) {
	if o.installed {
		return planInstalled(o)
	}
	largest := []int{256 * mib}
	few, all := rates(0.4, []int{8, 64 << 10, mib, 16 * mib, 256 * mib}, "all_reduce"), rates(0.3, largest, operations[1:]...)
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
		// One after another: channels, how much of a buffer is a step, and how fast NCCL
		// believes that the NIC is.
		for _, v := range []string{
			"NCCL_MIN_NCHANNELS=4", "NCCL_MIN_NCHANNELS=8", "NCCL_MIN_NCHANNELS=16", "NCCL_MIN_NCHANNELS=32",
			"NCCL_BUFFSIZE=16777216", "NCCL_BUFFSIZE=33554432",
			"NCCL_MIN_NCHANNELS=8 NCCL_BUFFSIZE=16777216", "NCCL_MIN_NCHANNELS=16 NCCL_BUFFSIZE=16777216", "NCCL_MIN_NCHANNELS=8 NCCL_BUFFSIZE=33554432", "NCCL_MIN_NCHANNELS=24 NCCL_BUFFSIZE=8388608", "NCCL_MIN_NCHANNELS=32 NCCL_BUFFSIZE=8388608",
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
	// A channel uses one SM. NCCL uses 32 channels for a fast network and two for this one.
	// Larger buffers give larger chunks.
	many := []string{"NCCL_MIN_NCHANNELS=32", "NCCL_NCHANNELS_PER_NET_PEER=16"}
	add("peerlane-rates-32", byPeerlane, job{Rates: rates(0.4, largest, operations...)}, many...)
	add("peerlane-rates-32x16MiB", byPeerlane, job{Rates: rates(0.4, largest, operations...)}, append(many[:2:2], "NCCL_BUFFSIZE=16777216")...)
	for _, who := range []string{killRank, killRelay} {
		// PyTorch waits for its own report of an error, a minute, before it ends a process.
		add("peerlane-kill-"+who, byPeerlane, job{Endless: true}, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1000")
		last().Kill = who
	}
	// NCCL's limit is 64 sockets for each pair of ranks.
	between := slices.Concat(rates(0.4, []int{8, largest[0]}, "all_reduce"), rates(0.4, largest, "broadcast", "send_recv"), []rate{latency})
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
		{"16-8MiB", 16, []string{"NCCL_MIN_NCHANNELS=16", "NCCL_MAX_NCHANNELS=16", "NCCL_NCHANNELS_PER_NET_PEER=16", "NCCL_BUFFSIZE=8388608"}},
	} {
		add("peerlane-tcp-"+t.name, byPeerlane, job{Rates: between, Checks: checks(64<<10, 5*mib+24)}, t.variables...)
		last().Route, last().Transport, last().Streams = launch.RouteAuto, launch.TransportTCP, t.streams
	}
	for _, t := range types {
		whole := checks(1024 * mib)
		add("peerlane-checks-1GiB-"+t, byPeerlane, job{Checks: slices.DeleteFunc(whole, func(c check) bool { return c.Type != t })})
	}
	for _, t := range []struct {
		name string
		train
	}{{"train", train{Steps: 1000}}, {"graphs", train{Steps: 1000, Graphs: true}}} {
		add("peerlane-"+t.name, byPeerlane, job{Train: &t.train})
		add("nvlink-"+t.name, byNVLink, job{Train: &t.train})
	}
	add("peerlane-staged", byPeerlane, job{Rates: few, Checks: checks(64 << 10)})
	last().Route = launch.RouteStaged
	// All ranks' data go over one NIC of 100 Gbit/s.
	add("peerlane-staged-paced", byPeerlane, job{Rates: rates(1, largest, "all_reduce")})
	last().Route, last().Pace = launch.RouteStaged, 12.5
	add("peerlane-torchrun", byPeerlane, job{Checks: checks(64 << 10)})
	last().Torchrun = true
	add("peerlane-host-pointers", byPeerlane, job{Rates: rates(0.4, []int{8, mib, largest[0]}, "all_reduce"), Checks: checks(64<<10, 5*mib+24)}, "PEERLANE_NCCL_POINTERS=host")
	// The newest is tried by its layout alone: NCCL 2.30 takes it.
	for _, version := range nccl.Versions[:len(nccl.Versions)-1] {
		add(fmt.Sprintf("peerlane-v%d", version), byPeerlane, job{Rates: rates(0.3, []int{8, largest[0]}, "all_reduce"), Checks: checks(64<<10, 5*mib+24)})
		last().Plugin = nccl.NameOf(version)
	}
	// Longer than a phase is to be: for who asks for it.
	if slices.Contains(o.phases, sleeping) {
		add(sleeping, byPeerlane, job{Train: &train{Steps: 200, SleepAt: 100, Sleep: 120}})
	}
	return list
}

// sleeping is the phase in which a rank sleeps, and is waited for.
const sleeping = "peerlane-sleep"
