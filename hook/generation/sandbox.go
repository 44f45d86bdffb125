package generation

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/sandbox"
)

// Sandbox configures the sandbox of a relay. Status.Sandbox describes the sandbox that the host
// permitted.
type Sandbox struct {
	// Mode is auto or off.
	Mode string `json:"mode"`
	// UID is the relay's own uid on this host, for the life of the generation; 0 if the relay runs
	// as the user that started it.
	UID int `json:"uid,omitempty"`
	// Group is the common group of relays, whose members can connect to each other; 0 without a
	// group.
	Group  int      `json:"group,omitempty"`
	Read   []string `json:"read,omitempty"`
	Write  []string `json:"write,omitempty"`
	Limits Limits   `json:"limits"`
}

// Limits are the limits of the control group.
type Limits struct {
	// Memory is in bytes.
	Memory uint64 `json:"memory"`
	CPUs   int    `json:"cpus"`
	Tasks  int    `json:"tasks"`
}

// Names of variables of package cuda, which the hook does not import, and of package relay/verbs.
const (
	LibraryVariable = "PEERLANE_CUDA_LIBRARY"
	VerbsVariable   = "PEERLANE_VERBS_LIBRARY"
)

// NewSandbox returns the sandbox of the [relay] section. Only root of a user namespace that maps the
// uids has a Group.
func NewSandbox(c config.Relay) (Sandbox, error) {
	s := Sandbox{
		Mode: c.Sandbox, Read: c.SandboxRead, Write: c.SandboxWrite,
		Limits: Limits{uint64(c.Memory), c.CPUs, c.Tasks},
	}
	first, _, err := c.UIDRange()
	if err != nil || os.Geteuid() != 0 {
		return s, err
	}
	if err := sandbox.CheckMapped(first); err == nil { // a user namespace may lack the range of uids
		s.Group = first
	}
	return s, nil
}

// AddFiles adds the paths in the configuration and in the relay's environment to a sandbox.
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
