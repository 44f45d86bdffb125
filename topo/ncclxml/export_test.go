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

// WriteUnbounded is Write without the limit on elements. Files of real machines can exceed the
// limit.
func WriteUnbounded(h *topo.Host) ([]byte, error) {
	root, err := documentOf(h)
	if err != nil {
		return nil, err
	}
	return root.text(), nil
}
