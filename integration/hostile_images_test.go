package integration_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
)

// hostile is a bed whose containers attack the host. The host's files are on a shared mount: /run
// under systemd, or else a dedicated file system. Any mount of these files has their name, or that
// of their root, in mountinfo.
type hostile struct {
	*bed
	fileSystem string
	journal    *net.UnixConn
	canary     string   // a directory that no container may touch
	untouched  []string // original state of the host
}

var fileSystems atomic.Int64

func newHostile(t *testing.T, runtimeName string, change func(*config.Config)) *hostile {
	t.Helper()
	h := &hostile{fileSystem: fmt.Sprintf("peerlane-hostile-%d-%d", os.Getpid(), fileSystems.Add(1))}
	if sharedRun(t) {
		t.Setenv("TMPDIR", "/run") // as under systemd, where Peerlane's directories are below /run
	}
	root := newRoot(t)
	h.canary = filepath.Join(root, "canary")
	if !sharedRun(t) {
		mountShared(t, h.fileSystem, root)
	} else if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	h.bed = newBedIn(t, root, runtimeName, change)
	h.journal = h.hostLog()
	// Targets for an image that climbs out of its root file system.
	for _, dir := range []string{"peerlane", "run/peerlane"} {
		if err := os.MkdirAll(filepath.Join(h.canary, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"file", "peerlane/relay.sock", "run/peerlane/relay.sock"} {
		if err := os.WriteFile(filepath.Join(h.canary, file), []byte("sings"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	h.leavesNothing()
	h.untouched = h.look()
	return h
}

// sharedRun reports whether the mount of this machine's /run is shared, as under systemd.
func sharedRun(t *testing.T) bool {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); f[4] == "/run" && strings.HasPrefix(f[6], "shared:") {
			return true
		}
	}
	return false
}

// mountShared mounts a shared file system with a name.
func mountShared(t *testing.T, name, at string) {
	t.Helper()
	if err := unix.Mount(name, at, "tmpfs", 0, "mode=0755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
			err := unix.Unmount(at, 0)
			if err == nil {
				return
			}
			if end.Over() {
				t.Errorf("unmounting %s: %v", at, errors.Join(err, unix.Unmount(at, unix.MNT_DETACH)))
				return
			}
		}
	})
	if err := unix.Mount("", at, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
}

// look describes all parts of the host that a container may not change: mounts, and trees outside
// root file systems.
func (h *hostile) look() []string {
	h.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		h.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, h.fileSystem) || strings.Contains(line, filepath.Base(h.Root)) {
			all = append(all, strings.TrimSpace(line))
		}
	}
	for _, dir := range []string{h.canary, h.Layout.Anchor(), h.Layout.Config(), h.Layout.PlanFile(), h.CDIDir()} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			found := fmt.Sprintf("%s %v", path, info.Mode())
			if path != h.Layout.Anchor() { // runtimes create and remove files in the anchor
				found += fmt.Sprint(" ", info.ModTime())
			}
			if info.Mode().IsRegular() {
				text, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				found += fmt.Sprintf(" %x", sha256.Sum256(text))
			}
			all = append(all, found)
			return nil
		})
		if err != nil {
			h.Fatal(err)
		}
	}
	// Targets of a link that climbs out of the root file system on this machine.
	for _, path := range []string{"/peerlane", "/etc/peerlane/relay.sock", paths.ContainerDir + "/" + paths.SocketName} {
		_, err := os.Lstat(path)
		all = append(all, fmt.Sprintf("%s: %v", path, err == nil))
	}
	return all
}

// mustBeUntouched compares the host with its original state.
func (h *hostile) mustBeUntouched(t *testing.T) {
	t.Helper()
	now := h.look()
	for _, line := range h.untouched {
		if !slices.Contains(now, line) {
			t.Errorf("the host had: %s", line)
		}
	}
	for _, line := range now {
		if !slices.Contains(h.untouched, line) {
			t.Errorf("the host has now: %s", line)
		}
	}
	h.untouched = now
}

