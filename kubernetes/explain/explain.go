// Package explain finds the reasons why the scheduler allocates no devices to the claims of a pod.
// The scheduler's message is "cannot allocate all claims" for taken devices, taints, selectors and
// constraints alike.
package explain

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
)

// Cluster is the state that the scheduler allocates from.
type Cluster struct {
	// Claims are the claims of all namespaces.
	Claims []resourceapi.ResourceClaim
	// Templates are the templates of the pod's namespace.
	Templates []resourceapi.ResourceClaimTemplate
	Classes   []resourceapi.DeviceClass
	Slices    []resourceapi.ResourceSlice
}

// request is a request of a pod for devices.
type request struct {
	claim, name, class string
	selectors          []resourceapi.DeviceSelector
	tolerations        []resourceapi.DeviceToleration
	all                bool // the mode All
	count              int
	constraints        []resourceapi.DeviceConstraint
}

func (r request) String() string {
	amount := fmt.Sprint(r.count)
	if r.all {
		amount = "all"
	}
	return fmt.Sprintf("claim %s, request %s (%s of class %s)", r.claim, r.name, amount, r.class)
}

// device is a device of a slice.
type device struct {
	resourceapi.Device
	driver, pool string
}

func (d device) id() [3]string { return [3]string{d.driver, d.pool, d.Name} }

// Pod returns the explanation as lines.
func Pod(ctx context.Context, pod *corev1.Pod, c Cluster) []string {
	if pod.Spec.NodeName != "" {
		return []string{fmt.Sprintf("The scheduler has chosen node %s: the pod has the devices.", pod.Spec.NodeName)}
	}
	requests, lines := c.requests(pod)
	if len(requests) == 0 {
		return append(lines, "No request of the pod waits for devices.")
	}
	nodes, taken := c.nodes(), c.taken()
	if len(nodes) == 0 {
		return append(lines, "No node has published a ResourceSlice: is the DaemonSet of each driver running?")
	}
	fits := map[string]int{}
	for _, r := range requests {
		for _, node := range slices.Sorted(maps.Keys(nodes)) {
			line, enough := c.try(ctx, r, node, nodes[node], taken)
			if enough {
				fits[node]++
			}
			lines = append(lines, line)
		}
	}
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		if fits[node] == len(requests) {
			lines = append(lines, c.combine(ctx, requests, node, nodes[node], taken)...)
		}
	}
	return lines
}

// requests returns the requests without an allocation, and lines about missing objects.
func (c Cluster) requests(pod *corev1.Pod) (requests []request, lines []string) {
	add := func(claim string, spec resourceapi.DeviceClaim) {
		for _, r := range spec.Requests {
			if r.Exactly == nil {
				lines = append(lines, fmt.Sprintf("claim %s, request %s is a list of alternatives, which explain does not read",
					claim, r.Name))
				continue
			}
			e := r.Exactly
			requests = append(requests, request{claim, r.Name, e.DeviceClassName, e.Selectors, e.Tolerations,
				e.AllocationMode == resourceapi.DeviceAllocationModeAll, max(1, int(e.Count)), spec.Constraints})
		}
	}
	for _, of := range pod.Spec.ResourceClaims {
		switch claim, template := c.claim(pod, of), c.template(of); {
		case claim != nil && claim.Status.Allocation != nil: // the claim has devices
		case claim != nil:
			add(claim.Name, claim.Spec.Devices)
		case template != nil:
			add(of.Name, template.Spec.Spec.Devices)
		case of.ResourceClaimTemplateName != nil:
			lines = append(lines, fmt.Sprintf("claim %s: namespace %s has no ResourceClaimTemplate %s", of.Name, pod.Namespace,
				*of.ResourceClaimTemplateName))
		default:
			lines = append(lines, fmt.Sprintf("claim %s: namespace %s has no such ResourceClaim", of.Name, pod.Namespace))
		}
	}
	for _, container := range pod.Spec.Containers {
		for _, class := range c.Classes {
			if name := class.Spec.ExtendedResourceName; name != nil {
				if n := container.Resources.Limits[corev1.ResourceName(*name)]; n.Value() > 0 {
					requests = append(requests, request{claim: "of limits", name: *name, class: class.Name, count: int(n.Value())})
				}
			}
		}
	}
	return requests, lines
}

