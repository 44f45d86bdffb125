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

// Container describes a container as the runtime reports it.
type Container struct {
	// ID is the container's id in the runtime. No path contains it.
	ID string `json:"id"`
	// RuntimeRoot is the directory in which the runtime keeps its containers; empty for the
	// runtime's default. Two runtimes can use the same id.
	RuntimeRoot string `json:"runtimeRoot,omitempty"`
	// Bundle is the directory of config.json; empty for a plain process.
	Bundle string `json:"bundle,omitempty"`
	// PID is the container's init, in the caller's PID namespace.
	PID int `json:"-"`
}

// Pod identifies the container of a Kubernetes pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Container string `json:"container"`
	UID       string `json:"uid"`
}

// podAnnotations are the annotations of containerd and CRI-O with namespace, pod, container and
// uid (containerd internal/cri/annotations/annotations.go, cri-o pkg/annotations).
var podAnnotations = [][4]string{
	{"io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name",
		"io.kubernetes.cri.sandbox-uid"},
	{"io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name", "io.kubernetes.pod.uid"},
}

// maxPodName is the maximum length of a name in bytes; names of Kubernetes are shorter.
const maxPodName = 253

// PodOf returns the pod in the annotations of config.json; nil without such annotations.
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

// Generation is a life of a container, with the relay that serves it.
type Generation struct {
	// ID has 32 hexadecimal digits.
	ID        string          `json:"generation"`
	Container Container       `json:"container"`
	Init      process.Process `json:"init"`
	Created   time.Time       `json:"created"`
	// Machine is the host's /etc/machine-id; empty without the file. The generation of another
	// machine is in a state directory on a shared disk: the processes run on another host, and
	// this host must not remove it.
	Machine string  `json:"machine,omitempty"`
	Relay   Command `json:"relay"`
	// Sandbox configures the relay's sandbox.
	Sandbox Sandbox `json:"sandbox"`
	// Network is the [network] section of the configuration, with the paths of secrets and without
	// the secrets. NetworkMemory is the limit of host memory for the slots for other hosts, in
	// bytes.
	Network       config.Network `json:"network"`
	NetworkMemory uint64         `json:"networkMemory,omitempty"`
	// Tenant is the value of the container's annotation network.tenant_annotation; empty without
	// one.
	Tenant string `json:"tenant,omitempty"`
	// Pod is the container's pod, from the annotations of a Kubernetes engine; nil without such
	// annotations. Use Pod only for display and metrics: with other engines, images can set
	// annotations.
	Pod *Pod `json:"pod,omitempty"`
	// Rails maps RDMA devices to the configured rails.
	Rails map[string]int `json:"rails,omitempty"`
	// Ignored are sentences about variables of the job that have no effect on relays.
	Ignored []string `json:"ignored,omitempty"`
	// LogFormat is log.format of the configuration.
	LogFormat string `json:"logFormat,omitempty"`
	// Config is the configuration that the relay receives.
	Config launch.Config `json:"config"`
}

// Command is the program and environment of a relay. The argument is "serve".
type Command struct {
	Path string `json:"path"`
	// Environment are variables in addition to PATH.
	Environment []string `json:"environment,omitempty"`
}

// States of a generation's relay.
const (
	StateStarting = "starting" // the relay has not answered yet
	StateReady    = "ready"    // the relay serves the container's lanes
	StateWaiting  = "waiting"  // the relay has died and will be restarted
	StateDown     = "down"     // the relay has died too often; clients are refused
	StateStopping = "stopping" // the administrator stopped the relay, which is ending
	StateStopped  = "stopped"  // the stopped relay has ended; clients are refused
	StateDraining = "draining" // the relay starts no new work, and copies are in progress
	StateDrained  = "drained"  // the drained relay has released the GPUs; clients are refused
	StateEnding   = "ending"   // init has ended, or the supervisor is stopping on request
)

