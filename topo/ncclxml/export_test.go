package ncclxml

import "github.com/peerlane/peerlane/topo"

// Bounds and steps of the writer that tests check by themselves.
const (
	MaxNCCLValue   = maxNCCLValue
	MaxXMLElements = maxXMLElements
)

var (
	Affinity  = affinity
	LinkWords = linkWords
)

// WriteUnbounded is Write without the bound on elements, which not all files of real
// machines keep to.
func WriteUnbounded(h *topo.Host) ([]byte, error) {
	root, err := documentOf(h)
	if err != nil {
		return nil, err
	}
	return root.text(), nil
}
