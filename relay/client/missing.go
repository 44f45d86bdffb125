package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/wire"
)

// noRelay is the error of a container that was given no lane, or whose relay did not start: then
// the anchor of the lane, an empty directory, exists.
func noRelay(socket string, cause error, gpus []wire.UUID) error {
	if entries, err := os.ReadDir(filepath.Dir(socket)); err == nil && len(entries) == 0 {
		return noRelayAt(
			socket,
			fmt.Errorf(
				"%w: the container's relay did not start, and the host's configuration (hook.on_failure) starts containers without",
				cause,
			),
			"read the host's log (journalctl -t peerlane-hook, or its syslog)",
		)
	}
	if len(gpus) == 0 {
		return noRelayAt(
			socket,
			cause,
			"start the container with --device peerlane.dev/lane=N, where N is its GPU's number on the host",
		)
	}
	var devices []string
	for _, gpu := range gpus {
		devices = append(devices, "--device peerlane.dev/lane="+gpu.GPU())
	}
	return noRelayAt(socket, cause, "start the container with "+strings.Join(devices, " "))
}

func noRelayAt(socket string, cause error, remedy string) error {
	return &fault.Error{Code: fault.NoRelay, Operation: "no relay at", Object: socket, Cause: cause, Remedy: remedy}
}

// Lanes are the lanes that this container was given.
func (s *Session) Lanes(ctx context.Context) ([]wire.LaneGPU, error) {
	m, err := ask[*wire.LanesReply](ctx, s, &wire.Lanes{})
	if err != nil {
		return nil, err
	}
	if m.Lanes > wire.MaxLanes {
		return nil, wire.Errorf(wire.StatusMalformed, "the relay names %d lanes, and %d are possible", m.Lanes, wire.MaxLanes)
	}
	return m.Lane[:m.Lanes], nil
}

// LaneNIC describes the NIC of the lane of a GPU. A relay of an older release does not tell: the
// error has StatusVersion, and the session goes on.
func (s *Session) LaneNIC(ctx context.Context, gpu wire.UUID) (*wire.LaneNICReply, error) {
	if s.version < wire.LaneNICVersion {
		return nil, wire.Errorf(wire.StatusVersion, "%w", &versionError{relay: s.version, oldest: wire.LaneNICVersion})
	}
	return ask[*wire.LaneNICReply](ctx, s, &wire.LaneNIC{GPU: gpu})
}

// WithoutGPU is for a container in which CUDA cannot be used, and why. If a relay answers, the
// container has lanes, and lacks the lanes' GPUs or the driver's libraries: the error says which
// devices to add. Elsewhere it is the cause.
func WithoutGPU(ctx context.Context, socket string, cause error) error {
	s, err := Dial(ctx, socket)
	if err != nil {
		return cause
	}
	lanes, err := s.Lanes(ctx)
	if err = errors.Join(err, s.Close()); err != nil || len(lanes) == 0 {
		return cause
	}
	var numbers, devices []string
	for _, lane := range lanes {
		numbers = append(numbers, fmt.Sprint(lane.Index))
		devices = append(devices, fmt.Sprintf("--device nvidia.com/gpu=%d", lane.Index))
	}
	// The error's remedy would be a second remedy.
	var library *cuda.LibraryError
	if errors.As(cause, &library) && library.Library == cuda.DefaultLibrary && library.Reason != "" {
		cause = noLibrary{library}
	}
	lane, that := "lane of GPU", "that GPU"
	if len(lanes) > 1 {
		lane, that = "lanes of GPUs", "these GPUs"
	}
	return fmt.Errorf("this container has the %s %s and cannot use %s: %w; start it with %s as well",
		lane, strings.Join(numbers, ", "), that, cause, strings.Join(devices, " "))
}

// noLibrary is a LibraryError in the loader's own words.
type noLibrary struct{ *cuda.LibraryError }

func (e noLibrary) Error() string { return e.Reason }

func (e noLibrary) Unwrap() error { return e.LibraryError }
