//go:build engines

package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/image"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// importer is an engine into which a test imports a second image.
type importer interface {
	imports(ctx context.Context, i *image.Image, name string) error
}

// linkedImage is the name of an image whose mount point for the relay's sockets is a link.
const linkedImage = "docker.io/library/linked:12"

// attacks requires that attacks from containers with an engine's default capabilities and seccomp
// profile are refused by the profile, or do not harm the container of another tenant. Each
// attack proves on an object of its own that its primitive works there.
func attacks(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 8*time.Minute)
	defer cancel()
	part := func(name string, f func()) {
		outer := b.T
		defer func() { b.T = outer }()
		outer.Run(name, func(t *testing.T) {
			b.T = t
			defer func() { b.T = outer }()
			f()
		})
	}
	part("image-link", func() { b.imageLink(ctx, c) })
	v := &victim{b, c, b.running(ctx, c), 1}
	part("take-uid", func() { v.takeUID(ctx) })
	part("in-flight", func() { v.inFlight(ctx) })
	part("trace", func() { v.trace(ctx) })
	part("reach", func() { v.reach(ctx) })
	part("flood", func() { v.flood(ctx) })
	part("escape", func() { v.escape(ctx) })
	b.mustRemove(c.ask)
}

// attacker returns a container with the engine's defaults that runs an attack.
func (b *bed) attacker(c check, kind string, arguments ...any) container {
	b.Helper()
	words := []string{kind}
	for _, a := range arguments {
		words = append(words, fmt.Sprint(a))
	}
	return container{name: c.ask.name + "-" + kind, devices: []string{"test.peerlane.dev/reports=all"},
		profile: true, role: "attack", exchange: strings.Join(words, ",")}
}

// attack starts an attack and returns the first report. The engine's seccomp profile must be in
// effect. The attack runs until remove.
func (b *bed) attack(ctx context.Context, a container) (r attackReport, remove func()) {
	b.Helper()
	b.Cleanup(func() { b.mustRemove(a) })
	for end := testutil.Begin(); ; time.Sleep(200 * time.Millisecond) {
		err := b.engine.start(ctx, a)
		if err == nil {
			break
		}
		if !imageUnknown(err) || end.Over() {
			b.Fatal(err)
		}
		b.mustRemove(a)
	}
	b.line(a, 1, &r)
	b.Logf("%s: %+v", a.exchange, r)
	if r.Error != "" {
		b.Fatalf("the attack %s does not run: %s", a.exchange, r.Error)
	}
	if !r.Filtered {
		b.Error("the engine's seccomp profile is not in effect")
	}
	return r, func() { b.Helper(); b.mustRemove(a) }
}

// mustShow requires methods that succeed on an object of the attacker, and none on Peerlane's
// objects.
func (r attackReport) mustShow(b *bed, control ...string) {
	b.Helper()
	for _, method := range control {
		if !slices.Contains(r.Control, method) {
			b.Errorf("the attacker cannot use %s on its own objects, so the attack shows nothing: %+v", method, r)
		}
	}
	if len(r.Succeeded) > 0 {
		b.Errorf("the attack succeeds by %q", r.Succeeded)
	}
}

// imageLink makes the runtime create its mount points and device nodes in the anchor.
func (b *bed) imageLink(ctx context.Context, c check) {
	b.Helper()
	dir := b.mkdir("linked-" + b.row.name)
	linked := image.In(dir)
	if err := os.CopyFS(linked.RootFS, os.DirFS(b.image.RootFS)); err != nil {
		b.Fatal(err)
	}
	link := filepath.Join(linked.RootFS, linkPath)
	err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o755), os.RemoveAll(link), os.Symlink(linkTarget, link),
		linked.Pack(linkedImage),
		b.engine.(importer).imports(ctx, linked, linkedImage))
	if err != nil {
		b.Fatal(err)
	}
	without := b.attacker(c, "link")
	without.image = linkedImage
	r, remove := b.attack(ctx, without)
	remove()
	with := c.ask
	with.name += "-linked"
	with.image, with.role = linkedImage, "client"
	b.Cleanup(func() { b.mustRemove(with) })
	err = b.engine.run(ctx, with)
	switch {
	case r.Refused != "": // the engine mounts an empty /run
		if err != nil {
			b.Errorf("the link is hidden (%s), and the container fails: %v", r.Refused, err)
		}
	case err == nil:
		b.Errorf("a container starts whose image has a link to %q in place of %s", r.Control, linkPath)
	case !slices.Equal(r.Control, []string{linkTarget}):
		b.Errorf("the link leads to %q", r.Control)
	default:
		b.Logf("refused: %v", err)
	}
	b.mustRemove(with)
	if b.row.rootless {
		// Without root the anchor is a plain directory, which the next container with a lane empties.
		next := c.ask
		next.name += "-next"
		next.role = "client"
		if err := b.engine.run(ctx, next); err != nil {
			b.Error(err)
		}
	}
	if left, err := os.ReadDir(b.Layout.Anchor()); err != nil || len(left) > 0 {
		b.Errorf("the anchor has %v, %v", left, err)
	}
}

