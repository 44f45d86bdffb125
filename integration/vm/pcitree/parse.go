package pcitree

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxFunctions is the module's limit (MAX_FUNCTIONS in pcitree.c).
const maxFunctions = 512

// Tree is a parsed table with assigned addresses.
type Tree struct {
	functions []*function // in the order of the table, bridges before children
	window    uint64      // address space in bytes for the BARs below a root
}

type kind string

const (
	kindHostBridge kind = "host-bridge"
	kindRootPort   kind = "root-port"
	kindSwitch     kind = "switch"
	kindGPU        kind = "gpu"
	kindNIC        kind = "nic"
	kindNVMe       kind = "nvme"
	kindFunction   kind = "function"
)

// acs is the Access Control Services of a port (PCIe 6.12).
type acs string

const (
	acsNone acs = "none" // no capability
	acsOff  acs = "off"  // a capability, disabled
	acsOn   acs = "on"
)

// link is a speed (1 for 2.5 GT/s, 5 for 32 GT/s) and a number of lanes.
type link struct{ gen, width int }

// identity is a vendor id and a device id.
type identity struct{ vendor, device uint16 }

// line is a line of a table, with the lines indented below it.
type line struct {
	number   int // in the text, from 1
	indent   int
	kind     kind
	children []*line

	domain, bus int // of a host bridge
	numa        int // of a host bridge, or -1

	id        identity
	class     uint32
	max       link
	current   link // zero to derive it from both ends
	acs       acs
	portACS   acs // "" for the value of the switch
	subsystem identity
	driver    string
	uuid      string
}

// tableError is the error of a table.
type tableError struct {
	line  int // 0 for an error of the whole table
	cause error
}

func (e *tableError) Error() string {
	if e.line == 0 {
		return fmt.Sprintf("PCIe table: %v", e.cause)
	}
	return fmt.Sprintf("PCIe table, line %d: %v", e.line, e.cause)
}

// Unwrap returns the cause.
func (e *tableError) Unwrap() error { return e.cause }

// Parse reads a table; an error names the line.
func Parse(text string) (*Tree, error) {
	var top []*line
	var open []*line // lines that can have the next line below
	number := 0
	for row := range strings.Lines(text) {
		number++
		row, _, _ = strings.Cut(row, "#")
		words := strings.Fields(row)
		if len(words) == 0 {
			continue
		}
		l := &line{number: number, indent: indentation(row)}
		if err := l.parse(words); err != nil {
			return nil, &tableError{number, err}
		}
		for len(open) > 0 && open[len(open)-1].indent >= l.indent {
			open = open[:len(open)-1]
		}
		var above *line
		if len(open) > 0 {
			above = open[len(open)-1]
			above.children = append(above.children, l)
		} else {
			top = append(top, l)
		}
		if err := l.fits(above); err != nil {
			return nil, &tableError{number, err}
		}
		open = append(open, l)
	}
	if len(top) == 0 {
		return nil, &tableError{0, errors.New("no host bridge; begin with a line such as host-bridge 0000:15 numa=0")}
	}
	return place(top)
}

// indentation counts the columns before a line's first word, with tab stops of eight.
func indentation(row string) int {
	columns := 0
	for _, r := range row {
		switch r {
		case ' ':
			columns++
		case '\t':
			columns += 8 - columns%8
		default:
			return columns
		}
	}
	return columns
}

