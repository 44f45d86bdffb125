package lanes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/virtualswitch"
)

// Refresh is the remedy for a plan that does not fit the host.
const Refresh = "run peerlane cdi refresh"

// ReadPlan reads the host's plan. The plan determines the devices of processes of root, so
// ReadPlan refuses a plan that another user could have written, or that is of another host.
func ReadPlan(l paths.Layout) (*planner.Plan, error) {
	path := l.PlanFile()
	if err := paths.CheckTrusted(path); errors.Is(err, fs.ErrNotExist) {
		return nil, &fault.Error{Code: fault.UnreadablePlan, Operation: "read the plan", Cause: err, Remedy: Refresh}
	} else if err != nil {
		return nil, err
	}
	plan, err := planner.Read(path)
	if err != nil {
		return nil, err
	}
	if plan.Source.Kind != topo.SourceSysfs {
		return nil, &fault.Error{
			Code:      fault.UnreadablePlan,
			Operation: "read the plan",
			Object:    path,
			Cause:     &fileError{plan.Source.File},
			Remedy:    Refresh,
		}
	}
	return plan, nil
}

// fileError is the cause of a plan that was made from a file instead of this host.
type fileError struct{ source string }

func (e *fileError) Error() string {
	return fmt.Sprintf("the plan was made from the file %s and not from this host", e.source)
}

// MarkVisibleServers marks lanes whose server GPUs the container sees too.
func MarkVisibleServers(lanes []launch.Lane) {
	for i := range lanes {
		lanes[i].Copy = true
	}
}

// Find returns the lanes of a plan by the identity of their GPUs, "UUID@PCI address", as in a CDI
// specification. The UUID may be empty on either side.
func Find(plan *planner.Plan, names []string) ([]launch.Lane, error) {
	var lanes []launch.Lane
	for _, name := range names {
		lane, err := findLane(plan, name)
		if err != nil {
			return nil, fmt.Errorf("lane %q: %w", name, err)
		}
		lanes = append(lanes, lane)
	}
	return lanes, nil
}

// staleGPU returns the error of a GPU that differs from the CDI specification.
func staleGPU(gpu string, cause error) error {
	return &fault.Error{
		Code:      fault.StaleSpecification,
		Operation: "find GPU",
		Object:    gpu,
		Cause:     cause,
		Remedy:    Refresh + ", so that the CDI specification fits the host",
	}
}

var errLaneName = errors.New(`a lane name has the form "GPU-uuid@0000:17:00.0" or "@0000:17:00.0"`)

// movedError is the cause of a GPU at another address than in the CDI specification.
type movedError struct{ busID string } // the present address

func (e *movedError) Error() string { return fmt.Sprintf("that GPU is at %s by now", e.busID) }

// replacedError is the cause of an address with another GPU.
type replacedError struct{ uuid string } // of the other GPU

func (e *replacedError) Error() string { return fmt.Sprintf("another GPU is there now, %s", e.uuid) }

// refusedError is the cause of a GPU without a lane in the plan.
type refusedError struct{ reason string } // as in the plan

func (e *refusedError) Error() string { return "that GPU cannot have a lane: " + e.reason }

func findLane(plan *planner.Plan, name string) (launch.Lane, error) {
	uuid, busID, ok := strings.Cut(name, "@")
	if !ok {
		return launch.Lane{}, errLaneName
	}
	busID, err := topo.ParseBusID(busID)
	if err != nil {
		return launch.Lane{}, err
	}
	gpu, err := plan.GPU(busID)
	if uuid != "" {
		if byUUID, unknown := plan.GPU(uuid); unknown == nil && byUUID.BusID != busID {
			return launch.Lane{}, staleGPU(uuid, &movedError{byUUID.BusID})
		}
	}
	if err != nil {
		return launch.Lane{}, staleGPU(busID, err)
	}
	if uuid != "" && gpu.UUID != "" && !strings.EqualFold(uuid, gpu.UUID) {
		return launch.Lane{}, staleGPU(busID, &replacedError{gpu.UUID})
	}
	lane, err := plan.Lane(busID)
	if err != nil {
		return launch.Lane{}, err
	}
	if lane.Role == planner.RoleRefused {
		return launch.Lane{}, &refusedError{lane.Reason}
	}
	out := launch.Lane{
		Role:    lane.Role,
		Relay:   lane.Relay,
		Direct:  lane.Kind == planner.KindDirect,
		GPU:     Identity(gpu),
		Servers: []launch.GPU{},
		NICs:    lane.NICs,
	}
	for _, m := range lane.Members {
		out.Direct = out.Direct || lane.KindOf(m) == planner.KindDirect
		out.Members = append(out.Members, launch.Member{Server: m.Server, NIC: m.NIC, Weight: m.Weight})
	}
	if len(lane.NICs) > 0 {
		n := virtualswitch.NICOf(plan, lane.NICs[0])
		out.NIC = &launch.NIC{Name: lane.NICs[0], GUID: n.GUID, Mbps: n.Mbps, Port: n.Port}
	}
	out.PeerMbps = virtualswitch.PeerMbps(gpu)
	for _, s := range lane.Servers {
		server, err := plan.GPU(s)
		if err != nil {
			return launch.Lane{}, err
		}
		out.Servers = append(out.Servers, Identity(server))
	}
	return out, nil
}

// maxSpares limits the spares of a lane, because a relay's configuration is one datagram.
const maxSpares = 4