// victim is a container of another tenant.
type victim struct {
	*bed
	check      check
	generation string
	starts     int // of the relay
}

// info returns the state of the victim's generation.
func (v *victim) info() generation.Info {
	v.Helper()
	list, err := generation.List(v.Layout)
	if err != nil {
		v.Fatal(err)
	}
	for _, g := range list {
		if g.ID == v.generation {
			return g
		}
	}
	v.Fatalf("generation %s is gone", v.generation)
	return generation.Info{}
}

// relay returns the victim's running relay, and the uid of the relay in the victim's user
// namespace.
func (v *victim) relay() (pid, uid int) {
	v.Helper()
	var g generation.Info
	for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
		if g = v.info(); g.Status.Relay != nil && g.Status.State == generation.StateReady {
			return g.Status.Relay.PID, g.Sandbox.UID // 0 for the container's root in the user's namespace
		}
		if end.Over() {
			v.Fatalf("there is no relay: %+v", g.Status)
		}
	}
}

// mustServe requires that a further process of the victim attaches and exchanges messages, and that
// the relay is still the same process.
func (v *victim) mustServe(ctx context.Context) {
	v.Helper()
	another := v.check.ask
	another.name += "-another"
	if err := v.attach(ctx, another); err != nil {
		v.Error(err)
	}
	v.judge(v.check, v.lastReport(another, 1))
	if g := v.info(); g.Status.Starts != v.starts {
		v.Errorf("the relay was started %d times, want %d", g.Status.Starts, v.starts)
	}
}

func (v *victim) attach(ctx context.Context, another container) error {
	v.Helper()
	if err := os.RemoveAll(filepath.Join(v.reports, another.name)); err != nil {
		v.Fatal(err)
	}
	return v.engine.(executer).exec(ctx, v.check.ask, "/usr/bin/test-peerlane", "another", another.name, "")
}

// takeUID runs a process with the uid of the relay and the name of a relay's process: the relay
// dies, its successor starts, and the process goes on.
func (v *victim) takeUID(ctx context.Context) {
	v.Helper()
	pid, uid := v.relay()
	r, remove := v.attack(ctx, v.attacker(v.check, "take-uid", uid))
	r.mustShow(v.bed, "setresuid")
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		v.Fatal(err)
	}
	v.starts++
	for end := testutil.Begin(); v.info().Status.Starts != v.starts; time.Sleep(20 * time.Millisecond) {
		if end.Over() {
			v.Fatalf("the relay is not started again: %+v", v.info().Status)
		}
	}
	v.mustServe(ctx)
	remove()
	if v.row.rootless {
		// The uids of relays of a root engine are not among the user's uids.
		a := v.attacker(v.check, "take-uid", 300_000)
		a.name += "-unmapped"
		r, remove := v.attack(ctx, a)
		if r.Refused == "" {
			v.Errorf("a container of an ordinary user takes a uid that is not the user's: %+v", r)
		}
		remove()
	}
}

// inFlight runs a process of the relay's uid that puts descriptors in flight up to the container's
// limit. With a limit below the relay's limit the victim attaches. Otherwise, and if both
// containers have the uid of an ordinary user, attaches fail with the reason until the attack ends.
func (v *victim) inFlight(ctx context.Context) {
	v.Helper()
	pid, uid := v.relay()
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		v.Fatal(err)
	}
	var relays uint64
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok {
			if relays, err = strconv.ParseUint(strings.Fields(rest)[0], 10, 64); err != nil {
				v.Fatal(err)
			}
		}
	}
	r, remove := v.attack(ctx, v.attacker(v.check, "in-flight", uid))
	r.mustShow(v.bed, "sendmsg until ETOOMANYREFS")
	v.Logf("%d descriptors in flight; the relay may have %d files open", r.Count, relays)
	if r.Count == 0 || relays == 0 {
		v.Errorf("%d descriptors in flight beside a limit of %d", r.Count, relays)
	}
	if r.Count > relays || v.row.rootless {
		another := v.check.ask
		another.name += "-blocked"
		// Containers of an ordinary user have the user's uid and limit: the client itself cannot send.
		reason := string(fault.LimitMet)
		if v.row.rootless {
			reason = unix.ETOOMANYREFS.Error()
		}
		err := v.attach(ctx, another)
		if err == nil || !strings.Contains(v.lastReport(another, 1).Error, reason) {
			v.Errorf("a process attaches beside %d descriptors in flight: %v", r.Count, err)
		}
		remove()
	}
	v.mustServe(ctx)
	remove()
}

