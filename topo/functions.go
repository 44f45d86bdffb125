package topo

import "cmp"

// Parent returns the address of the physical function behind a virtual function or a
// subfunction; empty for a physical function.
func (n *NIC) Parent() string {
	if n.VirtualFunctionOf == "" && n.Subfunction == "" {
		return ""
	}
	return cmp.Or(n.VirtualFunctionOf, n.BusID)
}

// Owners returns for each NIC the index of the NIC with the physical port: for a virtual
// function or a subfunction the NIC of the physical function, or the first function of the port
// where the host does not list the physical function. A physical NIC owns its port.
func Owners(nics []NIC) []int {
	type place struct{ host, busID string }
	first := map[place]int{}
	for i := range nics {
		n := &nics[i]
		if at := (place{n.Host, n.BusID}); n.Parent() == "" && n.BusID != "" {
			if _, known := first[at]; !known {
				first[at] = i
			}
		}
	}
	of := make([]int, len(nics))
	for i := range nics {
		of[i] = i
		if parent := nics[i].Parent(); parent != "" {
			at := place{nics[i].Host, parent}
			if owner, known := first[at]; known {
				of[i] = owner
			} else {
				first[at] = i
			}
		}
	}
	return of
}

// Functions maps a NIC to the virtual functions and subfunctions of its port that FoldFunctions leaves
// out.
type Functions map[string][]string // by the NIC's name on its host, "HOST/NAME" for several hosts

// FoldFunctions returns the host without the virtual functions and subfunctions that share a port with
// a listed NIC, and the names of the removed functions. Functions in keep stay: lanes use the
// functions in keep. A port can have hundreds of functions at the same distance from every
// device.
func (h *Host) FoldFunctions(keep map[string]bool) (*Host, Functions) {
	of := Owners(h.NICs)
	folded := *h
	folded.NICs = nil
	functions := Functions{}
	for i, n := range h.NICs {
		if of[i] == i || keep[n.Name] {
			folded.NICs = append(folded.NICs, n)
			continue
		}
		owner := nicKey(h.NICs[of[i]])
		functions[owner] = append(functions[owner], n.Name)
	}
	if len(functions) == 0 {
		return h, nil
	}
	return &folded, functions
}

// Of returns the functions of a NIC that FoldFunctions left out.
func (f Functions) Of(n NIC) []string { return f[nicKey(n)] }

func nicKey(n NIC) string {
	if n.Host == "" {
		return n.Name
	}
	return n.Host + "/" + n.Name
}
