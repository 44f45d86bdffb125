package exporter

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"time"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

// Snapshot is the state of a host's relays at one time. `peerlane exporter collect` writes it as
// JSON.
type Snapshot struct {
	Relays []Relay `json:"relays"`
	// Error describes the relays that could not be read.
	Error string `json:"error,omitempty"`
}

// Relay is the state of one relay.
type Relay struct {
	// Label is opaque: no one can compute a relay's generation from the label.
	Label     string `json:"label"`
	Container string `json:"container"`
	// Pod is the container's pod; nil without one.
	Pod        *generation.Pod `json:"pod,omitempty"`
	Lanes      []launch.Lane   `json:"lanes"`
	State      string          `json:"state"`
	Starts     int             `json:"starts"`
	Alive      bool            `json:"alive"`
	Supervised bool            `json:"supervised"`
	Report     *launch.Report  `json:"report,omitempty"`
}

// Label returns the label of a generation: a hash, which cannot be inverted because a generation
// has 128 random bits.
func Label(generation string) string {
	sum := sha256.Sum256([]byte("peerlane exporter: " + generation))
	return hex.EncodeToString(sum[:8])
}

func snapshot(infos []generation.Info, reports control.Reports) Snapshot {
	s := Snapshot{Relays: []Relay{}}
	for _, i := range infos {
		s.Relays = append(s.Relays, Relay{
			Label: Label(i.ID), Container: i.Container.ID, Pod: i.Pod, Lanes: i.Config.Lanes, State: i.Status.State,
			Starts: i.Status.Starts,
			Alive:  i.Alive, Supervised: i.Supervised, Report: reports[i.ID].Report,
		})
	}
	return s
}

// Write writes the snapshot of a source, for Remote.
func Write(w io.Writer, source Source) error {
	s, err := source()
	if err != nil {
		s.Error = err.Error()
	}
	return json.NewEncoder(w).Encode(s)
}

// Limits for reading a snapshot from a socket.
const (
	maxSnapshot   = 256 << 20
	remoteTimeout = 8 * time.Second // Prometheus waits 10 s
)

// collectorError is an error that the collector reports.
type collectorError struct{ text string }

func (e *collectorError) Error() string { return e.text }

// Remote returns a source that reads one snapshot per connection from the socket of
// peerlane-exporter-collector.socket.
func Remote(socket string) Source {
	return func() (Snapshot, error) {
		var s Snapshot
		c, err := net.DialTimeout("unix", socket, remoteTimeout)
		if err != nil {
			return s, &fault.Error{Operation: "connect to the collector", Cause: err,
				Remedy: "systemctl start peerlane-exporter-collector.socket"}
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(remoteTimeout)); err != nil {
			return s, err
		}
		if err := json.NewDecoder(io.LimitReader(c, maxSnapshot)).Decode(&s); err != nil {
			return s, &fault.Error{Operation: "read a snapshot of relays from", Object: socket, Cause: err,
				Remedy: "journalctl -u 'peerlane-exporter-collector@*' has the collector's error"}
		}
		if s.Error != "" {
			return s, &collectorError{s.Error}
		}
		return s, nil
	}
}