// trace runs a container with the host's PID namespace that takes the uid of each relay and tries
// to trace the relay from its execution on.
func (v *victim) trace(ctx context.Context) {
	v.Helper()
	pid, uid := v.relay()
	a := v.attacker(v.check, "trace", filepath.Join(v.Binaries, "peerlane-relay"), pid, uid)
	a.hostPID = true
	r, remove := v.attack(ctx, a)
	r.mustShow(v.bed, "/proc/PID/mem", "ptrace")
	// The spy may miss a start on a busy host.
	const starts = 6
	spied := 0
	for i := 0; i < starts && spied == 0; i++ {
		other := v.check.ask
		other.name = fmt.Sprintf("%s-%d", v.check.ask.name, i)
		v.Cleanup(func() { v.mustRemove(other) })
		if err := v.engine.start(ctx, other); err != nil {
			v.Fatal(err)
		}
		v.lastReport(other, 1)
		for end := testutil.BeginFor(3 * time.Second); !end.Over(); time.Sleep(50 * time.Millisecond) {
			text, err := os.ReadFile(filepath.Join(v.reports, a.name))
			if err != nil {
				v.Fatal(err)
			}
			if spied = strings.Count(string(text), "\n") - 1; spied > 0 {
				break
			}
		}
		v.mustRemove(other)
	}
	if spied == 0 {
		v.Errorf("the attack saw none of %d relays start", starts)
	}
	v.Logf("the attack saw %d relays start", spied)
	for i := range spied {
		var r attackReport
		v.line(a, 2+i, &r)
		if r.Error != "" || r.Tried != 1 || len(r.Succeeded) > 0 {
			v.Errorf("a starting relay can be traced: %+v", r)
		}
	}
	v.mustServe(ctx)
	remove()
}

// reach runs a container with the host's PID and network namespaces that finds no connection to
// another relay's peer socket.
func (v *victim) reach(ctx context.Context) {
	v.Helper()
	socket := v.Layout.PeerSocket(v.generation)
	if info, err := os.Stat(socket); err != nil || info.Mode().Type() != os.ModeSocket {
		v.Fatalf("%s is no socket: %v", socket, err)
	}
	a := v.attacker(v.check, "reach", socket)
	a.hostPID, a.hostNetwork = true, true
	r, remove := v.attack(ctx, a)
	r.mustShow(v.bed, "/proc/PID/root")
	if r.Tried < 10 {
		v.Errorf("the attacker sees %d processes, which are not the host's", r.Tried)
	}
	v.mustServe(ctx)
	remove()
}

// flood runs a container that floods its own relay and disturbs no other relay.
func (v *victim) flood(ctx context.Context) {
	v.Helper()
	a := v.attacker(v.check, "flood")
	a.devices = append(a.devices, gpusWithLanes(6)...)
	r, remove := v.attack(ctx, a)
	r.mustShow(v.bed, "connect")
	v.mustServe(ctx)
	remove()
}

// escape requires that no command prints names with escape sequences to an administrator's
// terminal.
func (v *victim) escape(ctx context.Context) {
	v.Helper()
	a := v.attacker(v.check, "escape")
	a.devices = append(a.devices, gpusWithLanes(6)...)
	r, remove := v.attack(ctx, a)
	capabilities, err := strconv.ParseUint(r.Capabilities, 16, 64)
	if err != nil {
		v.Fatal(err)
	}
	// A user namespace refuses device nodes also with the capability.
	mknod := capabilities>>unix.CAP_MKNOD&1 == 1 && !v.row.rootless
	if mknod {
		r.mustShow(v.bed, "file", "comm", "mknod")
	} else if r.mustShow(v.bed, "file", "comm"); r.Refused == "" {
		v.Errorf("mknod succeeds without CAP_MKNOD: %+v", r)
	}
	var own, container string
	// The generation of an earlier attack may be ending.
	for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
		list, err := generation.List(v.Layout)
		if err != nil {
			v.Fatal(err)
		}
		if len(list) == 2 {
			g := list[slices.IndexFunc(list, func(g generation.Info) bool { return g.ID != v.generation })]
			own, container = g.ID, g.Container.ID
			break
		}
		if end.Over() {
			v.Fatalf("there are %d generations", len(list))
		}
	}
	for _, words := range [][]string{{"relay", "list"}, {"relay", "inspect", own}, {"relay", "drain", own}} {
		command := append([]string{filepath.Join(v.Binaries, "peerlane")}, append(words, "--root", v.Layout.Root)...)
		out, err := v.ground.command(ctx, command[0], command[1:]...).CombinedOutput()
		if err != nil {
			v.Errorf("%s: %v: %q", strings.Join(words, " "), err, out)
		}
		if strings.ContainsAny(string(out), "\x1b\x07\u009b") {
			v.Errorf("%s prints an escape sequence: %q", strings.Join(words, " "), out)
		}
		listed := linesWith(string(out), container) // the same attack may run in another engine
		if words[1] == "drain" && strings.Contains(listed, "/dev/nvidia71") != mknod {
			v.Errorf("listed devices differ from the container's character devices: %q", out)
		}
		if words[1] == "drain" && strings.Contains(listed, "/dev/nvidia70") {
			v.Errorf("a file is among the devices: %q", out)
		}
	}
	remove()
}

// linesWith returns the lines of a text that contain a word.
func linesWith(text, word string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.Contains(line, word) {
			b.WriteString(line)
		}
	}
	return b.String()
}
