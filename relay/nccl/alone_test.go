package nccl_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	files "github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/softhost/process"
	"github.com/peerlane/peerlane/relay/wire"
)

// layout is a compiler's layout of NCCL's headers, release 2.30.7: size, and offsets of the members
// in order. To repeat: in a C++ program include src/include/plugin/nccl_net.h and nccl_tuner.h
// (with src/include in the path, and a nccl.h of a build, or one that declares ncclResult_t,
// ncclDataType_t and ncclRedOp_t as enumerations) and print sizeof ncclNet_v8_t,
// ncclNetProperties_v8_t, ncclTuner_v3_t and so on, and offsetof each member of theirs. Properties
// of versions 9 and 10 are equal.
const layout = `nccl_net_v8 152 0 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144
nccl_net_v9 160 0 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152
nccl_net_v10 160 0 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152
nccl_net_v11 176 0 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168
nccl_net_v12 176 0 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168
nccl_net_properties_v8 64 0 8 16 24 28 32 36 40 44 48 52 56
nccl_net_properties_v9 104 0 8 16 24 28 32 36 40 44 48 52 56 60 64 88 96
nccl_net_properties_v11 112 0 8 16 24 28 32 36 40 44 48 52 56 60 64 88 96 104
nccl_net_properties_v12 128 0 8 16 24 28 32 36 40 44 48 52 56 60 64 104 112 120 124 126
nccl_tuner_v3 32 0 8 16 24
nccl_tuner_v4 32 0 8 16 24
nccl_tuner_v5 32 0 8 16 24
`

func TestTableLayoutsMatchNCCLHeaders(t *testing.T) {
	out, err := exec.Command(program(t, "layout")).CombinedOutput()
	if err != nil || string(out) != layout {
		t.Errorf("%v: %s", err, out)
	}
}

// alone runs the program with variables and arguments.
func alone(t *testing.T, environment []string, arguments ...string) string {
	t.Helper()
	c := exec.Command(program(t, "alone", "-rdynamic"), append([]string{plugin(t)}, arguments...)...)
	c.Env = append(os.Environ(), environment...)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func TestSessionsNameNCCL(t *testing.T) {
	hello := process.Hello(t, func(socket string) *exec.Cmd {
		c := exec.Command(program(t, "alone", "-rdynamic"), plugin(t))
		c.Env = append(os.Environ(), "PEERLANE_SOCKET="+socket)
		return c
	})
	if hello.Program != wire.ProgramNCCL {
		t.Errorf("the hello names program %d, want %d", hello.Program, wire.ProgramNCCL)
	}
}

func demand(t *testing.T, out string, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if !strings.Contains(out, l) {
			t.Errorf("it does not say %q:\n%s", l, out)
		}
	}
}

func TestInitWithoutRelayFailsWithReason(t *testing.T) {
	nowhere := "PEERLANE_SOCKET=" + filepath.Join(t.TempDir(), "none/relay.sock")
	const sentence = "warn: NET/Peerlane: no relay at "
	// NCCL_NET names the plugin: NCCL ends when init fails.
	out := alone(t, []string{nowhere, "NCCL_NET=peerlane"})
	demand(t, out, sentence, "--device peerlane.dev/lane=N", "\ninit: 2\n", "\nfinalize: 0\n")
	// It does not, and another network would be taken: so nothing but init works.
	out = alone(t, []string{nowhere, "NCCL_NET="})
	demand(t, out, sentence, "\ninit: 0\n", "\ndevices: 0 1\n", "PEERLANE_NCCL_FALLBACK=1", "listen: 2 no listener\n")
	// Which it may be.
	out = alone(t, []string{nowhere, "NCCL_NET=", "PEERLANE_NCCL_FALLBACK=1"})
	demand(t, out, sentence, "ranks that do not all take the same one hang", "\ninit: 2\n", "\nfinalize: 0\n")
}

func TestLL128IsExcludedBetweenNodesOnly(t *testing.T) {
	out := alone(t, []string{"PEERLANE_SOCKET=/none", "NCCL_NET=Peerlane"})
	for _, version := range []string{"3", "4", "5"} {
		demand(t, out,
			"tuner "+version+", 1 nodes: 0 5: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20\n",
			"tuner "+version+", 2 nodes: 0 5: 0 -1 2 3 -1 5 6 -1 8 9 -1 11 12 -1 14 15 -1 17 18 -1 20\n")
	}
}

