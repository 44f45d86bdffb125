package topo

import "cmp"

// Parent is the address of the physical function that a NIC is a virtual function or a
// subfunction of; empty for a NIC that is none.
func (n *NIC) Parent() string {
	if n.VirtualFunctionOf == "" && n.Subfunction == "" {
		return ""
	}
	return cmp.Or(n.VirtualFunctionOf, n.BusID)
}

// Owners has for each NIC the place of the NIC whose port it sends over: for a virtual
// function or a subfunction that is the NIC of its physical function or, where the host
// does not list that, the first function of the same port. Other NICs have ports of
// their own.
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

// Functions are the virtual functions and subfunctions of a NIC's port that Folded
// leaves out.
type Functions map[string][]string // by the NIC's name on its host, "HOST/NAME" where there are several

// Folded is the host without the virtual functions and subfunctions of ports that
// another NIC of the list stands for, and the names of these. Those in keep stay: lanes
// use them. A port can have hundreds, and each is as near to all devices as the first.
func (h *Host) Folded(keep map[string]bool) (*Host, Functions) {
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

// Of are the functions of a NIC that Folded left out.
func (f Functions) Of(n NIC) []string { return f[nicKey(n)] }

func nicKey(n NIC) string {
	if n.Host == "" {
		return n.Name
	}
	return n.Host + "/" + n.Name
}
