package generation

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
)

// ClaimUID claims a uid that no other generation below this root has. The caller holds the host's
// lock, and the generation's directory exists.
//
// The mark of a uid is a hard link of the generation's SupervisorLock. Two facts therefore survive
// the deletion of the other files: a running supervisor holds the lock, and the file names the
// supervisor's last relay.
func (g *Generation) ClaimUID(l paths.Layout, c config.Relay) error {
	if g.Sandbox.Mode != config.SandboxAuto || g.Sandbox.Group == 0 {
		return nil
	}
	first, last, err := c.UIDRange()
	if err != nil {
		return err
	}
	uid, err := LinkUID(l, g.ID, first+1, last)
	if err == nil && uid == 0 { // the generations of some marks may be gone
		if err = SweepUIDsLocked(l); err == nil {
			uid, err = LinkUID(l, g.ID, first+1, last)
		}
	}
	if err == nil && uid == 0 {
		err = &fault.Error{
			Code:      fault.NoRelayUID,
			Operation: fmt.Sprintf("all %d uids of relays are taken", last-first),
			Remedy:    "raise relay.uids in config.toml, which is " + c.UIDs,
		}
	}
	g.Sandbox.UID = uid
	return err
}

// LinkUID marks a free uid from first to last as the uid of a generation, and returns 0 if no uid is
// free.
//
// The search starts at a random uid: a process that can take any uid must not be able to compute
// the uid of a relay from a published name.
func LinkUID(l paths.Layout, id string, first, last int) (int, error) {
	count := uint64(last - first + 1)
	start := random() % count
	for i := range count {
		uid := first + int((start+i)%count)
		err := os.Link(SupervisorLock(l, id), uidMark(l, uid))
		if !errors.Is(err, fs.ErrExist) {
			return uid, err
		}
	}
	return 0, nil
}

// random returns 64 random bits of the kernel. Package crypto/rand would run its self-tests in
// every hook.
func random() uint64 {
	var bits [8]byte
	if _, err := unix.Getrandom(bits[:], 0); err != nil { // a read of few bytes is never interrupted
		panic(os.NewSyscallError("getrandom", err))
	}
	return binary.NativeEndian.Uint64(bits[:])
}

// uidMark returns the path of the mark of a uid.
func uidMark(l paths.Layout, uid int) string {
	return filepath.Join(l.UIDs(), strconv.Itoa(uid))
}

// hasUID reports whether the mark of the generation's uid is a link of this lock. Otherwise an
// administrator has deleted the mark, or the uid has been released.
func (g *Generation) hasUID(l paths.Layout, lock os.FileInfo) (bool, error) {
	if g.Sandbox.UID == 0 {
		return false, nil
	}
	mark, err := os.Lstat(uidMark(l, g.Sandbox.UID))
	if err != nil {
		return false, UnlessGone(err)
	}
	return os.SameFile(mark, lock), nil
}

// ReleaseUID removes the mark of the uid. Only the supervisor calls ReleaseUID, after the end of
// the last relay: a relay cannot create processes, so no process of the uid is left. If the
// sandbox lacks the filter of system calls, the supervisor empties the control group first.
func (g *Generation) ReleaseUID(l paths.Layout, lock *os.File) error {
	own, err := lock.Stat()
	if err != nil {
		return err
	}
	if ok, err := g.hasUID(l, own); !ok {
		return err
	}
	return UnlessGone(os.Remove(uidMark(l, g.Sandbox.UID)))
}

// SweepUIDs removes the marks of removed generations. A killed hook leaves such a mark, and so
// does an administrator who deletes the state.
func SweepUIDs(l paths.Layout) error {
	if left, err := orphans(l); len(left) == 0 {
		return err
	}
	host, err := LockHost(l) // hooks hold the lock while they claim a uid
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no hook can claim a uid, so the marks may stay
	}
	if err != nil {
		return err
	}
	defer host.Close()
	return SweepUIDsLocked(l)
}

// ReturnUID removes the mark of a generation that the caller has removed. A relay whose supervisor
// was killed dies from its parent-death signal a moment later, and a process that the supervisor
// was forking holds the lock until its end. ReturnUID therefore sweeps until the mark is gone, for
// at most process.EndTimeout. A later collector removes a mark that remains.
func (g *Generation) ReturnUID(l paths.Layout) error {
	for end := time.Now().Add(process.EndTimeout); ; time.Sleep(2 * time.Millisecond) {
		if err := SweepUIDs(l); err != nil || g.Sandbox.UID == 0 {
			return err
		}
		var mark unix.Stat_t
		err := unix.Lstat(uidMark(l, g.Sandbox.UID), &mark)
		// A mark with two links belongs to another generation, which has claimed the uid.
		if err != nil || mark.Nlink > 1 || time.Now().After(end) {
			return nil
		}
	}
}

// SweepUIDsLocked is SweepUIDs for a caller that holds the host's lock. SweepUIDsLocked keeps the
// mark of a running relay, and of a relay that a supervisor may start: such a supervisor holds the
// lock of the mark's file, and the file names the last relay. Other processes with the uid do not
// belong to Peerlane, and do not keep a mark.
func SweepUIDsLocked(l paths.Layout) error {
	left, err := orphans(l)
	if err != nil {
		return err
	}
	var errs []error
	for _, uid := range left {
		used, err := markInUse(uidMark(l, uid))
		if err == nil && !used {
			err = os.Remove(uidMark(l, uid))
		}
		errs = append(errs, UnlessGone(err)) // a supervisor may have removed the mark meanwhile
	}
	return errors.Join(errs...)
}

// markInUse reports whether the supervisor or the relay of a uid's mark runs.
func markInUse(mark string) (bool, error) {
	f, err := os.Open(mark)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := Lock(f, unix.LOCK_SH, 0); err != nil {
		if errors.Is(err, ErrLocked) {
			return true, nil
		}
		return false, err
	}
	relay, err := recordedRelay(f)
	if err != nil || relay == nil {
		return false, err
	}
	lives, err := relay.Lives()
	return lives, err
}

// RecordRelay writes a relay's process to the file of its supervisor's lock, which is also the
// mark of the uid.
func RecordRelay(lock *os.File, relay process.Process) error {
	text, err := json.Marshal(relay)
	if err == nil {
		err = lock.Truncate(0)
	}
	if err == nil {
		_, err = lock.WriteAt(text, 0)
	}
	return err
}

// recordedRelay reads the process that RecordRelay wrote. The result is nil before the first
// relay, for a supervisor of a release without this record, and if the host stopped before the
// write reached the disk.
func recordedRelay(lock *os.File) (*process.Process, error) {
	const maxRecord = 1 << 10
	text, err := io.ReadAll(io.LimitReader(lock, maxRecord))
	if err != nil {
		return nil, err
	}
	relay := &process.Process{}
	if json.Unmarshal(text, relay) != nil || relay.PID <= 0 {
		return nil, nil
	}
	return relay, nil
}

// orphans returns the uids whose marks have a single link: the generations are removed.
func orphans(l paths.Layout) (uids []int, err error) {
	entries, err := os.ReadDir(l.UIDs())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		uid, _ := strconv.Atoi(e.Name())
		if uid <= 0 {
			continue // not a uid
		}
		var mark unix.Stat_t
		err := unix.Lstat(uidMark(l, uid), &mark)
		if err == unix.ENOENT {
			continue // released meanwhile
		}
		if err != nil {
			return nil, &os.PathError{Op: "lstat", Path: uidMark(l, uid), Err: err}
		}
		if mark.Nlink == 1 {
			uids = append(uids, uid)
		}
	}
	return uids, nil
}
