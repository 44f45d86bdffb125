package hook_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/internal/testutil"
)

// attaches is the number of attaches of TestAttachDuringSwapsOfParentsStaysOnAnchor; PEERLANE_HOSTILE_SWAPS
// overrides the number.
const attaches = 250

// During an attach, a process swaps the mount point and the parent folder for links to the host,
// and back, without pause. The socket directory is mounted on the anchor or nowhere.
func TestAttachDuringSwapsOfParentsStaysOnAnchor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mount namespaces")
	}
	rounds := attaches
	if text := os.Getenv("PEERLANE_HOSTILE_SWAPS"); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatalf("PEERLANE_HOSTILE_SWAPS: %v", err)
		}
	}
	h := newSharedHost(t)
	rootfs, outside := filepath.Join(h.layout.Root, "rootfs"), filepath.Join(h.layout.Root, "outside")
	climb := strings.Repeat("../", 20) + outside
	for _, err := range []error{
		os.MkdirAll(filepath.Join(rootfs, "run/peerlane"), 0o755), os.MkdirAll(filepath.Join(outside, "peerlane"), 0o755),
		// Targets of the links inside the root file system.
		os.MkdirAll(filepath.Join(rootfs, outside, "peerlane"), 0o755),
		os.Symlink(climb, filepath.Join(rootfs, "swap")), os.Symlink(climb, filepath.Join(rootfs, "run/swap")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	ready := filepath.Join(h.layout.Root, "ready")
	init := exec.Command(
		"unshare",
		"-m",
		"--propagation",
		"private",
		"sh",
		"-c",
		`mount --bind "$0" "$1" && touch "$2" && exec sleep 1000000`,
		h.layout.Anchor(),
		filepath.Join(rootfs, "run/peerlane"),
		ready,
	)
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(init); h.gone(t) })
	testutil.Succeeds(t, "the container", func() error { _, err := os.Stat(ready); return err })
	g := h.launch(t, "c", init.Process.Pid, "")
	before := h.mounts(t)

	s := newSwapper(
		t,
		filepath.Join(rootfs, "run", "peerlane"),
		filepath.Join(rootfs, "run", "swap"),
		filepath.Join(rootfs, "run"),
		filepath.Join(rootfs, "swap"),
	)
	attached, refused := 0, map[string]int{}
	for range rounds {
		err := hook.Attach(h.layout, g, rootfs)
		if err == nil {
			attached++
		} else {
			refused[err.Error()]++
		}
		// Find the mount of the socket directory in the container.
		mounts, readErr := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", init.Process.Pid))
		if readErr != nil {
			t.Fatal(readErr)
		}
		var anchor, place, parent string
		count := 0
		for line := range strings.Lines(string(mounts)) {
			f := strings.Fields(line)
			switch {
			case strings.Contains(line, "peerlane-anchor") && f[4] != h.layout.Anchor():
				anchor = f[0]
			case strings.HasSuffix(f[3], "/run/peerlane/sockets/"+g.ID):
				place, parent = f[4], f[1]
				count++
			}
		}
		if err == nil && (count != 1 || parent != anchor) || err != nil && count > 0 {
			t.Fatalf(
				"Attach: %v; the directory is mounted %d times, at %q on mount %s, and the anchor is mount %s:\n%s",
				err,
				count,
				place,
				parent,
				anchor,
				mounts,
			)
		}
		if after := h.mounts(t); after != before {
			t.Fatalf("mounts of the host were\n%sand are\n%s", before, after)
		}
		if err == nil {
			s.still(func() {
				c := exec.Command(
					"nsenter",
					"--mount",
					"--target",
					fmt.Sprint(init.Process.Pid),
					"umount",
					filepath.Join(rootfs, "run/peerlane"),
				)
				if out, err := c.CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			})
		}
	}
	swaps := s.end()
	t.Logf("%d of %d attached, %d swaps; refused: %v", attached, rounds, swaps, refused)
	if attached == 0 || swaps < rounds {
		t.Errorf("%d of %d attached during %d swaps: that is no race", attached, rounds, swaps)
	}
	for path, want := range map[string]int{outside: 1, filepath.Join(outside, "peerlane"): 0} {
		if entries, err := os.ReadDir(path); err != nil || len(entries) != want {
			t.Errorf("%s holds %v, %v", path, entries, err)
		}
	}
}

// swapper exchanges pairs of names without pause.
type swapper struct {
	t     *testing.T
	pairs [][2]string
	mu    sync.Mutex // held during a swap
	over  bool
	count int
	done  chan struct{}
}

func newSwapper(t *testing.T, names ...string) *swapper {
	s := &swapper{t: t, done: make(chan struct{})}
	for ; len(names) > 0; names = names[2:] {
		s.pairs = append(s.pairs, [2]string{names[0], names[1]})
	}
	go s.run()
	t.Cleanup(func() { s.end() })
	return s
}

// run exchanges the pairs in turn, and exchanges back after a moment.
func (s *swapper) run() {
	defer close(s.done)
	for i := 0; ; i++ {
		s.mu.Lock()
		over := s.over
		if !over {
			pair := s.pairs[i%len(s.pairs)]
			if err := swapAndBack(pair); err != nil {
				s.t.Errorf("swapping %v: %v", pair, err)
				over = true
			}
			s.count++
		}
		s.mu.Unlock()
		if over {
			return
		}
		// On a single processor, let the attach run.
		time.Sleep(time.Duration(rand.IntN(20)) * time.Microsecond)
	}
}

func exchange(pair [2]string) error {
	return unix.Renameat2(unix.AT_FDCWD, pair[0], unix.AT_FDCWD, pair[1], unix.RENAME_EXCHANGE)
}

// swapAndBack leaves the attach a moment in which the names are swapped.
func swapAndBack(pair [2]string) error {
	err := exchange(pair)
	if err == nil {
		time.Sleep(time.Duration(rand.IntN(20)) * time.Microsecond)
		err = exchange(pair)
	}
	return err
}

// still runs a function while no name is swapped.
func (s *swapper) still(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// end stops the swapper, and returns the number of swaps.
func (s *swapper) end() int {
	s.still(func() { s.over = true })
	<-s.done
	return s.count
}
