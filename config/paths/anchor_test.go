package paths

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// anchored returns a root with the directories of a host. The end of the test unmounts its anchor.
func anchored(t *testing.T) Layout {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	l := New(t.TempDir())
	t.Cleanup(func() {
		if _, err := l.UnmountAnchor(); err != nil {
			t.Error(err)
		}
	})
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	return l
}

// mounts returns the number of mounts on a directory.
func mounts(t *testing.T, dir string) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Fields(line)[4] == dir {
			n++
		}
	}
	return n
}

func TestMountAnchorTwiceMountsOnce(t *testing.T) {
	l := anchored(t)
	for range 2 {
		if err := l.MountAnchor(); err != nil {
			t.Fatal(err)
		}
		if n := mounts(t, l.Anchor()); n != 1 {
			t.Fatalf("%d mounts", n)
		}
	}
	if err := l.CheckAnchor(); err != nil {
		t.Error(err)
	}
	if err := l.Create(); err != nil { // the hook calls Create at every start
		t.Error(err)
	}
	for i, want := range []bool{true, false} {
		if unmounted, err := l.UnmountAnchor(); err != nil || unmounted != want {
			t.Errorf("unmount %d: %v, %v", i, unmounted, err)
		}
	}
	if n := mounts(t, l.Anchor()); n != 0 {
		t.Errorf("%d mounts after the end", n)
	}
}