// image returns a bundle of a container with a lane, for an image with arbitrary content at /run.
// The program is the role witness.
func (h *hostile) image(role ...string) *bundle.Bundle {
	h.Helper()
	g := h.gpu(h.lanes[0])
	b := h.bundle(g, testbed.Devices(g), append([]string{"witness"}, role...)...)
	b.Spec.Mounts = slices.DeleteFunc(b.Spec.Mounts, func(m specs.Mount) bool { return m.Destination == "/run" })
	b.Spec.Root.Readonly = false
	return b
}

// result is the result of a container.
type result struct {
	saw     *witness // nil if the container did not start
	refusal string   // output of runtime and hook
	hooked  bool     // the hook printed a message
	took    time.Duration
}

// try runs a container to its end.
func (h *hostile) try(t *testing.T, b *bundle.Bundle) result {
	t.Helper()
	if err := b.Write(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := testutil.WithLimit(context.Background(), 3*time.Minute)
	defer cancel()
	id := h.ContainerID(filepath.Base(b.Dir))
	var stderr bytes.Buffer
	run := h.runtime.Run(ctx, b, id)
	run.Stderr = &stderr
	run.WaitDelay = patience
	begun := time.Now()
	out, err := run.Output()
	o := result{took: time.Since(begun)}
	if ctx.Err() != nil {
		t.Errorf("the container hangs: %v: %s", err, stderr.String())
	}
	for line := range bytes.Lines(out) {
		var s event
		if err := json.Unmarshal(line, &s); err != nil {
			t.Errorf("the container said %q", line)
		}
		if s.Kind == "error" {
			t.Errorf("in the container: %s", s.Error)
		}
		if s.Saw != nil {
			o.saw = s.Saw
		}
	}
	if err := h.runtime.Delete(context.Background(), id); err != nil {
		t.Error(err)
	}
	o.refusal = stderr.String()
	for _, entry := range h.newEntries(t) {
		if strings.Contains(entry, id) {
			o.refusal, o.hooked = o.refusal+entry, true
		}
	}
	if (err == nil) != (o.saw != nil) {
		t.Errorf("the runtime's end is %v, and the container said %q: %s", err, out, o.refusal)
	}
	return o
}

// newEntries returns the journal entries since the last call. The entries are complete, because every
// writer has ended.
func (h *hostile) newEntries(t *testing.T) (entries []string) {
	t.Helper()
	conn, err := h.journal.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	entry := make([]byte, 64<<10)
	for {
		var n int
		var got error
		if err := conn.Control(func(fd uintptr) {
			n, _, got = unix.Recvfrom(int(fd), entry,
				unix.MSG_DONTWAIT)
		}); err != nil {
			t.Fatal(err)
		}
		if got == unix.EAGAIN {
			return entries
		}
		if got != nil {
			t.Fatal(got)
		}
		entries = append(entries, string(entry[:n]))
	}
}

// mustBeRight requires that a started container has its own relay's socket at a read-only place,
// and that a refused container has a message.
func (h *hostile) mustBeRight(t *testing.T, o result) {
	t.Helper()
	if o.saw == nil {
		if strings.TrimSpace(o.refusal) == "" || strings.Contains(o.refusal, "goroutine ") ||
			strings.Contains(o.refusal, "panic") || !strings.Contains(o.refusal, "run") &&
			!strings.Contains(o.refusal, "/peerlane") {
			t.Errorf("refused with %q", o.refusal)
		}
		return
	}
	// The file for NCCL exists if the plan has enough data.
	if entries := slices.DeleteFunc(slices.Clone(o.saw.Entries),
		func(name string) bool { return name == paths.TopologyName }); !slices.Equal(entries, []string{paths.SocketName}) {
		t.Errorf("at %s there are %q", paths.ContainerDir, o.saw.Entries)
	}
	mount := strings.Fields(o.saw.Mount)
	if len(mount) < 7 || mount[6] != "-" {
		t.Fatalf("the mount is shared, or none: %q", o.saw.Mount)
	}
	for _, option := range []string{"ro", "nosuid", "nodev", "noexec"} {
		if !slices.Contains(strings.Split(mount[5], ","), option) {
			t.Errorf("the mount has %s and not %s", mount[5], option)
		}
	}
	if len(o.saw.Writes) == 0 {
		t.Error("it has tried to write nothing")
	}
	for what, text := range o.saw.Writes {
		if text != unix.EROFS.Error() {
			t.Errorf("%s: %s, and not %q", what, text, unix.EROFS.Error())
		}
	}
}

// witness is a container's view of its mount point, and the results of attempts to change it.
type witness struct {
	Place   string            // real path of the mount point in the container
	Entries []string          // of the mount point
	Mount   string            // the uppermost mount at the mount point, from mountinfo
	Writes  map[string]string // attempts to write, with the kernel's answers
	Mounts  map[string]string // attempts to mount, with the kernel's answers
	// Remounted has the attempts to write after a remount.
	Remounted map[string]string
}

// bearWitness is the role of a hostile image: it connects to its relay, then tries to write, and
// with "mount" or "remount" to mount, at the place of the socket. With "unshare" it runs in a new
// user namespace. With "stay" it waits for the end of input.
func bearWitness(options []string) error {
	if i := slices.Index(options, "unshare"); i >= 0 {
		return inUserNamespace(slices.Delete(options, i, i+1))
	}
	w := &witness{Writes: map[string]string{}, Mounts: map[string]string{}, Remounted: map[string]string{}}
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	s, err := client.Dial(ctx, client.DefaultSocket)
	if err != nil {
		return err
	}
	_, err = s.Statistics(ctx)
	if err := errors.Join(err, s.Close()); err != nil {
		return err
	}
	if w.Place, err = filepath.EvalSymlinks(paths.ContainerDir); err != nil {
		return err
	}
	entries, err := os.ReadDir(paths.ContainerDir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		w.Entries = append(w.Entries, e.Name())
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Fields(line)[4] == w.Place { // the last mount is the uppermost
			w.Mount = strings.TrimSpace(line)
		}
	}
	write(w.Writes)
	if slices.Contains(options, "remount") {
		w.remount()
	}
	if slices.Contains(options, "mount") {
		w.mount()
	}
	emit(event{Kind: "witness", Saw: w})
	if slices.Contains(options, "stay") {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	return err
}

// answer formats the kernel's answer.
func answer(err error) string {
	var number unix.Errno
	switch {
	case err == nil:
		return "done"
	case errors.As(err, &number):
		return number.Error()
	}
	return err.Error()
}

// write tries to change the files at the place of the socket.
func write(errorOf map[string]string) {
	file, socket := paths.ContainerDir+"/new", client.DefaultSocket
	errorOf["a file"] = answer(os.WriteFile(file, nil, 0o600))
	errorOf["a directory"] = answer(os.Mkdir(file, 0o700))
	errorOf["a link"] = answer(os.Symlink("/", file))
	errorOf["a device"] = answer(unix.Mknod(file, unix.S_IFIFO|0o600, 0))
	errorOf["another name"] = answer(os.Rename(socket, file))
	errorOf["removing the socket"] = answer(os.Remove(socket))
	errorOf["another mode"] = answer(os.Chmod(socket, 0))
	errorOf["another owner"] = answer(os.Chown(socket, 1, 1))
	errorOf["another mode of the directory"] = answer(os.Chmod(paths.ContainerDir, 0o777))
}

// hostileImage is an image with a file other than a directory at the socket's mount point or at a
// parent of the mount point.
type hostileImage struct {
	name string
	// plant modifies the image, whose /run is empty.
	plant func(p plot) error
	// starts reports that the container must start; otherwise runtime or hook may refuse the
	// container.
	starts bool
	// refused reports that runtime or hook must refuse the container.
	refused bool
}

// plot has the places of a hostile image.
type plot struct {
	*testing.T
	h    *hostile
	b    *bundle.Bundle
	root string // the root file system, on the host
}

func link(to, at string) func(plot) error {
	return func(p plot) error { return replace(p.root, at, os.Symlink, to) }
}

// linkToCanary plants a link to the host's canary, with a text before the path.
func linkToCanary(before, at string) func(plot) error {
	return func(p plot) error { return replace(p.root, at, os.Symlink, before+p.h.canary) }
}

func replace(root, at string, symlink func(string, string) error, to string) error {
	path := filepath.Join(root, at)
	return errors.Join(os.RemoveAll(path), os.MkdirAll(filepath.Dir(path), 0o755), symlink(to, path))
}

// node plants a device node or FIFO.
func node(kind uint32, at string) func(plot) error {
	return func(p plot) error {
		return replace(p.root, at, func(_, path string) error { return unix.Mknod(path, kind|0o666, int(unix.Mkdev(1, 3))) },
			"")
	}
}

var hostileImages = []hostileImage{
	{"nothing", func(plot) error { return nil }, true, false},

	{"a link from run to another directory", link("/etc", "run"), true, false},
	{"a link from run above the root", link("../../../..", "run"), false, false},
	{"a link from run to itself", link("run", "run"), false, true},
	{"a circle of links", func(p plot) error {
		return errors.Join(replace(p.root, "run", os.Symlink, "/a"), os.Symlink("/b", filepath.Join(p.root, "a")),
			os.Symlink("/run", filepath.Join(p.root, "b")))
	}, false, true},
	{"a link that leads nowhere", link("/nowhere/at/all", "run"), false, false},
	{"more links than the kernel follows", func(p plot) error {
		err := replace(p.root, "run", os.Symlink, "/0")
		for i := range 60 {
			err = errors.Join(err, os.Symlink(fmt.Sprint("/", i+1), filepath.Join(p.root, fmt.Sprint(i))))
		}
		return errors.Join(err, os.MkdirAll(filepath.Join(p.root, "60/peerlane"), 0o755))
	}, false, true},
	{"a link from run to the host", linkToCanary("", "run"), false, false},
	{"a link from run that climbs to the host", linkToCanary("../../../../../../../../../..", "run"), false, false},
	{"a link from run to the host's root by proc", linkToCanary("/proc/1/root", "run"), false, false},
	{"a link from run to a process's directory", link("/proc/self/cwd", "run"), false, false},
	{"a link to the host", linkToCanary("", "run/peerlane"), false, false},
	{"a link that climbs to the host", linkToCanary("../../../../../../../../../..", "run/peerlane"), false, false},
	{"a link to the host's root by proc", linkToCanary("/proc/self/root/proc/1/root", "run/peerlane"), false, false},
	{"a link to a descriptor", link("/proc/self/fd/3", "run/peerlane"), false, false},

	{"a fifo at the mount point", node(unix.S_IFIFO, "run/peerlane"), false, true},
	{"a fifo at run", node(unix.S_IFIFO, "run"), false, true},
	{"a socket at the mount point", node(unix.S_IFSOCK, "run/peerlane"), false, true},
	{"a socket at run", node(unix.S_IFSOCK, "run"), false, true},
	{"a character device at the mount point", node(unix.S_IFCHR, "run/peerlane"), false, true},
	{"a character device at run", node(unix.S_IFCHR, "run"), false, true},
	{"a block device at the mount point", node(unix.S_IFBLK, "run/peerlane"), false, true},
	{"a block device at run", node(unix.S_IFBLK, "run"), false, true},
	{"a file at the mount point", node(unix.S_IFREG, "run/peerlane"), false, true},
	{"a file at run", node(unix.S_IFREG, "run"), false, true},
	{"a directory that nobody may enter", func(p plot) error {
		return errors.Join(os.MkdirAll(filepath.Join(p.root, "run/peerlane"), 0o700),
			os.Chmod(filepath.Join(p.root, "run/peerlane"), 0))
	}, true, false},
	{"a socket of its own", func(p plot) error {
		dir := filepath.Join(p.root, "run/peerlane")
		return errors.Join(os.MkdirAll(dir, 0o755), unix.Mknod(filepath.Join(dir, paths.SocketName), unix.S_IFSOCK|0o666, 0))
	}, true, false},

	{"a file system at run", func(p plot) error {
		before(p.b, specs.Mount{Destination: "/run", Type: "tmpfs", Source: "tmpfs"})
		return nil
	}, true, false},
	{"a file system that covers run", func(p plot) error {
		p.b.Spec.Mounts = append(p.b.Spec.Mounts, specs.Mount{Destination: "/run", Type: "tmpfs", Source: "tmpfs"})
		return nil
	}, false, true},
	{"a volume that covers run", func(p plot) error {
		p.b.Spec.Mounts = append(p.b.Spec.Mounts, specs.Mount{Destination: "/run", Type: "bind", Source: p.h.volume(),
			Options: []string{"rbind", "rw"}})
		return nil
	}, false, true},
	{"a volume at run that links elsewhere", func(p plot) error {
		volume := p.h.volume()
		before(p.b, specs.Mount{Destination: "/run", Type: "bind", Source: volume, Options: []string{"rbind", "rw"}})
		return errors.Join(replace(volume, "peerlane", os.Symlink, "../../../../../.."+p.h.canary),
			os.MkdirAll(filepath.Join(p.root, p.h.canary), 0o755))
	}, false, false},
	{"a volume below the mount point", func(p plot) error {
		p.b.Spec.Mounts = append(p.b.Spec.Mounts, specs.Mount{Destination: paths.ContainerDir + "/below/that", Type: "bind",
			Source: p.h.volume(), Options: []string{"rbind", "rw"}})
		return nil
	}, false, true},
	{"a volume below the mount point by another name", func(p plot) error {
		p.b.Spec.Mounts = append(p.b.Spec.Mounts, specs.Mount{Destination: "/etc/peerlane/below/that", Type: "bind",
			Source: p.h.volume(), Options: []string{"rbind", "rw"}})
		return replace(p.root, "run", os.Symlink, "/etc")
	}, false, false},
	{"a file below the mount point", func(p plot) error {
		p.b.Spec.Mounts = append(p.b.Spec.Mounts, specs.Mount{Destination: "/etc/peerlane/" + paths.SocketName, Type: "bind",
			Source: filepath.Join(p.h.volume(), "peerlane", paths.SocketName), Options: []string{"bind", "rw"}})
		return replace(p.root, "run", os.Symlink, "/etc")
	}, false, false},
	{"proc at run", func(p plot) error {
		before(p.b, specs.Mount{Destination: "/run", Type: "proc", Source: "proc"})
		return nil
	}, false, true},

	{"a huge tree", hugeTree, true, false},
	{"an immutable root with its mount point", func(p plot) error {
		// The simulator's mount point may exist too.
		return errors.Join(os.MkdirAll(filepath.Join(p.root, p.h.Root, "simulator"), 0o755),
			os.MkdirAll(filepath.Join(p.root, "run/peerlane"), 0o755),
			p.immutable(filepath.Join(p.root, "run/peerlane")), p.immutable(filepath.Join(p.root, "run")))
	}, true, false},
	{"an immutable root without its mount point", func(p plot) error {
		return p.immutable(filepath.Join(p.root, "run"))
	}, false, true},
}

// before inserts a mount before the mount of the anchor.
func before(b *bundle.Bundle, m specs.Mount) {
	i := slices.IndexFunc(b.Spec.Mounts, func(m specs.Mount) bool { return m.Destination == paths.ContainerDir })
	b.Spec.Mounts = slices.Insert(b.Spec.Mounts, i, m)
}

// volume returns a directory that an engine would mount for an image, with a socket of the image in
// place of the relay's.
func (h *hostile) volume() string {
	h.Helper()
	h.count++
	dir := filepath.Join(h.Root, "volumes", fmt.Sprint(h.count))
	if err := os.MkdirAll(filepath.Join(dir, "peerlane"), 0o755); err != nil {
		h.Fatal(err)
	}
	if err := unix.Mknod(filepath.Join(dir, "peerlane", paths.SocketName), unix.S_IFSOCK|0o666, 0); err != nil {
		h.Fatal(err)
	}
	return dir
}

// hugeTree creates a directory of 20,000 files and a path of 1,000 directories at the mount point,
// which the hook must not walk.
func hugeTree(p plot) error {
	dir := filepath.Join(p.root, "run/peerlane")
	if err := os.MkdirAll(filepath.Join(dir, strings.Repeat("d/", 1000)), 0o755); err != nil {
		return err
	}
	for i := range 20000 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// errNoFlags reports a file system without immutable files.
var errNoFlags = errors.New("this file system has no immutable directories")

// immutable makes a directory immutable (chattr +i) until the end of the test.
func (p plot) immutable(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	err = setFlags(f, unix.STATX_ATTR_IMMUTABLE)
	if err == unix.ENOTTY || err == unix.EOPNOTSUPP || err == unix.EPERM {
		return fmt.Errorf("%w: %w", errNoFlags, err)
	}
	p.Cleanup(func() {
		f, err := os.Open(dir)
		if err != nil {
			p.Error(err)
			return
		}
		defer f.Close()
		if err := setFlags(f, 0); err != nil {
			p.Errorf("chattr -i %s: %v", dir, err)
		}
	})
	return err
}

func setFlags(f *os.File, flags int) error {
	return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
}

func TestHostileImageLeavesHostUntouched(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			h := newHostile(t, runtimeName, asItIs)
			for _, image := range hostileImages {
				t.Run(image.name, func(t *testing.T) {
					b := h.image()
					t.Cleanup(func() {
						if err := os.RemoveAll(b.Dir); err != nil {
							t.Error(err)
						}
					})
					if err := image.plant(plot{t, h, b, filepath.Join(b.Dir, "rootfs")}); errors.Is(err, errNoFlags) {
						t.Skip(err)
					} else if err != nil {
						t.Fatal(err)
					}
					o := h.try(t, b)
					h.mustBeRight(t, o)
					switch {
					case image.starts && o.saw == nil:
						t.Errorf("refused: %s", o.refusal)
					case image.refused && o.saw != nil:
						t.Errorf("started, with %+v", o.saw)
					case o.saw != nil:
						t.Logf("it started, with its socket at %s, after %v", o.saw.Place, o.took)
					default:
						t.Logf("it is refused after %v: %s", o.took, o.refusal)
					}
					h.mustBeUntouched(t)
				})
			}
		})
	}
}

