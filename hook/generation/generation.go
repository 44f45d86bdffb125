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
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// Container is a container as the runtime describes it.
type Container struct {
	// ID is the runtime's name for the container. No path contains it.
	ID string `json:"id"`
	// RuntimeRoot is the directory in which the runtime keeps its containers; empty for the
	// runtime's default. Two runtimes may use one id.
	RuntimeRoot string `json:"runtimeRoot,omitempty"`
	// Bundle is the directory of config.json; empty for a plain process.
	Bundle string `json:"bundle,omitempty"`
	// PID is the container's init, in the namespace of the caller.
	PID int `json:"-"`
}

// Pod is a container of a pod of Kubernetes.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Container string `json:"container"`
	UID       string `json:"uid"`
}

// podAnnotations are the annotations of containerd and of CRI-O for namespace, pod, container and uid
// (containerd internal/cri/annotations/annotations.go, cri-o pkg/annotations).
var podAnnotations = [][4]string{
	{"io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name",
		"io.kubernetes.cri.sandbox-uid"},
	{"io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name", "io.kubernetes.pod.uid"},
}

// maxPodName limits the bytes of a name that is kept: names of Kubernetes are shorter.
const maxPodName = 253

// PodOf returns the pod that annotations of config.json name, nil without one.
func PodOf(annotations map[string]string) *Pod {
	for _, keys := range podAnnotations {
		p := Pod{annotations[keys[0]], annotations[keys[1]], annotations[keys[2]], annotations[keys[3]]}
		if p.Namespace != "" && p.Name != "" &&
			max(len(p.Namespace), len(p.Name), len(p.Container), len(p.UID)) <= maxPodName {
			return &p
		}
	}
	return nil
}

// Generation is one life of one container, and the relay that serves it.
type Generation struct {
	ID        string          `json:"generation"` // 32 hexadecimal digits
	Container Container       `json:"container"`
	Init      process.Process `json:"init"`
	Created   time.Time       `json:"created"`
	// Machine is the host's /etc/machine-id, empty without the file. A generation of another
	// machine is in a state directory on a shared disk: its processes run on another host, and
	// this host must not remove it.
	Machine string  `json:"machine,omitempty"`
	Relay   Command `json:"relay"`
	// Sandbox describes the relay's sandbox.
	Sandbox Sandbox `json:"sandbox"`
	// Network is the configuration's section: paths of secrets, no secrets. The slots for other
	// hosts may take NetworkMemory bytes of the host's memory.
	Network       config.Network `json:"network"`
	NetworkMemory uint64         `json:"networkMemory,omitempty"`
	// Tenant is the value of the container's annotation that Network names; empty without one.
	Tenant string `json:"tenant,omitempty"`
	// Pod is the container's pod by the annotations of a Kubernetes engine; nil without one. Pod is data
	// for users and metrics: images of other engines can state annotations.
	Pod *Pod `json:"pod,omitempty"`
	// Rails has the configured rails of RDMA devices, by device name.
	Rails map[string]int `json:"rails,omitempty"`
	// Ignored are sentences about variables of the job's that have no effect on relays.
	Ignored []string `json:"ignored,omitempty"`
	// LogFormat is the configuration's log.format.
	LogFormat string `json:"logFormat,omitempty"`
	// Config is the configuration that the relay receives.
	Config launch.Config `json:"config"`
}

// Command is how a relay is started, beside the argument "serve".
type Command struct {
	Path        string   `json:"path"`
	Environment []string `json:"environment,omitempty"` // beside PATH
}

// States of a generation's relay.
const (
	StateStarting = "starting" // no answer yet
	StateReady    = "ready"    // serves the container's lanes
	StateWaiting  = "waiting"  // died and will be started again
	StateDown     = "down"     // died too often; clients are refused
	StateStopping = "stopping" // stopped by the administrator, and ending
	StateStopped  = "stopped"  // has ended; clients are refused
	StateDraining = "draining" // starts no new work, and copies are under way
	StateDrained  = "drained"  // has released the GPUs; clients are refused
	StateEnding   = "ending"   // init has ended, or the supervisor was asked to end
)

// Status is the last report of a supervisor.
type Status struct {
	State string `json:"state"`
	// Relay is the running process; nil without one.
	Relay *process.Process `json:"relay,omitempty"`
	// Starts counts how often a relay was started.
	Starts int `json:"starts"`
	// ControlGroup says that the supervisor has a control group of the hook's, which a collector
	// in another mount namespace may not see.
	ControlGroup bool `json:"controlGroup,omitempty"`
	// Sandbox reports the relay's sandbox; nil without one.
	Sandbox *sandbox.Report `json:"sandbox,omitempty"`
	// Error is the reason why the last relay failed, or refused its configuration.
	Error string `json:"error,omitempty"`
}

// Info is one generation in a list.
type Info struct {
	Generation
	Status Status `json:"status"`
	// Alive says that the container's init runs.
	Alive bool `json:"alive"`
	// Supervised reports that the supervisor runs.
	Supervised bool `json:"supervised"`
}

// MachineID returns the host's id (machine-id(5)); empty without one.
func MachineID(l paths.Layout) string {
	text, err := os.ReadFile(filepath.Join(l.Root, "etc/machine-id"))
	if id := strings.TrimSpace(string(text)); err == nil && IsID(id) {
		return id
	}
	return ""
}

// Foreign reports whether a generation is of another machine.
func (g *Generation) Foreign(l paths.Layout) bool {
	own := MachineID(l)
	return g.Machine != "" && own != "" && g.Machine != own
}

// NewID is a name that nothing else has: 128 random bits.
func NewID() string {
	var bits [16]byte
	// Package crypto/rand would run self-tests of algorithms in every hook.
	if _, err := unix.Getrandom(bits[:], 0); err != nil { // so few bytes are never interrupted
		panic(os.NewSyscallError("getrandom", err))
	}
	return hex.EncodeToString(bits[:])
}

// IsID reports whether a name has the form of NewID.
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

// LogName is the log of supervisor and relay, in GenerationDir.
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

// ReadStatus reads the supervisor's status; a zero Status before the first.
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

// List returns the generations of a host, oldest first. The error names unreadable generations,
// which the list lacks.
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
		case !errors.Is(err, fs.ErrNotExist): // removed just now, or not complete yet
			errs = append(errs, &fault.Error{Operation: "read generation", Object: id, Cause: err})
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

// correct replaces the state of a relay whose end the supervisor has not written: not yet,
// because the disk is full, or because the supervisor is gone.
func (s *Status) correct(supervised bool) error {
	if s.Relay == nil {
		return nil
	}
	lives, err := s.Relay.Lives()
	if err != nil || lives {
		return err
	}
	s.Error = cmp.Or(s.Error, fmt.Sprintf("relay %d has ended, and the supervisor has not recorded that", s.Relay.PID))
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
