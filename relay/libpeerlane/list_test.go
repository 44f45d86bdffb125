package libpeerlane_test

import (
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestCListOperationsMoveEachEntry(t *testing.T) {
	for _, k := range []kind{plain, address} { // it has one thread
		if why := lacks(t, k); why != "" {
			t.Logf("without -fsanitize=%s: %s", k, why)
			continue
		}
		for _, route := range []string{launch.RouteDirect, launch.RouteStaged} {
			a, b := newHost(t).pair(route, 0, 1)
			start(t, program(t, "tests", "lists", k), a, b, devices[0].UUID, devices[1].UUID).end()
		}
	}
}

// Invalid list memory, a relay without lists, and impossible ends of lists.
func TestInvalidListMemoryAnswersAreRefused(t *testing.T) {
	const bytes = wire.MaxListEntries * uint64(unsafe.Sizeof(wire.ListEntryLayout{}))
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	failed := []call{{"list", wire.StatusOK, ""}, {"wait", wire.StatusOutOfRange, ""}}
	for name, c := range map[string]struct {
		older bool
		bytes uint64
		seals int
		end   wire.Completion
		want  []call
		entry string
	}{
		"good": {bytes: bytes, seals: sealed, end: wire.Completion{Length: 8,
			Status: uint32(wire.StatusOutOfRange), Entry: 1}, want: failed, entry: "entry 1"},
		"of an older relay": {older: true, want: []call{{"list", wire.StatusVersion, "install the same release"}}},
		"less": {bytes: bytes - 48, seals: sealed,
			want: []call{{"list", wire.StatusMalformed, "answered for list memory"}}},
		"that can shrink": {bytes: bytes, want: []call{{"list", wire.StatusMalformed, "not sealed"}}},
		"an entry that is none": {bytes: bytes, seals: sealed, end: wire.Completion{Status: 12, Entry: 2},
			want: []call{{"list", wire.StatusOK, ""}, {"wait", wire.StatusBadRing, "broken"}}, entry: "entry 9"},
		"too many bytes": {bytes: bytes, seals: sealed, end: wire.Completion{Length: 17},
			want: []call{{"list", wire.StatusOK, ""}, {"wait", wire.StatusBadRing, "broken"}}, entry: "entry 9"},
	} {
		t.Run(name, func(t *testing.T) {
			hostile(t, "lists", func(f *fake) {
				f.welcome(func(w *wire.Welcome, _ *[]int) {
					if c.older {
						w.Version = wire.ListVersion - 1
					}
				})
				defer f.free()
				f.lists(c.bytes, c.seals, c.end, c.entry != "")
			}, func(p *process) {
				p.calls(append([]call{{"dial", wire.StatusOK, ""}}, c.want...)...)
				if c.entry != "" {
					p.demand(c.entry)
				}
				p.demand("closed")
			})
		})
	}
}

// lists answers a request for list memory, and ends the list that is posted then, if any.
func (f *fake) lists(bytes uint64, seals int, end wire.Completion, posted bool) {
	for m, sequence := f.hear(); m != nil; m, sequence = f.hear() {
		if _, asks := m.(*wire.ListMemory); !asks {
			f.Errorf("the client sends a %T", m)
			return
		}
		fd, err := unix.MemfdCreate("lists", unix.MFD_ALLOW_SEALING)
		if err == nil {
			defer unix.Close(fd)
			err = unix.Ftruncate(fd, int64(bytes))
		}
		if err == nil && seals != 0 {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		if err == nil {
			err = f.Send(&wire.ListMemoryMade{Bytes: bytes}, sequence, fd)
		}
		if err != nil {
			f.Error(err)
			return
		}
		for limit := testutil.Begin(); posted && !limit.Over(); time.Sleep(time.Millisecond) {
			if d, ok, err := f.ring.Take(); err != nil {
				f.Error(err)
				return
			} else if ok {
				end.Cookie = d.Cookie
				f.ring.Complete(end)
				_, _ = unix.Write(f.pipe, []byte{1})
				posted = false
			}
		}
	}
}
