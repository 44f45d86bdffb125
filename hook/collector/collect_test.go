package collector

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/testprocess"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// layout returns a layout with the directories of state and sockets. Names of sockets are short.
func layout(t *testing.T) paths.Layout {
	t.Helper()
	l := paths.New(testutil.ShortDir(t))
	for _, dir := range []string{l.UIDs(), l.Generations(), l.Sockets(), l.Peers()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// makeGeneration writes a generation with sockets that no process listens on.
func makeGeneration(t *testing.T, l paths.Layout, id string, init process.Process) {
	t.Helper()
	for _, dir := range []string{l.GenerationDir(id), l.SocketDir(id)} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	g := &generation.Generation{ID: id, Init: init, Container: generation.Container{ID: "container-" + id[31:]}}
	if err := g.Write(l); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(l.SocketDir(id), paths.SocketName), l.PeerSocket(id)} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// existingPaths reports whether each path of a generation exists: directory, sockets of clients, socket of peers.
func existingPaths(l paths.Layout, id string) (list [3]bool) {
	for i, path := range []string{l.GenerationDir(id), l.SocketDir(id), l.PeerSocket(id)} {
		_, err := os.Lstat(path)
		list[i] = err == nil
	}
	return list
}

var all, none = [3]bool{true, true, true}, [3]bool{}

func id(n byte) string { return strings.Repeat("0", 31) + string('0'+n) }

// collectOnly fails the test unless a collection removes these generations without an error.
func collectOnly(t *testing.T, l paths.Layout, want ...string) {
	t.Helper()
	removed, err := Collect(l)
	slices.Sort(removed)
	if err != nil || !slices.Equal(removed, want) {
		t.Errorf("removed %q, %v, not %q", removed, err, want)
	}
}

func TestCollectEndedContainerRemovesItsFilesOnly(t *testing.T) {
	l := layout(t)
	makeGeneration(t, l, id(1), testprocess.Ended(t))
	makeGeneration(t, l, id(2), testprocess.Own(t))
	collectOnly(t, l, id(1))
	if existingPaths(l, id(1)) != none || existingPaths(l, id(2)) != all {
		t.Errorf("ended %v, running %v", existingPaths(l, id(1)), existingPaths(l, id(2)))
	}
	collectOnly(t, l)
}

func TestCollectSupervisedOrLockedGenerationStays(t *testing.T) {
	l := layout(t)
	for n := range byte(2) {
		makeGeneration(t, l, id(n), testprocess.Ended(t))
	}
	if err := generation.MakeSupervisorLock(l, id(0)); err != nil {
		t.Fatal(err)
	}
	supervisor, err := os.Open(generation.SupervisorLock(l, id(0)))
	if err != nil {
		t.Fatal(err)
	}
	defer supervisor.Close()
	if err := generation.Lock(supervisor, unix.LOCK_EX, 0); err != nil {
		t.Fatal(err)
	}
	remover, err := generation.LockGeneration(l, id(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer remover.Close()
	collectOnly(t, l)
	if existingPaths(l, id(0)) != all || existingPaths(l, id(1)) != all {
		t.Errorf("supervised %v, locked %v", existingPaths(l, id(0)), existingPaths(l, id(1)))
	}
	supervisor.Close()
	remover.Close()
	collectOnly(t, l, id(0), id(1))
}

func TestCollectDamagedOrEmptyGenerationIsRemoved(t *testing.T) {
	l := layout(t)
	makeGeneration(t, l, id(1), testprocess.Own(t))
	if err := os.WriteFile(generation.File(l, id(1)), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	makeGeneration(t, l, id(2), testprocess.Own(t))
	if err := os.Remove(generation.File(l, id(2))); err != nil {
		t.Fatal(err)
	}
	collectOnly(t, l, id(1), id(2))
	if existingPaths(l, id(1)) != none || existingPaths(l, id(2)) != none {
		t.Errorf("damaged %v, empty %v", existingPaths(l, id(1)), existingPaths(l, id(2)))
	}
}

// The directory of a generation stays after a failure, so that the next collection finds the rest.
func TestCollectFailedRemovalIsRepeated(t *testing.T) {
	l := layout(t)
	makeGeneration(t, l, id(1), testprocess.Ended(t))
	makeGeneration(t, l, id(2), testprocess.Ended(t))
	blocked := l.PeerSocket(id(1))
	if err := errors.Join(os.Remove(blocked), os.MkdirAll(filepath.Join(blocked, "file"), 0o700)); err != nil {
		t.Fatal(err)
	}
	removed, err := Collect(l)
	var f *fault.Error
	var path *fs.PathError
	if !errors.As(err, &f) || f.Object != id(1) || !errors.As(err, &path) || path.Path != blocked {
		t.Errorf("%v", err)
	}
	if left := existingPaths(l, id(1)); !slices.Equal(removed, []string{id(2)}) || left != [3]bool{true, false, true} ||
		existingPaths(l, id(2)) != none {
		t.Errorf("removed %q, left %v and %v", removed, existingPaths(l, id(1)), existingPaths(l, id(2)))
	}
	if err := errors.Join(os.RemoveAll(blocked), os.WriteFile(blocked, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	collectOnly(t, l, id(1))
	if existingPaths(l, id(1)) != none {
		t.Errorf("left %v", existingPaths(l, id(1)))
	}
}

func TestCollectForeignMachineGenerationStays(t *testing.T) {
	l := layout(t)
	makeGeneration(t, l, id(1), testprocess.Ended(t))
	g, err := generation.Read(l, id(1))
	if err != nil {
		t.Fatal(err)
	}
	g.Machine = strings.Repeat("a", 32)
	machine := filepath.Join(l.Root, "etc/machine-id")
	if err := errors.Join(g.Write(l), os.MkdirAll(filepath.Dir(machine), 0o755),
		os.WriteFile(machine, []byte(strings.Repeat("b", 32)+"\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	collectOnly(t, l)
	if existingPaths(l, id(1)) != all {
		t.Errorf("%v", existingPaths(l, id(1)))
	}
}

func TestCollectSocketsWithoutGenerationRemovesDeadSocketsOnly(t *testing.T) {
	l := layout(t)
	for n := range byte(3) {
		makeGeneration(t, l, id(n), testprocess.Own(t))
		if n > 0 { // an administrator has deleted the directory
			if err := os.RemoveAll(l.GenerationDir(id(n))); err != nil {
				t.Fatal(err)
			}
		}
	}
	peer := l.PeerSocket(id(2))
	if err := os.Remove(peer); err != nil {
		t.Fatal(err)
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: peer, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	others := []string{filepath.Join(l.Sockets(), "other"), filepath.Join(l.Peers(), "other.sock")}
	for _, path := range others {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	collectOnly(t, l, id(1))
	if existingPaths(l, id(0)) != all || existingPaths(l, id(1)) != none ||
		existingPaths(l, id(2)) != [3]bool{false, true, true} {
		t.Errorf("with directory %v, dead %v, with a listener %v",
			existingPaths(l, id(0)), existingPaths(l, id(1)), existingPaths(l, id(2)))
	}
	for _, path := range others {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("another file was removed: %v", err)
		}
	}
}

func TestCollectRelayWithoutSupervisorWritesItsCause(t *testing.T) {
	l := layout(t)
	socket := filepath.Join(l.Root, "run/systemd/journal/socket")
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		t.Fatal(err)
	}
	log := testutil.ListenDatagrams(t, socket)
	makeGeneration(t, l, id(1), testprocess.Ended(t))
	relay := testprocess.Ended(t)
	if err := generation.WriteJSON(generation.StatusFile(l, id(1)), generation.Status{Relay: &relay}); err != nil {
		t.Fatal(err)
	}
	collectOnly(t, l, id(1))
	entry := testutil.ReadDatagram(t, log)
	for _, field := range []string{"PEERLANE_CAUSE=" + CauseUnsupervised, "PEERLANE_GENERATION=" + id(1),
		"PEERLANE_CONTAINER=container-1", "PRIORITY=4"} {
		if !slices.Contains(strings.Split(entry, "\n"), field) {
			t.Errorf("the entry has no %s: %q", field, entry)
		}
	}
}
