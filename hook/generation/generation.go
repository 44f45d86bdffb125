package generation

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
)

// Container is what a runtime says about one of its containers.
type Container struct {
	// ID is the runtime's name for it. It is never part of a path.
	ID string `json:"id"`
	// RuntimeRoot is the directory in which the runtime keeps its containers;
	// empty for the runtime's default. Two runtimes may use one id.
	RuntimeRoot string `json:"runtimeRoot,omitempty"`
	// Bundle is the directory of its config.json; empty where there is none,
	// for a plain process.
	Bundle string `json:"bundle,omitempty"`
	// PID is its init, in the namespace of the caller.
	PID int `json:"-"`
}

// Generation is one life of one container, and the relay that serves it.
type Generation struct {
	ID        string          `json:"generation"` // 32 hexadecimal digits
	Container Container       `json:"container"`
	Init      process.Process `json:"init"`
	Created   time.Time       `json:"created"`
	// Machine is the host's /etc/machine-id, empty where there is none. A generation of
	// another machine is in a state directory that is on a shared disk: its processes are
	// none of this host's, and nothing here may remove it.
	Machine string  `json:"machine,omitempty"`
	Relay   Command `json:"relay"`
	// Sandbox is what the relay is kept in.
	Sandbox Sandbox `json:"sandbox"`
	// Network is the configuration's: where its secrets are, not what they are. The slots
	// for other hosts may take NetworkMemory of the host's, bytes.
	Network       config.Network `json:"network"`
	NetworkMemory uint64         `json:"networkMemory,omitempty"`
	// Tenant is the value of the container's annotation that Network names; empty for none.
	Tenant string `json:"tenant,omitempty"`
	// Rails are those of RDMA devices, by their names, that the configuration states.
	Rails map[string]int `json:"rails,omitempty"`
	// Ignored are sentences about variables of the job's that have no effect on relays.
	Ignored []string `json:"ignored,omitempty"`
	// LogFormat is the configuration's log.format.
	LogFormat string `json:"logFormat,omitempty"`
	// Config is what the relay is told.
	Config launch.Config `json:"config"`
}

// Command is how a relay is started, beside the argument "serve".
type Command struct {
	Path        string   `json:"path"`
	Environment []string `json:"environment,omitempty"` // beside PATH
}

// States of a generation's relay.
const (
	StateStarting = "starting" // it has not answered yet
	StateReady    = "ready"    // it serves the container's lanes
	StateWaiting  = "waiting"  // it died and will be started again
	StateDown     = "down"     // it died too often; clients are refused
	StateStopping = "stopping" // somebody stopped it, and it is ending
	StateStopped  = "stopped"  // it has ended; clients are refused
	StateDraining = "draining" // it starts no new work, and copies are under way
	StateDrained  = "drained"  // it has let go of the GPUs; clients are refused
	StateEnding   = "ending"   // init has ended, or somebody stopped the supervisor
)

// Status is what a supervisor last saw.
type Status struct {
	State string `json:"state"`
	// Relay is the process that runs; nil where none does.
	Relay *process.Process `json:"relay,omitempty"`
	// Starts counts how often a relay was started.
	Starts int `json:"starts"`
	// Sandbox is what could be had of the sandbox; nil without one.
	Sandbox *sandbox.Report `json:"sandbox,omitempty"`
	// Error says why the last relay failed, or refused its configuration.
	Error string `json:"error,omitempty"`
}

// Info is one generation as List sees it.
type Info struct {
	Generation
	Status Status `json:"status"`
	// Alive says that the container's init runs.
	Alive bool `json:"alive"`
	// Supervised says that its supervisor runs.
	Supervised bool `json:"supervised"`
}

// MachineID is the host's, as machine-id(5) has it; empty where there is none.
func MachineID(l paths.Layout) string {
	text, err := os.ReadFile(filepath.Join(l.Root, "etc/machine-id"))
	if id := strings.TrimSpace(string(text)); err == nil && IsID(id) {
		return id
	}
	return ""
}

