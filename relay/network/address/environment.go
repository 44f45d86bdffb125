package address

import (
	"slices"
	"strings"
)

// Ignored is a variable of NCCL's that a job sets and that has no effect on relays.
type Ignored struct {
	// Name is the variable's, "NCCL_SOCKET_IFNAME".
	Name string
	// Key is of config.toml, the one that has the effect on relays; empty where none has.
	Key string
	// Note is what else is to be known, a clause; empty for nothing.
	Note string
}

// String is a sentence for the job's log.
func (i Ignored) String() string {
	text := i.Name + " has no effect on Peerlane's relays: "
	if i.Key == "" {
		text += "no key of their host's config.toml stands for it"
	} else {
		text += "the host's administrator sets " + i.Key + " in config.toml"
	}
	if i.Note != "" {
		text += "; " + i.Note
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
	"NCCL_SOCKET_IFNAME":   {Key: "network.interfaces", Note: ownSockets},
	"NCCL_SOCKET_FAMILY":   {Key: "network.family", Note: ownSockets},
	"NCCL_SOCKET_NTHREADS": {Key: "network.streams", Note: ownSockets},
	"NCCL_IB_HCA":          {Key: "plan.exclude.nics, or plan.lane.nics,", Note: ofVerbs},
	"NCCL_IB_DISABLE":      {Key: "relay.transport", Note: "which transport relays use follows from the host's NICs, unless it says otherwise"},
	"NCCL_IB_MERGE_NICS":   {Key: "plan.lane.nics", Note: ofVerbs},

	"NCCL_IB_TC":                 {Key: "verbs.tc", Note: isVerbs},
	"NCCL_IB_SL":                 {Key: "verbs.sl", Note: isVerbs},
	"NCCL_IB_PKEY":               {Key: "verbs.pkey", Note: isVerbs},
	"NCCL_IB_TIMEOUT":            {Key: "verbs.timeout", Note: isVerbs},
	"NCCL_IB_RETRY_CNT":          {Key: "verbs.retry_cnt", Note: isVerbs},
	"NCCL_IB_GID_INDEX":          {Key: "verbs.gid_index", Note: isVerbs},
	"NCCL_IB_QPS_PER_CONNECTION": {Key: "verbs.qps_per_connection", Note: isVerbs},
}

// IgnoredVariables reports, by name, the NCCL_SOCKET_* and NCCL_IB_* variables of an
// environment ("NAME=value" each): relays are the host's, and nothing that a container
// sets changes how they use the network.
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
			known.Note = map[bool]string{true: ownSockets, false: ofVerbs}[socket]
		}
		known.Name = name
		found = append(found, known)
	}
	slices.SortFunc(found, func(a, b Ignored) int { return strings.Compare(a.Name, b.Name) })
	return slices.Compact(found)
}