// evil is the source of a shared library that creates a file when loaded.
const evil = `
#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) { open(MARK, O_CREAT | O_WRONLY, 0600); }
`

// The hook and the programs that it starts have the host's environment, and never the environment
// of the image.
func TestHostileImageEnvironmentReachesNoHook(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			h := newHostile(t, runtimeName, asItIs)
			b := h.image("stay")
			const sign = "from-the-image"
			dir := filepath.Join(b.Dir, "rootfs", sign) // the author of an image can guess the path
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			mark, library := filepath.Join(h.canary, "loaded"), filepath.Join(dir, "libc.so.6")
			compile(t, evil, library, "-shared", "-fPIC", fmt.Sprintf("-DMARK=%q", mark))
			// Control: a program with LD_PRELOAD creates the file.
			control := exec.Command("/bin/sh", "-c", ":")
			control.Env = []string{"LD_PRELOAD=" + library}
			if out, err := control.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := os.Remove(mark); err != nil {
				t.Fatalf("this test sees nothing: %v", err)
			}
			h.untouched = h.look()

			environment := []string{"PATH=" + dir, "LD_PRELOAD=" + library, "LD_AUDIT=" + library, "LD_LIBRARY_PATH=" + dir,
				"GODEBUG=" + sign, "GORACE=log_path=" + dir + "/race"}
			for _, name := range []string{
				"NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_TOPO_FILE", "NCCL_CONF_FILE", "PEERLANE_ROOT", "PEERLANE_SOCKET",
				"PEERLANE_REGISTRATION",
				"PEERLANE_LANES", "PEERLANE_SIM_DEV", cuda.LibraryVariable, "LISTEN_FDS", "NOTIFY_SOCKET", "TMPDIR", "HOME",
			} {
				environment = append(environment, name+"="+dir)
			}
			// Prepend, as engines do: CDI's variables take precedence.
			b.Spec.Process.Env = append(environment, b.Spec.Process.Env...)
			written := filepath.Join(h.Root, "environ")
			hook := b.Spec.Hooks.CreateRuntime[0]
			wrap(b.Spec.Hooks.CreateRuntime, h.script("wrapper", `tr '\0' '\n' </proc/$$/environ >`+written+`; exec "$@"`))
			if err := b.Write(); err != nil {
				t.Fatal(err)
			}
			c := h.run(b)
			o := result{saw: c.next("witness").Saw}
			h.mustBeRight(t, o)
			text, err := os.ReadFile(written)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Fields(string(text)); !slices.Equal(got, hook.Env) || len(got) == 0 {
				t.Errorf("the hook's environment is %q and should be %q", got, hook.Env)
			}
			relay := c.generation().Status.Relay
			if relay == nil {
				t.Fatal("no relay runs")
			}
			for _, pid := range []int{relay.PID, supervisor(t, relay.PID)} {
				proc := fmt.Sprintf("/proc/%d/", pid)
				program, err := os.Readlink(proc + "exe")
				if err != nil || filepath.Dir(program) != c.bed.Binaries {
					t.Errorf("process %d is %s, %v", pid, program, err)
				}
				for _, file := range []string{"environ", "maps", "cmdline"} {
					if text, err := os.ReadFile(proc + file); err != nil || strings.Contains(string(text), sign) {
						t.Errorf("%s, %s of %s: %v: %q", proc+file, sign, program, err, text)
					}
				}
			}
			c.end()
			h.mustBeUntouched(t)
		})
	}
}