// Foreign reports whether a generation is of another machine than this one.
func (g *Generation) Foreign(l paths.Layout) bool {
	own := MachineID(l)
	return g.Machine != "" && own != "" && g.Machine != own
}

// NewID is a name that nothing else has: 128 random bits.
func NewID() string {
	var bits [16]byte
	// Package crypto/rand would have its algorithms test themselves in every hook.
	if _, err := unix.Getrandom(bits[:], 0); err != nil { // so few bytes are never interrupted
		panic(os.NewSyscallError("getrandom", err))
	}
	return hex.EncodeToString(bits[:])
}

// IsID reports whether a name is one of newID's.
func IsID(name string) bool {
	return len(name) == 32 && strings.Trim(name, "0123456789abcdef") == ""
}

func File(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "generation.json")
}

// InitMark is a file of a generation that is found without reading anything.
func InitMark(l paths.Layout, id string, init process.Process) string {
	return filepath.Join(l.GenerationDir(id), fmt.Sprintf("init-%d-%d", init.PID, init.Start))
}

// LogName is what a supervisor and its relay write, in GenerationDir.
const LogName = "relay.log"

func StatusFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "status.json")
}

func Read(l paths.Layout, id string) (*Generation, error) {
	path := File(l, id)
	g := &Generation{}
	if err := ReadJSON(path, g); err != nil {
		return nil, err
	}
	if g.ID != id {
		return nil, fmt.Errorf("%s is about generation %q", path, g.ID)
	}
	g.Container.PID = g.Init.PID
	return g, nil
}

func (g *Generation) Write(l paths.Layout) error {
	return WriteJSON(File(l, g.ID), g)
}

// ReadStatus reads what the supervisor wrote; a zero Status where it has not
// come to that.
func ReadStatus(l paths.Layout, id string) (Status, error) {
	var s Status
	err := ReadJSON(StatusFile(l, id), &s)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrTorn) {
		return Status{}, nil
	}
	return s, err
}

// IDs lists the directories of generations; some may be in the making, and
// some may be gone by the time the caller looks.
func IDs(l paths.Layout) ([]string, error) {
	entries, err := os.ReadDir(l.Generations())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() && IsID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// List tells of all generations of a host, oldest first. Those that cannot be
// read are left out and reported in the error.
func List(l paths.Layout) ([]Info, error) {
	ids, err := IDs(l)
	if err != nil {
		return nil, err
	}
	var infos []Info
	var errs []error
	for _, id := range ids {
		info, err := Look(l, id)
		switch {
		case err == nil:
			infos = append(infos, info)
		case !errors.Is(err, fs.ErrNotExist): // it was removed just now, or is being made
			errs = append(errs, fmt.Errorf("generation %s: %w", id, err))
		}
	}
	slices.SortFunc(infos, func(a, b Info) int { return a.Created.Compare(b.Created) })
	return infos, errors.Join(errs...)
}

func Look(l paths.Layout, id string) (Info, error) {
	g, err := Read(l, id)
	if err != nil {
		return Info{}, err
	}
	info := Info{Generation: *g}
	if info.Status, err = ReadStatus(l, id); err != nil {
		return Info{}, err
	}
	if info.Alive, err = g.Init.Lives(); err != nil {
		return Info{}, err
	}
	if info.Supervised, err = Supervised(l, id); err != nil {
		return Info{}, err
	}
	return info, info.Status.correct(info.Supervised)
}

// correct replaces the state of a relay that has ended and whose end the supervisor
// has not written: yet, because the disk is full, or because it is not there.
func (s *Status) correct(supervised bool) error {
	if s.Relay == nil {
		return nil
	}
	lives, err := s.Relay.Lives()
	if err != nil || lives {
		return err
	}
	s.Error = cmp.Or(s.Error, fmt.Sprintf("relay %d has ended, and its supervisor has not written that", s.Relay.PID))
	s.Relay = nil
	switch s.State {
	case StateStarting, StateReady, StateDraining, StateStopping:
		s.State = StateWaiting
		if !supervised {
			s.State = StateDown
		}
	}
	return nil
}