func (c Cluster) claim(pod *corev1.Pod, of corev1.PodResourceClaim) *resourceapi.ResourceClaim {
	name := of.ResourceClaimName
	for _, s := range pod.Status.ResourceClaimStatuses {
		if s.Name == of.Name && s.ResourceClaimName != nil {
			name = s.ResourceClaimName
		}
	}
	i := slices.IndexFunc(c.Claims, func(claim resourceapi.ResourceClaim) bool {
		return name != nil && claim.Namespace == pod.Namespace && claim.Name == *name
	})
	if i < 0 {
		return nil
	}
	return &c.Claims[i]
}

func (c Cluster) template(of corev1.PodResourceClaim) *resourceapi.ResourceClaimTemplate {
	i := slices.IndexFunc(c.Templates, func(t resourceapi.ResourceClaimTemplate) bool {
		return of.ResourceClaimTemplateName != nil && t.Name == *of.ResourceClaimTemplateName
	})
	if i < 0 {
		return nil
	}
	return &c.Templates[i]
}

// nodes returns the devices of nodes, from the newest generation of a pool.
func (c Cluster) nodes() map[string][]device {
	newest := map[string]int64{}
	key := func(s resourceapi.ResourceSlice) string { return s.Spec.Driver + "/" + s.Spec.Pool.Name }
	for _, s := range c.Slices {
		newest[key(s)] = max(newest[key(s)], s.Spec.Pool.Generation)
	}
	nodes := map[string][]device{}
	for _, s := range c.Slices {
		if s.Spec.NodeName == nil || s.Spec.Pool.Generation != newest[key(s)] {
			continue
		}
		for _, d := range s.Spec.Devices {
			nodes[*s.Spec.NodeName] = append(nodes[*s.Spec.NodeName], device{d, s.Spec.Driver, s.Spec.Pool.Name})
		}
	}
	return nodes
}

// taken returns the claims of allocated devices.
func (c Cluster) taken() map[[3]string]string {
	taken := map[[3]string]string{}
	for _, claim := range c.Claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			taken[[3]string{r.Driver, r.Pool, r.Device}] = claim.Namespace + "/" + claim.Name
		}
	}
	return taken
}

// candidates are the devices of a node for a request.
type candidates struct {
	free, tainted, allocated []string
	devices                  []device // the free devices
	failure                  string   // of a selector
}

// find sorts the devices of a node that match a request by their state.
func (c Cluster) find(ctx context.Context, r request, devices []device, taken map[[3]string]string) candidates {
	var found candidates
	i := slices.IndexFunc(c.Classes, func(class resourceapi.DeviceClass) bool { return class.Name == r.class })
	if i < 0 {
		found.failure = "the cluster has no DeviceClass " + r.class
		return found
	}
	selectors, err := compile(slices.Concat(c.Classes[i].Spec.Selectors, r.selectors))
	if err != nil {
		found.failure = fmt.Sprintf("a selector is no valid expression: %v", err)
		return found
	}
	for _, d := range devices {
		matches, err := matchesAll(ctx, selectors, d)
		if err != nil {
			found.failure = fmt.Sprintf("a selector fails for device %s, so that the node gets no pod with this request: %v",
				d.Name, err)
			return found
		}
		if !matches {
			continue
		}
		shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
		switch taint, claim := blocking(d.Taints, r.tolerations), taken[d.id()]; {
		case claim != "" && !shared:
			found.allocated = append(found.allocated, d.Name+" by "+claim)
		case taint != "":
			found.tainted = append(found.tainted, d.Name+" with "+taint)
		default:
			found.free, found.devices = append(found.free, d.Name), append(found.devices, d)
		}
	}
	return found
}

// try describes a request on a node.
func (c Cluster) try(ctx context.Context, r request, node string, devices []device,
	taken map[[3]string]string) (line string, enough bool) {
	found := c.find(ctx, r, devices, taken)
	if found.failure != "" {
		return fmt.Sprintf("%s, node %s: %s", r, node, found.failure), false
	}
	enough = len(found.free) >= r.count && (!r.all || len(found.allocated)+len(found.tainted) == 0)
	text := fmt.Sprintf("%s, node %s: %d free", r, node, len(found.free))
	for _, part := range []struct {
		name string
		list []string
	}{{"allocated", found.allocated}, {"tainted", found.tainted}} {
		if len(part.list) > 0 {
			text += fmt.Sprintf(", %d %s (%s)", len(part.list), part.name, strings.Join(part.list, ", "))
		}
	}
	if len(found.free)+len(found.allocated)+len(found.tainted) == 0 {
		text += ": no device matches"
	}
	return text, enough
}

