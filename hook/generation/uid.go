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

// ClaimUID takes a uid that no other generation of this root has. The caller holds the host's
// lock, and the generation's directory exists.
//
// The mark of a uid is a second name of the generation's SupervisorLock, so two facts about it
// survive the deletion of the rest: a live supervisor holds its lock, and the file names the
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
	if err == nil && uid == 0 { // some marks may have lost their generation
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

// LinkUID marks a free uid of first to last as a generation's; 0 if no uid is free.
//
// The search begins at a random uid: a process that can take any uid must not be able to compute
// a relay's from a published name.
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

// random returns 64 random bits of the kernel. Package crypto/rand would run self-tests of
// algorithms in every hook.
func random() uint64 {
	var bits [8]byte
	if _, err := unix.Getrandom(bits[:], 0); err != nil { // so few bytes are never interrupted
		panic(os.NewSyscallError("getrandom", err))
	}
	return binary.NativeEndian.Uint64(bits[:])
}

// uidMark says that a generation has a uid.
func uidMark(l paths.Layout, uid int) string {
	return filepath.Join(l.UIDs(), strconv.Itoa(uid))
}

// hasUID reports whether the generation of this lock has the mark of its uid; else the mark was
// deleted by hand, or the uid is released.
func (g *Generation) hasUID(l paths.Layout, lock os.FileInfo) (bool, error) {
	if g.Sandbox.UID == 0 {
		return false, nil
	}
	mark, err := os.Lstat(uidMark(l, g.Sandbox.UID))
	return err == nil && os.SameFile(mark, lock), UnlessGone(err)
}

// ReleaseUID removes the mark of the uid. Only the supervisor calls it, after the end of its last
// relay: a relay cannot make processes, so no process of the uid is left. If the sandbox lacks
// the filter of system calls, the control group is emptied first.
func (g *Generation) ReleaseUID(l paths.Layout, lock *os.File) error {
	own, err := lock.Stat()
	if err != nil {
		return err
	}
	if has, err := g.hasUID(l, own); err != nil || !has {
		return err
	}
	return UnlessGone(os.Remove(uidMark(l, g.Sandbox.UID)))
}

// SweepUIDs removes the marks of removed generations: of a killed hook, or after a deletion of
// the state by hand.
func SweepUIDs(l paths.Layout) error {
	if left, err := orphans(l); err != nil || len(left) == 0 {
		return err
	}
	host, err := LockHost(l) // held by hooks that claim a uid
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no hook claims a uid here, so the marks may stay
	}
	if err != nil {
		return err
	}
	defer host.Close()
	return SweepUIDsLocked(l)
}

// ReturnUID removes the mark of a generation that the caller has removed. A relay whose
// supervisor was killed dies by its parent-death signal a moment later, and a process that the
// supervisor was forking holds the lock until it dies: so ReturnUID sweeps until the mark has
// gone, for at most process.EndTimeout. A later collector removes a mark that stays.
func (g *Generation) ReturnUID(l paths.Layout) error {
	for end := time.Now().Add(process.EndTimeout); ; time.Sleep(2 * time.Millisecond) {
		if err := SweepUIDs(l); err != nil || g.Sandbox.UID == 0 {
			return err
		}
		var mark unix.Stat_t
		err := unix.Lstat(uidMark(l, g.Sandbox.UID), &mark)
		// A mark with a second name belongs to another generation, which has taken the uid.
		if err != nil || mark.Nlink > 1 || time.Now().After(end) {
			return nil
		}
	}
}

// SweepUIDsLocked is SweepUIDs for a caller that holds the host's lock. It never removes the mark
// of a relay that lives or that a supervisor may start: such a supervisor holds the lock of the
// mark's file, and the file names the last relay. Other processes of that uid do not belong to
// Peerlane, and block nothing.
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
		errs = append(errs, UnlessGone(err)) // a supervisor may have removed the mark just now
	}
	return errors.Join(errs...)
}

// markInUse reports whether the supervisor, or the relay, of a uid's mark lives.
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
// relay, for a supervisor of a release before this record, and after a stop of the host before a
// write to the disk.
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

// orphans returns the uids whose marks have no other name: the generation is gone.
func orphans(l paths.Layout) (uids []int, err error) {
	entries, err := os.ReadDir(l.UIDs())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		uid, err := strconv.Atoi(e.Name())
		if err != nil || uid <= 0 {
			continue // not a uid
		}
		var mark unix.Stat_t
		err = unix.Lstat(uidMark(l, uid), &mark)
		if err == unix.ENOENT {
			continue // given back just now
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