// parse reads the words of a line.
func (l *line) parse(words []string) error {
	l.kind, words = kind(words[0]), words[1:]
	l.numa, l.acs = -1, acsNone
	var positions []func(string) error
	bridge := func(word string) (err error) { l.domain, l.bus, err = parseBus(word); return err }
	class := func(word string) (err error) { l.class, err = parseClass(word); return err }
	id := func(word string) (err error) { l.id, err = parseIdentity(word); return err }
	gen := func(word string) (err error) { l.max.gen, err = parseGen(word); return err }
	width := func(word string) (err error) { l.max.width, err = parseWidth(word); return err }
	switch l.kind {
	case kindHostBridge:
		positions = []func(string) error{bridge}
	case kindFunction:
		positions = []func(string) error{class, id, gen, width}
	case kindRootPort, kindSwitch:
		l.class = 0x060400
		positions = []func(string) error{id, gen, width}
	case kindGPU:
		l.class, l.driver = 0x030200, "nvidia"
		positions = []func(string) error{id, gen, width}
	case kindNIC:
		l.class, l.driver = 0x020700, "mlx5_core"
		positions = []func(string) error{id, gen, width}
	case kindNVMe:
		l.class = 0x010802
		positions = []func(string) error{id, gen, width}
	default:
		return fmt.Errorf("unknown kind of line %q; use host-bridge, root-port, switch, gpu, nic, nvme or function",
			l.kind)
	}
	if len(words) < len(positions) {
		return fmt.Errorf("%s needs %d words, and the line has %d; see the package's documentation", l.kind, len(positions),
			len(words))
	}
	for i, read := range positions {
		if err := read(words[i]); err != nil {
			return err
		}
	}
	given := map[string]bool{}
	for _, word := range words[len(positions):] {
		name, value, _ := strings.Cut(word, "=")
		if given[name] {
			return fmt.Errorf("duplicate %s", name)
		}
		given[name] = true
		if err := l.option(word, name, value); err != nil {
			return err
		}
	}
	return nil
}

// options lists the kinds of lines that permit an option.
var options = map[string][]kind{
	"numa":      {kindHostBridge},
	"acs":       {kindRootPort, kindSwitch},
	"port-acs":  {kindSwitch, kindGPU, kindNIC, kindNVMe, kindFunction},
	"link":      {kindSwitch, kindGPU, kindNIC, kindNVMe, kindFunction},
	"subsystem": {kindGPU, kindNIC, kindNVMe, kindFunction},
	"class":     {kindGPU, kindNIC, kindNVMe},
	"driver":    {kindGPU, kindNIC, kindNVMe, kindFunction},
	"uuid":      {kindGPU},
}

var uuidPattern = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func (l *line) option(word, name, value string) (err error) {
	if !slices.Contains(options[name], l.kind) {
		return fmt.Errorf("a %s has no option %q", l.kind, word)
	}
	switch name {
	case "numa":
		// The kernel has at most 1024 nodes; the module checks the nodes of the guest.
		if l.numa, err = strconv.Atoi(value); err != nil || l.numa < 0 || l.numa >= 1024 {
			return fmt.Errorf("invalid NUMA node %q", word)
		}
	case "acs":
		switch word {
		case "acs":
			l.acs = acsOff
		case "acs=on":
			l.acs = acsOn
		default:
			return fmt.Errorf("%q is neither acs nor acs=on", word)
		}
	case "port-acs":
		l.portACS = acs(value)
		if !slices.Contains([]acs{acsNone, acsOff, acsOn}, l.portACS) {
			return fmt.Errorf("unknown word %q; use port-acs=none, port-acs=off or port-acs=on", word)
		}
	case "link":
		gen, width, ok := strings.Cut(value, "x")
		if !ok {
			return fmt.Errorf("invalid link %q; write link=gen4x8", word)
		}
		if l.current.gen, err = parseGen(gen); err != nil {
			return err
		}
		l.current.width, err = parseWidth("x" + width)
		return err
	case "subsystem":
		l.subsystem, err = parseIdentity(value)
		return err
	case "class":
		l.class, err = parseClass(value)
		return err
	case "driver":
		if !slices.Contains([]string{"nvidia", "mlx5_core", "none"}, value) {
			return fmt.Errorf("unknown driver %q; the module has nvidia, mlx5_core and none", value)
		}
		l.driver = value
		if value == "none" {
			l.driver = ""
		}
	case "uuid":
		if !uuidPattern.MatchString(value) {
			return fmt.Errorf("invalid UUID %q of a GPU; write uuid=GPU-a5a8a5c2-6e5b-4a3e-9d0e-0f1c2b3a4d00", value)
		}
		l.uuid = value
	}
	return nil
}

