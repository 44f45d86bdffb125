package generation

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/sandbox"
)

// Sandbox is what a relay is to be kept in. What could be had of it the status
// says.
type Sandbox struct {
	Mode string `json:"mode"` // auto or off
	// UID is the relay's own, on this host, for as long as the generation is there;
	// 0 where it runs as whoever started it.
	UID int `json:"uid,omitempty"`
	// Group is that of all relays, who may connect to each other; 0 for none.
	Group  int      `json:"group,omitempty"`
	Read   []string `json:"read,omitempty"`
	Write  []string `json:"write,omitempty"`
	Limits Limits   `json:"limits"`
}

// Limits are those of the control group.
type Limits struct {
	Memory uint64 `json:"memory"` // bytes
	CPUs   int    `json:"cpus"`
	Tasks  int    `json:"tasks"`
}

// LibraryVariable is package cuda's, which the hook does not import, and verbsVariable
// package relay/verbs'.
const (
	LibraryVariable = "PEERLANE_CUDA_LIBRARY"
	verbsVariable   = "PEERLANE_VERBS_LIBRARY"
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

// AddFiles adds what the configuration names for all relays of a host, and what their
// environment does.
func (c Sandbox) AddFiles(s *sandbox.Spec, environment []string) {
	s.Read = append(s.Read, c.Read...)
	for _, e := range environment {
		name, value, _ := strings.Cut(e, "=")
		if name != LibraryVariable && name != verbsVariable && name != "LD_LIBRARY_PATH" {
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
