package hook

import (
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/layout"
)

// A relay that was taken over can leave processes behind, in sessions of their own
// and with no parent. A control group of its own ends them with the generation; not
// every host has one, and a unit of systemd's leaves what is in it. But they have
// the relay's uid, which nobody else has, and cannot get another.

// endStrays ends what has the generation's uid, when its relay has ended. The lock
// is supervisorLock. An error says that something is left, and the uid is not to be
// given back.
func (g *Generation) endStrays(l layout.Layout, lock os.FileInfo) error {
	has, err := g.hasUID(l, lock)
	if err != nil || !has {
		return err
	}
	for deadline := time.Now().Add(endTimeout); inUse(g.Sandbox.UID); time.Sleep(time.Millisecond) {
		used, err := usedUIDs()
		if err != nil {
			return err
		}
		if !used[g.Sandbox.UID] {
			return nil // what has ended, and nobody asks for how
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes of user %d, which its relay has left, do not end even by SIGKILL; a driver holds them", g.Sandbox.UID)
		}
		if err := killUser(g.Sandbox.UID); err != nil {
			return fmt.Errorf("ending what its relay has left, as user %d: %w", g.Sandbox.UID, err)
		}
	}
	return nil
}

// inUse reports whether a process has a real uid, also one that has ended and that
// nobody has asked for its status. The kernel knows without looking at each.
func inUse(uid int) bool {
	_, err := unix.Getpriority(unix.PRIO_USER, uid)
	return err != unix.ESRCH
}

// killUser kills all processes of a user at once: kill(2) to process -1 misses none
// that is being forked, as who kills one after the other would.
func killUser(uid int) error {
	if uid <= 0 || uid == os.Getuid() || uid == os.Geteuid() {
		return fmt.Errorf("user %d is no relay's", uid)
	}
	result := make(chan error)
	go onThread(func() { result <- becomeAndKill(uint32(uid)) })
	return <-result
}

// onThread calls a function on a thread that ends with it. The process's first
// cannot end, and by its uid the process is known.
func onThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		defer runtime.UnlockOSThread()
		done := make(chan struct{})
		go onThread(func() { defer close(done); f() })
		<-done
		return
	}
	f()
}

// becomeAndKill gives this thread alone the uid, with nothing that could make the
// signal go to anybody else, and sends it. The process itself is left out.
func becomeAndKill(uid uint32) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var only [2]unix.CapUserData
	only[0].Effective, only[0].Permitted = 1<<unix.CAP_SETUID, 1<<unix.CAP_SETUID
	if err := unix.Capset(&header, &only[0]); err != nil {
		return os.NewSyscallError("capset", err)
	}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	if has[0].Effective != 1<<unix.CAP_SETUID || has[1].Effective != 0 {
		return fmt.Errorf("capset left %#x %#x", has[1].Effective, has[0].Effective)
	}
	// Raw: those of packages syscall and unix change all threads.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
		return os.NewSyscallError("setresuid", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_KILL, ^uintptr(0), uintptr(unix.SIGKILL), 0); errno != 0 && errno != unix.ESRCH {
		return os.NewSyscallError("kill", errno)
	}
	return nil
}