// tunings are the lines of the tuner's choices by size, per version.
func tunings(t *testing.T, scope string, both bool, variables ...string) map[string][]string {
	t.Helper()
	h := newHost(t, launch.RouteDirect)
	h.scope, h.both = scope, both
	out := alone(t, append([]string{"PEERLANE_SOCKET=" + h.lane(0).socket, "ALONE_TUNER=1", "NCCL_NET="}, variables...))
	found := map[string][]string{}
	for _, l := range strings.Split(out, "\n") {
		if rest, ok := strings.CutPrefix(l, "tuned "); ok {
			version, rest, _ := strings.Cut(rest, ", ")
			found[version] = append(found[version], rest)
		}
	}
	if len(found) != 3 || len(found["5"]) != 2*4*5 {
		t.Fatalf("%d versions, %d lines of version 5: %s", len(found), len(found["5"]), out)
	}
	return found
}

// Above a size Simple replaces LL, and channels are few while messages are small. Channels 0 are
// NCCL's own number. An answer holds from its size on.
func TestTunerLocalLanesLimitsLLAndChannelsBySize(t *testing.T) {
	const (
		all = "1024 ring LL 1; 32769 ring Simple 1; 262145 ring Simple 2; 1048577 ring Simple 4; 4194305 ring " +
			"Simple 8; 16777217 ring Simple 0"
		halves  = "262145 ring Simple 2; 4194305 ring Simple 4; 16777217 ring Simple 8; 67108865 ring Simple 0"
		eighths = "1048577 ring Simple 2; 16777217 ring Simple 4; 67108865 ring Simple 8; 268435457 ring Simple 0"
		tree    = "1024 tree LL 1; 16385 tree Simple 1; 131073 tree Simple 2; 524289 tree Simple 4; 2097153 tree " +
			"Simple 8; 4194305 tree Simple 0"
	)
	want := []string{
		"2 ranks, ring first, broadcast: 0; " + all,
		"2 ranks, ring first, reduce: 0; " + all,
		"2 ranks, ring first, all_gather: 0; 1024 ring LL 1; 65537 ring Simple 1; " + halves,
		"2 ranks, ring first, reduce_scatter: 0; 1024 ring LL 1; 65537 ring Simple 1; " + halves,
		"2 ranks, ring first, all_reduce: 0; 1024 ring LL 1; 32769 ring Simple 1; " + halves,
		"2 ranks, tree first, all_reduce: 0; " + tree,
		"8 ranks, ring first, broadcast: 0; " + all,
		"8 ranks, ring first, all_gather: 0; 1024 ring LL 1; 262145 ring Simple 1; " + eighths,
		"8 ranks, ring first, all_reduce: 0; 1024 ring LL 1; 131073 ring Simple 1; " + eighths,
		"8 ranks, tree first, all_reduce: 0; " + tree,
		// PAT is left to more ranks than two.
		"2 ranks, pat first, all_gather: 0; 1024 ring LL 1; 65537 ring Simple 1; " + halves,
		"8 ranks, pat first, all_gather: 0; 1024 pat Simple 0",
		// NCCL fails where a table has nothing left: a user with NCCL_PROTO=LL gets LL.
		"2 ranks, LL alone, all_reduce: 0; 1024 ring LL 1; 262145 ring LL 2; 4194305 ring LL 4; 16777217 ring LL 8; " +
			"67108865 ring LL 0",
	}
	for _, both := range []bool{false, true} {
		found := tunings(t, launch.ScopeAuto, both)
		for version, lines := range found {
			for _, w := range want {
				if !slices.Contains(lines, w) {
					t.Errorf("version %s, two lanes %v: no line %q:\n%s", version, both, w, strings.Join(lines, "\n"))
				}
			}
		}
	}
}

// The measurements do not cover networks: there NCCL chooses by size, also if the user has named a
// different network.
func TestTunerNetworkLanesLeavesLLAndChannels(t *testing.T) {
	for _, c := range []struct{ scope, variable string }{{launch.ScopeCluster, "NCCL_NET="},
		{launch.ScopeAuto, "NCCL_NET=Socket"}} {
		for version, lines := range tunings(t, c.scope, false, c.variable) {
			for _, l := range lines {
				_, answers, _ := strings.Cut(l, ": 0; ")
				if !slices.Contains([]string{"1024 ring LL 0", "1024 tree LL 0", "1024 pat Simple 0"}, answers) {
					t.Errorf("%+v, version %s: %s", c, version, l)
				}
			}
		}
	}
}

