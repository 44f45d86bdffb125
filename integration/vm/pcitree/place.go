package pcitree

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"math/bits"
	"slices"
)

// portType is a device's or port's type (PCIe 7.5.3.2).
type portType int

const (
	endpoint       portType = 0
	rootPort       portType = 4
	upstreamPort   portType = 5
	downstreamPort portType = 6
)

// address of a function.
type address struct{ domain, bus, device int }

func (a address) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.0", a.domain, a.bus, a.device)
}

// function is a configuration space.
type function struct {
	address
	portType
	line *line // upstream and downstream ports of a switch share a line
	root *line // the host bridge

	secondary, subordinate int // buses below a bridge

	acs     acs
	port    int  // number of a port
	max     link // maximum
	current link // in operation; zero without a link

	minor int // of a GPU that the driver manages; otherwise -1
	uuid  string
}

// Function is a function of a tree at an address.
type Function struct {
	Address        string // as in 0000:18:00.0
	Class          uint32 // six hexadecimal digits
	Vendor, Device uint16
	NUMA           int    // or -1
	Driver         string // nvidia, mlx5_core, pcieport or ""
	UUID           string // of a GPU
}

// Functions lists the tree's functions, bridges before children.
func (t *Tree) Functions() []Function {
	var all []Function
	for _, f := range t.functions {
		driver := f.line.driver
		if f.portType != endpoint {
			driver = "pcieport"
		}
		all = append(all, Function{
			Address: f.String(), Class: f.line.class, Vendor: f.line.id.vendor, Device: f.line.id.device,
			NUMA: f.root.numa, Driver: driver, UUID: f.uuid,
		})
	}
	return all
}

// placing assigns bus numbers below a root.
type placing struct {
	tree  *Tree
	root  *line
	next  int // bus
	taken map[[2]int]int
}

// place assigns addresses to the lines.
func place(top []*line) (*Tree, error) {
	t := &Tree{}
	taken := map[[2]int]int{} // from domain and bus to the line of the bus
	for _, root := range top {
		p := placing{tree: t, root: root, next: root.bus, taken: taken}
		bus, err := p.newBus(root)
		if err != nil {
			return nil, err
		}
		for i, port := range root.children {
			if err := p.addPort(port, rootPort, address{root.domain, bus, i + 1}, port.acs, i+1, port.max,
				port.children); err != nil {
				return nil, err
			}
		}
		if need := p.need(); need > t.window {
			t.window = need
		}
	}
	if t.window > maxWindow {
		return nil, &tableError{0, fmt.Errorf(
			"the BARs below one host bridge may need %d GiB, above the guest's maximum of %d; spread the GPUs "+
				"over more host bridges", t.window>>30, uint64(maxWindow)>>30)}
	}
	return t, t.nameGPUs()
}

func (p *placing) newBus(l *line) (int, error) {
	bus := p.next
	if bus > 0xff {
		return 0, &tableError{l.number, fmt.Errorf("out of bus numbers: host bridge %04x:%02x has more buses than "+
			"there are up to ff", p.root.domain, p.root.bus)}
	}
	if other, ok := p.taken[[2]int{p.root.domain, bus}]; ok {
		return 0, &tableError{l.number, fmt.Errorf("bus %04x:%02x is in use by line %d; move the host bridges apart",
			p.root.domain, bus, other)}
	}
	p.taken[[2]int{p.root.domain, bus}] = l.number
	p.next++
	return bus, nil
}

func (p *placing) add(f *function) error {
	if len(p.tree.functions) == maxFunctions {
		return &tableError{f.line.number, fmt.Errorf("there are more than %d functions", maxFunctions)}
	}
	f.root, f.minor = p.root, -1
	p.tree.functions = append(p.tree.functions, f)
	return nil
}

// addPort adds a root port or a downstream port and its child, if any.
func (p *placing) addPort(l *line, t portType, a address, acs acs, number int, max link, below []*line) error {
	bus, err := p.newBus(l)
	if err != nil {
		return err
	}
	f := &function{address: a, portType: t, line: l, secondary: bus, acs: acs, port: number, max: max}
	if err := p.add(f); err != nil {
		return err
	}
	for _, child := range below {
		if f.current, err = negotiate(max, child); err != nil {
			return err
		}
		if err := p.addBelow(child, address{a.domain, bus, 0}, f.current); err != nil {
			return err
		}
	}
	f.subordinate = p.next - 1
	return nil
}

// addBelow adds the device at the lower end of a link: a switch or an endpoint.
func (p *placing) addBelow(l *line, a address, current link) error {
	f := &function{address: a, line: l, acs: acsNone, max: l.max, current: current}
	if l.kind != kindSwitch {
		return p.add(f)
	}
	bus, err := p.newBus(l)
	if err != nil {
		return err
	}
	f.portType, f.secondary = upstreamPort, bus
	if err := p.add(f); err != nil {
		return err
	}
	for i, child := range l.children {
		acs := cmp.Or(child.portACS, l.acs)
		if err := p.addPort(l, downstreamPort, address{a.domain, bus, i}, acs, i+1, l.max, l.children[i:i+1]); err != nil {
			return err
		}
	}
	f.subordinate = p.next - 1
	return nil
}

// negotiate returns the link in operation: the minimum of both ends, or the table's value, which
// may not exceed it.
func negotiate(above link, l *line) (link, error) {
	common := link{gen: min(above.gen, l.max.gen), width: min(above.width, l.max.width)}
	if l.current == (link{}) {
		return common, nil
	}
	if l.current.gen > common.gen || l.current.width > common.width {
		return link{}, &tableError{l.number, fmt.Errorf("link=gen%dx%d exceeds the common maximum of both ends, gen%dx%d",
			l.current.gen, l.current.width, common.gen, common.width)}
	}
	return l.current, nil
}

// need returns an upper bound of the address space below a root: the BARs of functions rounded up
// to powers of two, as bridge windows are, and twice the sum, because nested windows round again.
func (p *placing) need() uint64 {
	sum := uint64(1 << 29)
	for _, f := range p.tree.functions {
		if f.root != p.root {
			continue
		}
		var bars uint64
		for _, size := range f.bars() {
			bars += size
		}
		sum += powerOfTwo(bars)
	}
	return 2 * powerOfTwo(sum)
}

// powerOfTwo rounds up; 0 stays.
func powerOfTwo(n uint64) uint64 {
	if n == 0 {
		return 0
	}
	return 1 << bits.Len64(n-1)
}

// nameGPUs assigns UUIDs to GPUs, and minors in the order of addresses, as the driver does.
func (t *Tree) nameGPUs() error {
	var gpus []*function
	lines := map[string]int{}
	for _, f := range t.functions {
		if f.line.kind != kindGPU {
			continue
		}
		f.uuid = f.line.uuid
		if f.uuid == "" {
			sum := sha256.Sum256([]byte("GPU at " + f.String()))
			f.uuid = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
		}
		if other, ok := lines[f.uuid]; ok {
			return &tableError{f.line.number, fmt.Errorf("UUID %s is in use by line %d", f.uuid, other)}
		}
		lines[f.uuid] = f.line.number
		if f.line.driver == "nvidia" {
			gpus = append(gpus, f)
		}
	}
	slices.SortFunc(gpus, func(a, b *function) int {
		return cmp.Or(cmp.Compare(a.domain, b.domain), cmp.Compare(a.bus, b.bus))
	})
	for minor, f := range gpus {
		f.minor = minor
	}
	return nil
}