// Status is the last report of a supervisor.
type Status struct {
	State string `json:"state"`
	// Relay is the running relay process; nil if no relay runs.
	Relay *process.Process `json:"relay,omitempty"`
	// Starts is the number of starts of a relay.
	Starts int `json:"starts"`
	// ControlGroup reports that the supervisor is in a control group that the hook made, which a
	// collector in another mount namespace may not see.
	ControlGroup bool `json:"controlGroup,omitempty"`
	// Sandbox describes the sandbox of the running relay; nil without a sandbox.
	Sandbox *sandbox.Report `json:"sandbox,omitempty"`
	// Error is the reason why the last relay failed, or refused its configuration.
	Error string `json:"error,omitempty"`
}

// Info is a generation in a list.
type Info struct {
	Generation
	Status Status `json:"status"`
	// Alive reports that the container's init runs.
	Alive bool `json:"alive"`
	// Supervised reports that the supervisor runs.
	Supervised bool `json:"supervised"`
}

// MachineID returns the id of the host (machine-id(5)); empty without one.
func MachineID(l paths.Layout) string {
	text, err := os.ReadFile(filepath.Join(l.Root, "etc/machine-id"))
	if err != nil {
		return ""
	}
	if id := strings.TrimSpace(string(text)); IsID(id) {
		return id
	}
	return ""
}

// Foreign reports whether the generation belongs to another machine.
func (g *Generation) Foreign(l paths.Layout) bool {
	own := MachineID(l)
	return g.Machine != "" && own != "" && g.Machine != own
}

// NewID returns a unique name: 128 random bits in hexadecimal.
func NewID() string {
	var bits [16]byte
	// Package crypto/rand would run its self-tests in every hook.
	if _, err := unix.Getrandom(bits[:], 0); err != nil { // a read of few bytes is never interrupted
		panic(os.NewSyscallError("getrandom", err))
	}
	return hex.EncodeToString(bits[:])
}

// IsID reports whether a name has the form of NewID.
func IsID(name string) bool {
	return len(name) == 32 && strings.Trim(name, "0123456789abcdef") == ""
}

// File returns the path of a generation's generation.json.
func File(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "generation.json")
}

// InitMark returns the path of the file that identifies the generation of an init without reading
// files.
func InitMark(l paths.Layout, id string, init process.Process) string {
	return filepath.Join(l.GenerationDir(id), fmt.Sprintf("init-%d-%d", init.PID, init.Start))
}

// LogName is the name of the log of supervisor and relay, in GenerationDir.
const LogName = "relay.log"

// StatusFile returns the path of a generation's status.json.
func StatusFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "status.json")
}

// Read reads a generation. The error is fs.ErrNotExist if the generation is removed or not
// complete yet.
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

// ReadStatus reads the supervisor's status. The result is a zero Status before the supervisor has
// written a status.
func ReadStatus(l paths.Layout, id string) (Status, error) {
	var s Status
	err := ReadJSON(StatusFile(l, id), &s)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrTorn) {
		return Status{}, nil
	}
	return s, err
}

// IDs lists the directories of generations. A directory may be incomplete, or may be removed
// before the caller looks.
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

// List returns the generations of a host, oldest first. The error names the unreadable
// generations, which the result omits.
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
		case !errors.Is(err, fs.ErrNotExist): // ErrNotExist: removed, or not complete yet
			errs = append(errs, &fault.Error{Operation: "read generation", Object: id, Cause: err})
		}
	}
	slices.SortFunc(infos, func(a, b Info) int { return a.Created.Compare(b.Created) })
	return infos, errors.Join(errs...)
}

// Look reads a generation and the status, and checks whether init and supervisor run.
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

// correct replaces the state of a relay that has ended while status.json says that it runs: the
// supervisor has not written the end yet, the disk is full, or the supervisor was killed.
func (s *Status) correct(supervised bool) error {
	if s.Relay == nil {
		return nil
	}
	if lives, err := s.Relay.Lives(); lives {
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