// The user's channels are the user's. LL is limited nevertheless.
func TestTunerUsersChannelsAreLeft(t *testing.T) {
	for _, variable := range []string{"NCCL_MIN_NCHANNELS=32", "NCCL_MAX_NCHANNELS=2", "NCCL_MIN_CTAS=8",
		"NCCL_MAX_CTAS=8"} {
		for version, lines := range tunings(t, launch.ScopeAuto, false, variable) {
			if want := "2 ranks, ring first, all_reduce: 0; 1024 ring LL 0; 32769 ring Simple 0"; !slices.Contains(lines, want) {
				t.Errorf("%s, version %s: no line %q: %s", variable, version, want, strings.Join(lines, "\n"))
			}
		}
	}
}

// Before 2.22 NCCL has no tuner that can forbid it.
func TestOldNCCLWithLL128IsRefused(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	socket := "PEERLANE_SOCKET=" + h.lane(0).socket
	const sentence = "warn: NET/Peerlane: NCCL 2.20 takes no tuner of this plugin's"
	for _, c := range []struct {
		version, protocols string
		refused            bool
	}{
		{"22005", "", true}, {"22005", "LL,LL128", true}, {"22005", "^Simple", true}, {"22005", "^LL", true},
		{"22005", "^LL128", false}, {"22005", "^LL,ll128", false}, {"22005", "Simple", false}, {"22203", "", false},
	} {
		out := alone(t, []string{socket, "ALONE_NCCL=" + c.version, "NCCL_PROTO=" + c.protocols})
		if said := strings.Contains(out, sentence) && strings.Contains(out, "NCCL_PROTO=^LL128") && strings.Contains(out,
			"\ninit: 5\n"); said != c.refused {
			t.Errorf("%+v: %s", c, out)
		}
		if !c.refused && !strings.Contains(out, "\ninit: 0\n") {
			t.Errorf("%+v: %s", c, out)
		}
	}
}

func TestDevicesReportLanesAndRegisterMemory(t *testing.T) {
	for _, ipc := range []bool{false, true} {
		h := newHost(t, launch.RouteStaged)
		h.ipc = ipc
		l := h.lane(0)
		out := alone(t, []string{"PEERLANE_SOCKET=" + l.socket, "PEERLANE_NCCL_SPEED=400000"}, l.uuid)
		demand(
			t,
			out,
			"name Peerlane\n",
			"info: NET/Peerlane: peerlane_0 is the lane of "+l.uuid+" (peerlane.dev/lane=0, NIC nic0), host ",
			"; bottleneck: NIC nic0, 25.0 GB/s\n",
			"properties: 0 peerlane_0 pointers 3 speed 400000 receives 8 of 1 0\n",
			"nic: guid 0xe040a10003c288a0 port 2\n",
			"properties of the next: 4\n",
			"listen: 0 a listener\n",
			"\nVMM: 0\n",
			"are not registered, and go through NCCL's buffers",
			"cudaMalloc's beside it: 2\n",
			"the same again: 0 once\n",
			"a send out of it: 0\n",
			"to receive: 0 anew\n",
			"before: 0, other memory there: 0 anew\n",
			"sent from there: the other memory\n",
			"at once: 8 groups, 254 sends\n",
			"another kind: 4\n",
			"beyond it: 4 no request\n",
			"a group of nine: 4\n",
			"registering 1125899906842624 bytes of host memory: ",
			"\na send after it: 0\n",
		)
		if ipc {
			demand(t, out, "by legacy CUDA IPC (", "cudaMalloc's alone: 0\n")
		} else {
			demand(t, out, "relay.cuda_ipc", "PEERLANE_NCCL_POINTERS=host", "cudaMalloc's alone: 2\n")
		}
		if ipc {
			continue
		}
		// What is announced for NCCL's buffers that cannot be exported.
		demand(
			t,
			alone(t, []string{"PEERLANE_SOCKET=" + l.socket, "NCCL_CUMEM_ENABLE=0"}),
			"warn: NET/Peerlane: NCCL_CUMEM_ENABLE=0: ",
			" pointers 1 speed 200000",
		)
		demand(
			t,
			alone(t, []string{"PEERLANE_SOCKET=" + l.socket, "NCCL_CUMEM_ENABLE=0", "PEERLANE_NCCL_POINTERS=cuda"}),
			" pointers 3 ",
		)
		demand(t, alone(t, []string{"PEERLANE_SOCKET=" + l.socket, "PEERLANE_NCCL_POINTERS=host"}), " pointers 1 ")
	}
}

