package nccl_test

import (
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
)

// kind is a container of a rank: the scope of the relay, the number of lanes, and a variable.
type kind struct {
	scope    string
	both     bool
	variable string
}

// between runs the harness with two ranks in two containers.
func between(t *testing.T, kinds [2]kind, environment ...string) (out string, ok bool) {
	t.Helper()
	h := newHost(t, launch.RouteDirect)
	var lanes [2]*lane
	for i, k := range kinds {
		h.scope, h.both = k.scope, k.both
		lanes[i] = h.lane(i)
		if k.variable != "" {
			environment = append(environment, []string{"HARNESS_RANK_0=", "HARNESS_RANK_1="}[i]+k.variable)
		}
	}
	r := run{
		plugin:      plugin(t),
		harness:     program(t, "harness"),
		version:     12,
		mode:        "run",
		seed:        seed(t),
		links:       2,
		groups:      2,
		bytes:       1000,
		depth:       2,
		environment: environment,
	}
	text, err := r.command(lanes[0], lanes[1]).CombinedOutput()
	return string(text), err == nil && strings.Count(string(text), ": done\n") == 2
}

var (
	oneLane  = kind{scope: launch.ScopeHost}
	twoLanes = kind{scope: launch.ScopeHost, both: true}
	network  = kind{scope: launch.ScopeCluster}
)

func with(k kind, variable string) kind {
	k.variable = variable
	return k
}

// NCCL of two ranks with different settings hangs. The plugin refuses their connection, with
// both values and the remedy.
func TestConnectDifferentSettingsOfRanksIsRefused(t *testing.T) {
	for _, c := range []struct {
		name  string
		kinds [2]kind
		want  []string // alternatives: either rank connects first
	}{
		{"one lane beside two", [2]kind{oneLane, twoLanes}, []string{
			"NCCL_BUFFSIZE is 16777216 here and 4194304 there, NCCL_P2P_NET_CHUNKSIZE is 2097152 here and 131072 there " +
				"(lanes here: 1, which reach only this host; there: 2, which reach only this host)",
			"NCCL_BUFFSIZE is 4194304 here and 16777216 there, NCCL_P2P_NET_CHUNKSIZE is 131072 here and 2097152 there " +
				"(lanes here: 2, which reach only this host; there: 1, which reach only this host)"}},
		{"without the network beside with it", [2]kind{twoLanes, network}, []string{
			"the choice of protocols and channels is that of Peerlane's tuner here and NCCL's there (lanes here: 2, which " +
				"reach only this host; there: 1, on a network)",
			"the choice of protocols and channels is NCCL's here and that of Peerlane's tuner there (lanes here: 1, on a " +
				"network; there: 2, which reach only this host)"}},
		{"an nccl.conf of its own", [2]kind{with(oneLane, "NCCL_NCHANNELS_PER_NET_PEER=8"), oneLane}, []string{
			"NCCL hangs: NCCL_NCHANNELS_PER_NET_PEER is 8 here and NCCL's own there (",
			"NCCL hangs: NCCL_NCHANNELS_PER_NET_PEER is NCCL's own here and 8 there ("}},
		{"channels by hand", [2]kind{with(oneLane, "NCCL_MAX_NCHANNELS=4"), oneLane}, []string{
			"is that of Peerlane's tuner with the user's channels (such as NCCL_MIN_NCHANNELS) here and that of " +
				"Peerlane's tuner there",
			"is that of Peerlane's tuner here and that of Peerlane's tuner with the user's channels (such as " +
				"NCCL_MIN_NCHANNELS) there"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, ok := between(t, c.kinds)
			if ok || !strings.Contains(out, c.want[0]) && !strings.Contains(out, c.want[1]) {
				t.Errorf("none of %q: %s", c.want, out)
			}
			demand(
				t,
				out,
				"connect: NET/Peerlane: connecting: GPU-00000000-0000-0000-0000-00000000000",
				"). Give all containers of a job the same number of lanes, the same relay.scope and cluster key, and the "+
					"same nccl.conf, or set these variables by hand in all of them\n",
			)
		})
	}
}

// Variables of containers may differ if NCCL's effective settings are equal.
func TestConnectSameEffectiveSettingsOfRanksSucceeds(t *testing.T) {
	for _, c := range []struct {
		name        string
		kinds       [2]kind
		environment []string
	}{
		{"variables by hand", [2]kind{oneLane, twoLanes}, []string{"NCCL_BUFFSIZE=8388608", "NCCL_P2P_NET_CHUNKSIZE=524288",
			"NCCL_NCHANNELS_PER_NET_PEER=4"}},
		{"NCCL's own value by hand", [2]kind{network, with(network, "NCCL_BUFFSIZE=4194304")}, nil},
		{"a chunk that NCCL limits", [2]kind{network, with(network, "NCCL_P2P_NET_CHUNKSIZE=524288")},
			[]string{"NCCL_BUFFSIZE=1048576"}},
		{"another tuner", [2]kind{twoLanes, network}, []string{"NCCL_TUNER_PLUGIN=other"}},
		{"a listener of an older plugin", [2]kind{oneLane, twoLanes}, []string{"HARNESS_OLD=1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if out, ok := between(t, c.kinds, c.environment...); !ok {
				t.Error(out)
			}
		})
	}
}
