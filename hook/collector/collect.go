package collector

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/internal/unixsocket"
	"github.com/peerlane/peerlane/hook/journal"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
)

// CauseUnsupervised is the cause of a relay's end after the supervisor was killed: the relay
// ended with the container.
const CauseUnsupervised = "supervisor gone"

// Collect removes the generations whose container has ended and whose supervisor was killed, and
// returns the names; the error names the failures. Collect does not affect a running container.
// Any number of calls may run at once. If a relay does not end with the
// container, Collect kills the relay after process.EndTimeout.
func Collect(l paths.Layout) (removed []string, err error) {
	all, err := generation.IDs(l)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, id := range all {
		done, err := collect(l, id)
		if err != nil {
			errs = append(errs, &fault.Error{Operation: "remove generation", Object: id, Cause: err})
		}
		if done {
			removed = append(removed, id)
		}
	}
	orphans, err := sweepOrphans(l)
	if err != nil {
		errs = append(errs, fmt.Errorf("remove sockets and control groups without a generation: %w", err))
	}
	removed = append(removed, orphans...)
	if err := generation.SweepUIDs(l); err != nil {
		errs = append(errs, fmt.Errorf("release uids of relays: %w", err))
	}
	return removed, errors.Join(errs...)
}

// orphanGenerations lists the generations that have sockets or a control group but no directory.
// The hook makes the directory first, and a removal ends with the directory, so an administrator
// must have deleted the directory.
func orphanGenerations(l paths.Layout) ([]string, error) {
	dirs := []string{l.Sockets(), l.Peers()}
	if group, ok, err := cgroup.Find(l, ""); err == nil && ok {
		dirs = append(dirs, group.Parent())
	}
	var list []string
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			id := strings.TrimSuffix(e.Name(), ".sock")
			if !generation.IsID(id) || slices.Contains(list, id) {
				continue
			}
			if _, err := os.Lstat(l.GenerationDir(id)); errors.Is(err, fs.ErrNotExist) {
				list = append(list, id)
			}
		}
	}
	return list, nil
}

// sweepOrphans removes the generations of orphanGenerations without supervisor and relay: a
// running process listens on the sockets.
func sweepOrphans(l paths.Layout) (removed []string, err error) {
	if list, err := orphanGenerations(l); err != nil || len(list) == 0 {
		return nil, err
	}
	host, err := generation.LockHost(l) // no hook makes a generation meanwhile
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer host.Close()
	list, err := orphanGenerations(l)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, id := range list {
		lives, err := listens(filepath.Join(l.SocketDir(id), paths.SocketName), l.PeerSocket(id))
		if err == nil && lives {
			continue
		}
		if err == nil {
			err = errors.Join(
				cgroup.Remove(l, id, false),
				os.RemoveAll(l.SocketDir(id)),
				generation.UnlessGone(os.Remove(l.PeerSocket(id))),
			)
		}
		if err == nil {
			removed = append(removed, id)
		}
		errs = append(errs, err)
	}
	return removed, errors.Join(errs...)
}

// listens reports whether a process listens on a socket of the list.
func listens(sockets ...string) (bool, error) {
	for _, path := range sockets {
		conn, err := unixsocket.ConnectWithin(path, time.Millisecond)
		switch {
		case err == nil:
			conn.Close()
			return true, nil
		case errors.Is(err, unix.EAGAIN): // the queue is full
			return true, nil
		case !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist):
			return false, err
		}
	}
	return false, nil
}

func collect(l paths.Layout, id string) (bool, error) {
	// Most generations have a supervisor that detects the end of init and removes the generation
	// more gently.
	if alive, err := generation.Supervised(l, id); err != nil || alive {
		return false, err
	}
	g, err := generation.Read(l, id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return collectEmpty(l, id)
	case errors.Is(err, generation.ErrTorn):
		return collectEnded(l, id)
	case err != nil:
		return false, err
	}
	if g.Foreign(l) {
		return false, nil
	}
	if lives, err := g.Init.Lives(); err != nil || lives {
		return false, err
	}
	return collectEnded(l, id)
}

// collectEnded removes a generation whose container has ended.
func collectEnded(l paths.Layout, id string) (bool, error) {
	held, err := generation.LockGeneration(l, id, 0)
	if err != nil {
		return false, notOurs(err)
	}
	defer held.Close()
	// A supervisor may have started since.
	if alive, err := generation.Supervised(l, id); err != nil || alive {
		return false, err
	}
	status, _ := generation.ReadStatus(l, id) // Remove reports a read failure
	container := ""
	if g, err := generation.Read(l, id); err == nil {
		container = g.Container.ID
	}
	if err := Remove(l, id); err != nil {
		return false, err
	}
	if status.Relay == nil {
		return true, nil
	}
	// No supervisor has logged this end, and the relay's own report had no receiver.
	message := fmt.Sprintf(
		"relay %d has ended: %s: the relay ended with the container, or with the host, after the end of the supervisor",
		status.Relay.PID,
		CauseUnsupervised,
	)
	if err := journal.WriteCause(l, journal.SeverityWarning, container, id, message, CauseUnsupervised); err != nil {
		return true, fmt.Errorf("record in the host's log that relay %d has ended: %w", status.Relay.PID, err)
	}
	return true, nil
}

// collectEmpty removes the directory of a hook that was killed before writing generation.json. A
// hook that makes a generation holds the host's lock.
func collectEmpty(l paths.Layout, id string) (bool, error) {
	host, err := generation.LockHost(l)
	if err != nil {
		return false, err
	}
	defer host.Close()
	held, err := generation.LockGeneration(l, id, 0)
	if err != nil {
		return false, notOurs(err)
	}
	defer held.Close()
	if _, err := os.Stat(generation.File(l, id)); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if err := Remove(l, id); err != nil {
		return false, err
	}
	return true, nil
}

// notOurs drops the errors of a generation that another process is removing or has removed.
func notOurs(err error) error {
	if errors.Is(err, generation.ErrLocked) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Remove removes a generation except the mark of the uid, which the supervisor or SweepUIDs
// removes. The caller holds the lock. The directory goes last, so that the next collector finds an
// interrupted removal.
func Remove(l paths.Layout, id string) error {
	var errs []error
	status, err := generation.ReadStatus(l, id)
	if err != nil {
		errs = append(errs, err)
	}
	if status.Relay != nil {
		// A relay without a supervisor ends with the container, and sends peers the reason. A
		// killed relay could not send the reason.
		errs = append(errs, status.Relay.End(process.EndTimeout))
	}
	errs = append(errs, cgroup.Remove(l, id, status.ControlGroup))
	errs = append(errs, os.RemoveAll(l.SocketDir(id)))
	if err := unix.Unlink(l.PeerSocket(id)); err != nil && err != unix.ENOENT {
		errs = append(errs, &os.PathError{Op: "unlink", Path: l.PeerSocket(id), Err: err})
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return os.RemoveAll(l.GenerationDir(id))
}