// swaps is the number of containers of each runtime in TestParentSwappedDuringHookLeavesHostUntouched;
// PEERLANE_HOSTILE_SWAPS overrides it.
const swaps = 12

// During the hook another writer of the image (a container with the same volume) continually swaps
// a directory on the hook's path for a symbolic link and back.
func TestParentSwappedDuringHookLeavesHostUntouched(t *testing.T) {
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			rounds := fromEnvironment(t, "PEERLANE_HOSTILE_SWAPS", swaps)
			h := newHostile(t, runtimeName, asItIs)
			b := h.image()
			root := filepath.Join(b.Dir, "rootfs")
			if err := errors.Join(os.MkdirAll(filepath.Join(root, "run/peerlane"), 0o755),
				os.MkdirAll(filepath.Join(root, h.canary, "peerlane"), 0o755)); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(strings.Repeat("../", 10)+h.canary, filepath.Join(root, "swap")); err != nil {
				t.Fatal(err)
			}
			count := filepath.Join(h.Root, "swaps")
			for i := range b.Spec.Hooks.CreateRuntime {
				hook := &b.Spec.Hooks.CreateRuntime[i]
				hook.Args = append([]string{self, "role", "swap", root, count, hook.Path}, hook.Args[1:]...)
				hook.Path = self
			}
			started := 0
			for range rounds {
				o := h.try(t, b)
				h.mustBeRight(t, o)
				if o.saw != nil {
					started++
				} else if !o.hooked {
					t.Errorf("refused, but not by the hook: %s", o.refusal)
				}
				h.mustBeUntouched(t)
				if t.Failed() {
					return
				}
			}
			text, err := os.ReadFile(count)
			if err != nil {
				t.Fatal(err)
			}
			total := 0
			for _, field := range strings.Fields(string(text)) {
				n, err := strconv.Atoi(field)
				if err != nil {
					t.Fatal(err)
				}
				total += n
			}
			t.Logf("%d of %d containers started; %d swaps in all", started, rounds, total)
			if total < int(rounds) {
				t.Errorf("%d swaps in %d rounds are no race", total, rounds)
			}
			if started == 0 {
				t.Error("no container starts: whatever refuses them all, it shows nothing of the hook")
			}
		})
	}
}

// swap is a hook that runs another hook, and meanwhile exchanges the directories run and swap of a
// root file system. At the end swap restores both.
func swap(arguments []string) error {
	root, count := arguments[0], arguments[1]
	dir, err := os.Open(root)
	if err != nil {
		return err
	}
	defer dir.Close()
	exchange := func() error {
		return unix.Renameat2(int(dir.Fd()), "run", int(dir.Fd()), "swap", unix.RENAME_EXCHANGE)
	}
	var over atomic.Bool
	swapped := make(chan error, 1)
	total := 0
	go func() {
		for ; !over.Load() || total%2 == 1; total++ {
			if err := exchange(); err != nil {
				swapped <- err
				return
			}
			// Let the hook progress on one processor.
			time.Sleep(time.Duration(rand.IntN(100)) * time.Microsecond)
		}
		swapped <- nil
	}()
	c := exec.Command(arguments[2], arguments[3:]...)
	c.Stdin, c.Stderr = os.Stdin, os.Stderr
	failed := c.Run()
	over.Store(true)
	if err := <-swapped; err != nil {
		return err
	}
	f, err := os.OpenFile(count, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = fmt.Fprintln(f, total)
	return errors.Join(failed, err)
}
