package generation

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/sandbox"
)

// Sandbox configures the sandbox of a relay. The status reports the sandbox that the host
// permitted.
type Sandbox struct {
	Mode string `json:"mode"` // auto or off
	// UID is the relay's own uid on this host while the generation exists; 0 if the relay runs as
	// the user that started it.
	UID int `json:"uid,omitempty"`
	// Group is the common group of relays, which may connect to each other; 0 for no group.
	Group  int      `json:"group,omitempty"`
	Read   []string `json:"read,omitempty"`
	Write  []string `json:"write,omitempty"`
	Limits Limits   `json:"limits"`
}

// Limits are the limits of the control group.
type Limits struct {
	Memory uint64 `json:"memory"` // bytes
	CPUs   int    `json:"cpus"`
	Tasks  int    `json:"tasks"`
}

// LibraryVariable is package cuda's, which the hook does not import, and VerbsVariable
// package relay/verbs'.
const (
	LibraryVariable = "PEERLANE_CUDA_LIBRARY"
	VerbsVariable   = "PEERLANE_VERBS_LIBRARY"
)

func NewSandbox(c config.Relay) (Sandbox, error) {
	s := Sandbox{
		Mode: c.Sandbox, Read: c.SandboxRead, Write: c.SandboxWrite,
		Limits: Limits{uint64(c.Memory), c.CPUs, c.Tasks},
	}
	first, _, err := c.UIDRange()
	if err != nil || os.Geteuid() != 0 {
		return s, err
	}
	if err := sandbox.Mapped(first); err == nil { // else in a user namespace, which has not so many
		s.Group = first
	}
	return s, nil
}

// AddFiles adds the paths of the configuration, and of the relay's environment, to a sandbox.
func (c Sandbox) AddFiles(s *sandbox.Spec, environment []string) {
	s.Read = append(s.Read, c.Read...)
	for _, e := range environment {
		name, value, _ := strings.Cut(e, "=")
		if name != LibraryVariable && name != VerbsVariable && name != "LD_LIBRARY_PATH" {
			continue
		}
		for _, path := range filepath.SplitList(value) {
			if filepath.IsAbs(path) {
				s.Read = append(s.Read, path)
			}
		}
	}
	s.Write = append(s.Write, c.Write...)
}