// A runtime can make its copy of the mount writable, but the copy still holds no file.
func TestMountAnchorWritableCopyHoldsNoFile(t *testing.T) {
	l := anchored(t)
	if err := l.MountAnchor(); err != nil {
		t.Fatal(err)
	}
	bound := filepath.Join(l.Root, "bound")
	if err := errors.Join(os.Mkdir(bound, 0o755), unix.Mount(l.Anchor(), bound, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(bound, unix.MNT_DETACH) })
	if err := unix.Mount("", bound, "", unix.MS_REMOUNT|unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{l.Anchor(), bound} {
		for call, err := range map[string]error{
			"mkdir": os.Mkdir(filepath.Join(dir, "x"), 0o755), "open": os.WriteFile(filepath.Join(dir, "x"), nil, 0o600),
			"mknod":   unix.Mknod(filepath.Join(dir, "x"), unix.S_IFCHR|0o666, 0x103),
			"symlink": os.Symlink("/", filepath.Join(dir, "x")),
		} {
			if err == nil {
				t.Errorf("%s in %s succeeded", call, dir)
			}
		}
	}
}

func TestMountAnchorRemovesFilesOfEarlierReleases(t *testing.T) {
	l := anchored(t)
	if err := os.MkdirAll(filepath.Join(l.Anchor(), strings.Repeat("d/", 80)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := l.MountAnchor(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.UnmountAnchor(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(l.Anchor()); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

func TestCheckAnchorRefusesOtherDirectories(t *testing.T) {
	const flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, c := range []struct {
		name, options string
		flags         uintptr
		errorIs       func(l Layout, err error) bool
	}{
		{"directory", "", 0, func(_ Layout, err error) bool { return errors.Is(err, errNotMount) }},
		{"writable", "nr_inodes=1", 0, func(_ Layout, err error) bool { return errors.Is(err, errWritableMount) }},
		{"100 inodes", "nr_inodes=100", flags, func(_ Layout, err error) bool {
			e, ok := errors.AsType[*inodesError](err)
			return ok && e.inodes == 100
		}},
		{"owner", "nr_inodes=1,uid=65534", flags, func(l Layout, err error) bool {
			e, ok := errors.AsType[*OwnerError](err)
			return ok && *e == OwnerError{l.Anchor(), 65534}
		}},
		{"proc", "", flags, func(_ Layout, err error) bool {
			e, ok := errors.AsType[*mountTypeError](err)
			return ok && e.magic == unix.PROC_SUPER_MAGIC
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := anchored(t)
			switch {
			case c.options != "":
				if err := unix.Mount("x", l.Anchor(), "tmpfs", c.flags, c.options); err != nil {
					t.Fatal(err)
				}
			case c.flags != 0:
				if err := unix.Mount("x", l.Anchor(), "proc", c.flags, ""); err != nil {
					t.Fatal(err)
				}
			}
			if c.flags != 0 || c.options != "" {
				t.Cleanup(func() { unix.Unmount(l.Anchor(), unix.MNT_DETACH) })
			}
			if err := l.CheckAnchor(); !c.errorIs(l, err) {
				t.Errorf("%v", err)
			}
			if unmounted, err := l.UnmountAnchor(); unmounted || err != nil { // another program's mount stays
				t.Errorf("unmounted: %v, %v", unmounted, err)
			}
			if err := errors.Join(l.MountAnchor(), l.CheckAnchor()); err != nil { // the remedy
				t.Error(err)
			}
			if _, err := l.UnmountAnchor(); err != nil {
				t.Error(err)
			}
		})
	}
}

// hiddenRoot is the variable with the root for the child process of
// TestMountAnchorHiddenFromProcess1Fails.
const hiddenRoot = "PEERLANE_TEST_HIDDEN_ROOT"

func TestMountAnchorHiddenFromProcess1Fails(t *testing.T) {
	if root := os.Getenv(hiddenRoot); root != "" {
		fmt.Printf("MountAnchor: %v\n", New(root).MountAnchor())
		return
	}
	l := anchored(t)
	run := func(between ...string) string {
		// Process 1 is the shell, which does not execute the last command in place.
		args := append(
			[]string{"--pid", "--mount", "--fork", "--mount-proc", "sh", "-c", `"$@"; exit $?`, "sh"},
			between...)
		cmd := exec.Command("unshare", append(args, os.Args[0], "-test.run=^"+t.Name()+"$")...)
		cmd.Env = append(os.Environ(), hiddenRoot+"="+l.Root)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return string(out)
	}
	if out := run("unshare", "--mount", "--propagation", "private"); !strings.Contains(
		out,
		"not in that of process 1",
	) {
		t.Error(out)
	}
	if out := run(); !strings.Contains(out, "MountAnchor: <nil>") {
		t.Error(out)
	}
}

func TestAnchorCommandNamesRootOfLayout(t *testing.T) {
	for root, want := range map[string]string{"/": "peerlane cdi anchor", "/r": "peerlane --root /r cdi anchor"} {
		if got := New(root).AnchorCommand(); got != want {
			t.Errorf("%s: %q, want %q", root, got, want)
		}
	}
}

func TestHasDeviceReadsThirdField(t *testing.T) {
	const mounts = "x\n\n1 2\n22 1 0:20 / /sys rw - sysfs sysfs rw\n23 1 0:21\n"
	for device, want := range map[string]bool{"0:20": true, "0:21": true, "0:22": false, "1": false, "": false} {
		if got := hasDevice(mounts, device); got != want {
			t.Errorf("%q: %t", device, got)
		}
	}
}

func TestAnchorOperationsCloseDirectories(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes files too
	l := anchored(t)
	for i, operation := range []func() error{l.MountAnchor, l.MountAnchor, l.CheckAnchor,
		func() error { _, err := l.UnmountAnchor(); return err }, l.EmptyAnchor} {
		if err := operation(); err != nil {
			t.Errorf("operation %d: %v", i, err)
		}
		links, err := filepath.Glob("/proc/self/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, l.Root) { // otherwise closed meanwhile
				t.Errorf("operation %d leaves %s open", i, to)
			}
		}
	}
}

// A kernel without the label's policy mounts the anchor without a label.
func TestMountAnchorWithRefusedLabelMounts(t *testing.T) {
	l := anchored(t)
	before := selinuxFile
	defer func() { selinuxFile = before }()
	open := func() *os.File {
		dir, err := os.Open(l.Anchor())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dir.Close() })
		return dir
	}
	selinuxFile = filepath.Join(l.Root, "enforce")
	if got := selinuxLabel(open()); got != "" {
		t.Errorf("without SELinux: %q", got)
	}
	if err := os.WriteFile(selinuxFile, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(before); err != nil {
		if got := selinuxLabel(open()); got != "" {
			t.Errorf("without a label: %q", got)
		}
	}
	const label = "system_u:object_r:peerlane_t:s0"
	if err := unix.Setxattr(l.Anchor(), "security.selinux", []byte(label+"\x00"), 0); err != nil {
		t.Fatalf("set a label: %v", err)
	}
	if got := selinuxLabel(open()); got != label {
		t.Errorf("%q, want %q", got, label)
	}
	if err := errors.Join(l.MountAnchor(), l.CheckAnchor()); err != nil {
		t.Error(err)
	}
}

func TestMountsAnchorAsRootOfHostOnly(t *testing.T) {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(strings.Fields(string(text)), " ") == "0 0 4294967295"
	if got := InUserNamespace(); got == all {
		t.Errorf("in a user namespace: %t, with the map %q", got, text)
	}
	if got := MountsAnchor(); got != (all && os.Geteuid() == 0) {
		t.Errorf("mounts the anchor: %t, as uid %d with the map %q", got, os.Geteuid(), text)
	}
}