// fits checks the place of a line, the last child of above.
func (l *line) fits(above *line) error {
	switch {
	case above == nil && l.kind != kindHostBridge:
		return fmt.Errorf("%s without a host bridge; indent the line below a host bridge", l.kind)
	case above == nil:
		return nil
	case l.kind == kindHostBridge:
		return fmt.Errorf("host bridge below a %s; a host bridge is the root of a tree and has no indentation", above.kind)
	}
	switch above.kind {
	case kindHostBridge:
		if l.kind != kindRootPort {
			return fmt.Errorf("a %s is below a host bridge, which may only have root ports", l.kind)
		}
		if len(above.children) > 31 { // device 0 belongs to the host bridge
			return fmt.Errorf("a host bridge has more than 31 root ports")
		}
	case kindRootPort:
		if l.kind == kindRootPort {
			return fmt.Errorf("root port below a root port; move the line below a host bridge")
		}
		if len(above.children) > 1 {
			return fmt.Errorf("second device below a root port, which has one link; add a switch")
		}
	case kindSwitch:
		if l.kind == kindRootPort {
			return fmt.Errorf("root port below a switch; move the line below a host bridge")
		}
		if len(above.children) > 32 {
			return fmt.Errorf("a switch has more than 32 downstream ports")
		}
	default:
		return fmt.Errorf("a %s is below a %s, which is not a bridge", l.kind, above.kind)
	}
	if l.portACS != "" && above.kind != kindSwitch {
		return fmt.Errorf("port-acs without a switch; a root port has acs")
	}
	return nil
}

func parseHex(text string, digits int) (uint64, error) {
	if len(text) != digits {
		return 0, fmt.Errorf("%q is no hexadecimal number of %d digits", text, digits)
	}
	n, err := strconv.ParseUint(text, 16, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is no hexadecimal number of %d digits", text, digits)
	}
	return n, nil
}

func parseBus(text string) (domain, bus int, err error) {
	left, right, _ := strings.Cut(text, ":")
	d, errDomain := parseHex(left, 4)
	b, errBus := parseHex(right, 2)
	if errDomain != nil || errBus != nil {
		return 0, 0, fmt.Errorf("invalid root bus %q; write 0000:15", text)
	}
	return int(d), int(b), nil
}

func parseIdentity(text string) (identity, error) {
	left, right, _ := strings.Cut(text, ":")
	vendor, errVendor := parseHex(left, 4)
	device, errDevice := parseHex(right, 4)
	// An empty slot answers with all ones.
	if errVendor != nil || errDevice != nil || vendor == 0xffff || vendor == 0 {
		return identity{}, fmt.Errorf("invalid vendor and device %q; write 10de:2330", text)
	}
	return identity{uint16(vendor), uint16(device)}, nil
}

func parseClass(text string) (uint32, error) {
	n, err := parseHex(text, 6)
	if err != nil || n>>8 == 0x0604 {
		return 0, fmt.Errorf("invalid class %q of a function other than a bridge; write 030200", text)
	}
	return uint32(n), nil
}

func parseGen(text string) (int, error) {
	if len(text) == 4 && strings.HasPrefix(text, "gen") && text[3] >= '1' && text[3] <= '6' {
		return int(text[3] - '0'), nil
	}
	return 0, fmt.Errorf("invalid link speed %q; use gen1 to gen6", text)
}

func parseWidth(text string) (int, error) {
	switch text {
	case "x1", "x2", "x4", "x8", "x12", "x16", "x32":
		return strconv.Atoi(text[1:])
	}
	return 0, fmt.Errorf("invalid link width %q; use x1, x2, x4, x8, x12, x16 or x32", text)
}
