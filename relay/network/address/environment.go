package address

import (
	"slices"
	"strings"
)

// Ignored is a variable of NCCL's that a job sets and that has no effect on relays.
type Ignored struct {
	// Name is the variable's, "NCCL_SOCKET_IFNAME".
	Name string
	// key is the key of config.toml with the same effect on relays; empty without such a key.
	key string
	// note is an additional clause for the message; may be empty.
	note string
}

// String is a sentence for the job's log.
func (i Ignored) String() string {
	text := i.Name + " has no effect on Peerlane's relays: "
	if i.key == "" {
		text += "no key of their host's config.toml stands for it"
	} else {
		text += "the host's administrator sets " + i.key + " in config.toml"
	}
	if i.note != "" {
		text += "; " + i.note
	}
	return text
}

const (
	ownSockets = "NCCL's own sockets, of its bootstrap, go by it"
	ofVerbs    = "it is of NCCL's own verbs transport"
	isVerbs    = "NCCL's own verbs transport goes by it"
)

// ncclKeys are the variables for which there is a key, or more to say. Names are of
// NCCL's documentation, "Environment Variables".
var ncclKeys = map[string]Ignored{
	"NCCL_SOCKET_IFNAME":   {key: "network.interfaces", note: ownSockets},
	"NCCL_SOCKET_FAMILY":   {key: "network.family", note: ownSockets},
	"NCCL_SOCKET_NTHREADS": {key: "network.streams", note: ownSockets},
	"NCCL_IB_HCA":          {key: "plan.exclude.nics, or plan.lane.nics,", note: ofVerbs},
	"NCCL_IB_DISABLE": {
		key:  "relay.transport",
		note: "which transport relays use follows from the host's NICs, unless it says otherwise",
	},
	"NCCL_IB_MERGE_NICS": {key: "plan.lane.nics", note: ofVerbs},

	"NCCL_IB_TC":                 {key: "verbs.tc", note: isVerbs},
	"NCCL_IB_SL":                 {key: "verbs.sl", note: isVerbs},
	"NCCL_IB_PKEY":               {key: "verbs.pkey", note: isVerbs},
	"NCCL_IB_TIMEOUT":            {key: "verbs.timeout", note: isVerbs},
	"NCCL_IB_RETRY_CNT":          {key: "verbs.retry_cnt", note: isVerbs},
	"NCCL_IB_GID_INDEX":          {key: "verbs.gid_index", note: isVerbs},
	"NCCL_IB_QPS_PER_CONNECTION": {key: "verbs.qps_per_connection", note: isVerbs},
}

// IgnoredVariables reports, by name, the NCCL_SOCKET_* and NCCL_IB_* variables of an environment (a
// list of "NAME=value"): relays belong to the host, and a container's variables do not change their
// use of the network.
func IgnoredVariables(environment []string) []Ignored {
	var found []Ignored
	for _, variable := range environment {
		name, value, _ := strings.Cut(variable, "=")
		socket := strings.HasPrefix(name, "NCCL_SOCKET_")
		if value == "" || !socket && !strings.HasPrefix(name, "NCCL_IB_") {
			continue // NCCL takes an empty variable for none
		}
		known, ok := ncclKeys[name]
		if !ok {
			known.note = map[bool]string{true: ownSockets, false: ofVerbs}[socket]
		}
		known.Name = name
		found = append(found, known)
	}
	slices.SortFunc(found, func(a, b Ignored) int { return strings.Compare(a.Name, b.Name) })
	return slices.Compact(found)
}