// For local lanes NCCL gets the rate between GPUs, and a separate device per lane. Scope auto makes
// lanes local where the relay is on no network.
func TestLocalLanesHaveTheRateOfGPULinks(t *testing.T) {
	for _, scope := range []string{launch.ScopeHost, launch.ScopeAuto} {
		h := newHost(t, launch.RouteDirect)
		h.scope = scope
		l := h.lane(0)
		demand(
			t,
			alone(t, []string{"PEERLANE_SOCKET=" + l.socket}),
			" speed 2966400 ",
			"; bottleneck: the links between GPUs of this host, 370.8 GB/s\n",
			"nic: guid 0x100000000000000 port 1\n",
			l.uuid+" (peerlane.dev/lane=0), host ",
		)
	}
}

// The variables hold for the whole process: the plugin sets the variables only in a container with
// a single, local lane, if the user has set neither the variables nor a further network.
func TestVariablesOfMessageSizesOneLocalLaneAreSet(t *testing.T) {
	ours := map[string]string{"NCCL_BUFFSIZE": "16777216", "NCCL_P2P_NET_CHUNKSIZE": "2097152"}
	for _, c := range []struct {
		name, scope, variable string
		both, set             bool
	}{
		{"local", launch.ScopeAuto, "NCCL_NET=", false, true},
		{"named", launch.ScopeHost, "NCCL_NET=peerlane", false, true},
		{"the user's buffers", launch.ScopeAuto, "NCCL_BUFFSIZE=1048576", false, true},
		{"the user's chunks", launch.ScopeAuto, "NCCL_P2P_NET_CHUNKSIZE=262144", false, true},
		{"another network", launch.ScopeAuto, "NCCL_NET=Socket", false, false},
		{"cluster", launch.ScopeCluster, "NCCL_NET=", false, false},
		{"NVLink in the container", launch.ScopeAuto, "NCCL_NET=", true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t, launch.RouteDirect)
			h.scope, h.both = c.scope, c.both
			out := alone(t, []string{"PEERLANE_SOCKET=" + h.lane(0).socket, c.variable})
			users, value, _ := strings.Cut(c.variable, "=")
			for name, want := range ours {
				logged := 1
				switch {
				case name == users:
					want, logged = value, 0
				case !c.set:
					want, logged = "none", 0
				}
				if !strings.Contains(out, "\n"+name+": "+want+"\n") {
					t.Errorf("%s is not %s: %s", name, want, out)
				}
				if n := strings.Count(out, "info: NET/Peerlane: "+name+" is "+ours[name]+" now: "); n != logged {
					t.Errorf("%d lines of %s in NCCL's log, want %d: %s", n, name, logged, out)
				}
			}
		})
	}
}

// NCCL uses the topology file beside the socket, unless the user names a file.
func TestTopologyFileBesideSocketIsUsed(t *testing.T) {
	h := newHost(t, launch.RouteDirect)
	l := h.lane(0)
	socket := "PEERLANE_SOCKET=" + l.socket
	demand(t, alone(t, []string{socket}), "\ntopology: none\n")
	file := filepath.Join(filepath.Dir(l.socket), files.TopologyName)
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ variable, want string }{
		{"NCCL_NET=", file}, {"NCCL_NET=peerlane", file}, {"PEERLANE_NCCL_TOPOLOGY=1", file},
		{"NCCL_NET=Socket", "none"}, {"PEERLANE_NCCL_TOPOLOGY=0", "none"}, {"NCCL_TOPO_FILE=/mine.xml", "/mine.xml"},
	} {
		out := alone(t, []string{socket, c.variable})
		demand(t, out, "\ntopology: "+c.want+"\n")
		if said := strings.Contains(out, "info: NET/Peerlane: NCCL_TOPO_FILE is "+file+" now"); said != (c.want == file) {
			t.Errorf("%s: %s", c.variable, out)
		}
	}
	// Without a relay NCCL uses the detected topology.
	demand(t, alone(t, []string{socket + ".none", "NCCL_NET="}), "\ntopology: none\n")
}