// combine describes a node that has enough devices for the requests without the constraints.
func (c Cluster) combine(ctx context.Context, requests []request, node string, devices []device,
	taken map[[3]string]string) (lines []string) {
	for _, r := range requests {
		for _, constraint := range r.constraints {
			constrained := constraint.Requests
			if len(constrained) == 0 { // the constraint applies to the whole claim
				for _, other := range requests {
					if other.claim == r.claim {
						constrained = append(constrained, other.name)
					}
				}
			}
			if constraint.MatchAttribute == nil || constrained[0] != r.name {
				continue // reported with the first request, or without an attribute
			}
			common := map[string]int{}
			names := 0
			for _, other := range requests {
				if other.claim != r.claim || !slices.Contains(constrained, other.name) {
					continue
				}
				names++
				for value := range values(c.find(ctx, other, devices, taken).devices, *constraint.MatchAttribute) {
					common[value]++
				}
			}
			if !slices.Contains(slices.Collect(maps.Values(common)), names) {
				lines = append(lines, fmt.Sprintf("claim %s, node %s: no free devices of the requests %s have the same %s",
					r.claim, node, strings.Join(constrained, ", "), *constraint.MatchAttribute))
			}
		}
	}
	if len(lines) == 0 {
		lines = append(lines, fmt.Sprintf("Node %s has devices for each request: look at the pod's events for another "+
			"cause, such as processors or taints of the node.", node))
	}
	return lines
}

// values returns the values of an attribute with the type, because a number never equals a text.
func values(devices []device, name resourceapi.FullyQualifiedName) map[string]bool {
	all := map[string]bool{}
	for _, d := range devices {
		attribute, ok := d.Attributes[resourceapi.QualifiedName(name)]
		if domain, own, qualified := strings.Cut(string(name), "/"); !ok && qualified && domain == d.driver {
			attribute = d.Attributes[resourceapi.QualifiedName(own)]
		}
		add(all, "string", attribute.StringValue, attribute.StringValues)
		add(all, "version", attribute.VersionValue, attribute.VersionValues)
		add(all, "int", attribute.IntValue, attribute.IntValues)
		add(all, "bool", attribute.BoolValue, attribute.BoolValues)
	}
	return all
}

// add adds the value and the elements of a list: the scheduler matches elements.
func add[T any](all map[string]bool, kind string, value *T, list []T) {
	if value != nil {
		list = []T{*value} // an attribute has a value or a list
	}
	for _, v := range list {
		all[fmt.Sprint(kind, " ", v)] = true
	}
}

func compile(selectors []resourceapi.DeviceSelector) (compiled []cel.CompilationResult, err error) {
	for _, s := range selectors {
		if s.CEL == nil {
			continue
		}
		one := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(s.CEL.Expression,
			cel.Options{})
		if one.Error != nil {
			return nil, one.Error
		}
		compiled = append(compiled, one)
	}
	return compiled, nil
}

func matchesAll(ctx context.Context, selectors []cel.CompilationResult, d device) (bool, error) {
	for _, s := range selectors {
		matches, _, err := s.DeviceMatches(ctx, cel.Device{Driver: d.driver, Attributes: d.Attributes,
			Capacity: d.Capacity, AllowMultipleAllocations: d.AllowMultipleAllocations})
		if err != nil || !matches {
			return false, err
		}
	}
	return true, nil
}

// blocking returns the key of a taint that excludes new pods; empty without such a taint.
func blocking(taints []resourceapi.DeviceTaint, tolerations []resourceapi.DeviceToleration) string {
	for _, taint := range taints {
		if taint.Effect == resourceapi.DeviceTaintEffectNone {
			continue
		}
		tolerated := slices.ContainsFunc(tolerations, func(t resourceapi.DeviceToleration) bool {
			return (t.Effect == "" || t.Effect == taint.Effect) && (t.Key == taint.Key || t.Key == "") &&
				(t.Operator == resourceapi.DeviceTolerationOpExists || t.Key != "" && t.Value == taint.Value)
		})
		if !tolerated {
			return taint.Key
		}
	}
	return ""
}