// AddSpares adds the GPUs that can replace a lane's servers: servers of other lanes of the plan,
// the GPUs beside the lane's NICs first. A configured lane has no spares, because the
// administrator chose its servers. A GPU is no spare if the configuration excludes its pair with
// the lane's GPU or with a NIC.
func AddSpares(plan *planner.Plan, lanes []launch.Lane, excluded [][]string) {
	for i := range lanes {
		planned, err := plan.Lane(lanes[i].GPU.BusID)
		if err != nil || !planned.Relay || planned.Pinned {
			continue
		}
		seen := append(slices.Clone(planned.Servers), planned.GPU)
		var beside, away []launch.Spare
		for _, other := range plan.Lanes {
			if !other.Relay {
				continue
			}
			for _, s := range other.Servers {
				server, err := plan.GPU(s)
				if err != nil || slices.Contains(seen, s) || excludes(plan, excluded, s, planned.GPU) {
					continue
				}
				own := func(nic string) bool { return slices.Contains(planned.NICs, nic) }
				nics := slices.DeleteFunc(
					slices.Clone(other.NICs),
					func(nic string) bool { return excludes(plan, excluded, s, nic) },
				)
				switch common := slices.DeleteFunc(slices.Clone(nics), func(nic string) bool { return !own(nic) }); {
				case len(common) > 0:
					beside = append(beside, launch.Spare{GPU: Identity(server), NICs: common})
				case len(nics) > 0:
					away = append(away, launch.Spare{GPU: Identity(server), NICs: nics})
				default:
					continue
				}
				seen = append(seen, s)
			}
		}
		spares := append(beside, away...)
		lanes[i].Spares = spares[:min(len(spares), maxSpares)]
	}
}

// excludes reports whether the configuration excludes the pair of a GPU, by PCI address, and a GPU
// or a NIC.
func excludes(plan *planner.Plan, pairs [][]string, gpu, other string) bool {
	address := func(name string) string {
		if g, err := plan.GPU(name); err == nil {
			return g.BusID
		}
		return name // the name of a NIC
	}
	return slices.ContainsFunc(pairs, func(pair []string) bool {
		if len(pair) != 2 {
			return false
		}
		a, b := address(pair[0]), address(pair[1])
		return a == gpu && b == other || a == other && b == gpu
	})
}

// Identity returns the UUID, PCI address and index of a GPU.
func Identity(g topo.GPU) launch.GPU {
	return launch.GPU{UUID: g.UUID, BusID: g.BusID, Index: g.Index}
}

// Present checks that the GPUs of lanes are at the addresses of the plan.
func Present(plan *planner.Plan, lanes []launch.Lane) error {
	const nvidia = "0x10de" // PCI vendor
	for _, lane := range lanes {
		for _, gpu := range append([]launch.GPU{lane.GPU}, lane.Servers...) {
			path := filepath.Join(plan.Source.Sysfs, "bus/pci/devices", gpu.BusID, "vendor")
			vendor, err := os.ReadFile(path)
			if err == nil && strings.TrimSpace(string(vendor)) != nvidia {
				err = &valueError{path, strings.TrimSpace(string(vendor)), nvidia}
			}
			if err != nil {
				return &fault.Error{Code: fault.StaleSpecification, Operation: "find GPU of the plan",
					Object: fmt.Sprintf("%d (%s)", gpu.Index, gpu.BusID), Cause: err, Remedy: Refresh}
			}
		}
	}
	return nil
}

// valueError is the cause of a file of sysfs without the expected value.
type valueError struct{ path, value, want string }

func (e *valueError) Error() string { return fmt.Sprintf("%s is %s, not %s", e.path, e.value, e.want) }

var errNoNIC = errors.New("the plan has no NIC of this name with a device node")

// staleNIC returns the error of a NIC that differs from the plan.
func staleNIC(name string, cause error) error {
	return &fault.Error{Code: fault.StaleSpecification, Operation: "find NIC of the plan", Object: name, Cause: cause,
		Remedy: Refresh + ", so that the CDI specification fits the host"}
}

// PresentNICs checks that the device nodes of the lanes' NICs and of the named NICs belong to the
// NICs of the plan, because every boot numbers the nodes again.
func PresentNICs(plan *planner.Plan, lanes []launch.Lane, names []string) error {
	check := func(name string) error {
		i := slices.IndexFunc(plan.NICs, func(n topo.NIC) bool { return n.Name == name })
		if i < 0 || plan.NICs[i].Uverbs == "" {
			return staleNIC(name, errNoNIC)
		}
		path := filepath.Join(plan.Source.Sysfs, "class/infiniband_verbs", plan.NICs[i].Uverbs, "ibdev")
		ibdev, err := os.ReadFile(path)
		if err == nil && strings.TrimSpace(string(ibdev)) != name {
			err = &valueError{path, strings.TrimSpace(string(ibdev)), name}
		}
		if err != nil {
			return staleNIC(name, fmt.Errorf("check node %s: %w", plan.NICs[i].Uverbs, err))
		}
		return nil
	}
	for _, lane := range lanes {
		for _, name := range lane.NICs {
			// A software device, or a NIC without RDMA, has no node.
			if !slices.ContainsFunc(plan.NICs, func(n topo.NIC) bool { return n.Name == name && n.Uverbs != "" }) {
				continue
			}
			if err := check(name); err != nil {
				return err
			}
		}
	}
	for _, name := range names {
		if err := check(name); err != nil {
			return err
		}
	}
	return nil
}
