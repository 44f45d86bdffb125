package libpeerlane_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/launch"
)

// Errors of the library's calls. F_GET_SEALS of the relay's memory cannot fail.
var errnosOfCalls = map[string][]unix.Errno{
	"socket":     {unix.EMFILE, unix.ENFILE, unix.ENOBUFS},
	"connect":    {unix.EAGAIN, unix.ECONNREFUSED, unix.ENOMEM},
	"setsockopt": {unix.ENOMEM},
	"sendmsg":    {unix.ENOBUFS, unix.ENOMEM, unix.EINTR},
	"recvmsg":    {unix.ENOMEM, unix.EINTR},
	"mmap":       {unix.ENOMEM, unix.EAGAIN, unix.ENFILE},
	"eventfd":    {unix.EMFILE, unix.ENFILE, unix.ENOMEM},
	"poll":       {unix.ENOMEM, unix.EINTR},
}

// Every call of the library that can fail fails once per possible error: the program is told the
// cause, in time, the next session works, and nothing is left behind.
//
// PEERLANE_FAULTS=all tries every call of a name; the default is a call per name, with a single
// error.
func TestLibraryCallFaultsReturnErrors(t *testing.T) {
	h := newHost(t)
	socket := h.relay("a", launch.RouteStaged, 1, 0)
	path := program(t, "tests", "faults", plain)
	p := start(t, path, socket, devices[0].UUID, "-", "0", "0")
	p.line()
	counted := p.line()
	p.end()
	t.Logf("calls of a session: %s", counted)
	all := os.Getenv("PEERLANE_FAULTS") == "all"
	met, tried := 0, 0
	for _, word := range strings.Fields(counted) {
		call, text, _ := strings.Cut(word, "=")
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		for after := range n {
			if !all && after != n/2 {
				continue
			}
			for i, errno := range errnosOfCalls[call] {
				if !all && i != after%len(errnosOfCalls[call]) {
					continue
				}
				tried++
				if fault(t, path, socket, call, after, errno) {
					met++
				}
			}
		}
	}
	t.Logf("%d faults, of which %d were met", tried, met)
	if met < 5 {
		t.Errorf("%d faults were met", met)
	}
}

// fault runs a program with a fault, if the call occurs.
func fault(t *testing.T, path, socket, call string, after int, errno unix.Errno) (met bool) {
	t.Helper()
	p := start(t, path, socket, devices[0].UUID, call, fmt.Sprint(after), fmt.Sprint(int(errno)))
	var rounds [3]struct{ status, files, maps, struck int }
	var told [3]string
	for i := range rounds {
		r, line := &rounds[i], p.line()
		if n, err := fmt.Sscanf(line, "%d %d %d %d", &r.status, &r.files, &r.maps, &r.struck); n != 4 {
			t.Fatalf("%q: %v", line, err)
		}
		told[i] = strings.Join(strings.Fields(line)[4:], " ")
	}
	p.end()
	name := fmt.Sprintf("%s:after=%d:%s", call, after, unix.ErrnoName(errno))
	before, with, next := rounds[0], rounds[1], rounds[2]
	switch {
	case before.status != 0:
		t.Errorf("%s: before it: %s", name, told[0])
	case with.status != 0 && (with.struck == 0 || errno == unix.EINTR):
		t.Errorf("%s: that is no error: %s", name, told[1])
	case with.status != 0 && !strings.Contains(strings.ToLower(told[1]), errno.Error()):
		t.Errorf("%s: the program is not told of it: %s", name, told[1])
	}
	if next.status != 0 {
		t.Errorf("%s: the next session fails: %s", name, told[2])
	}
	if next.files > before.files || next.maps > before.maps || with.files > before.files || with.maps > before.maps {
		t.Errorf(
			"%s: it leaks: descriptors %d, %d, %d and mappings %d, %d, %d",
			name,
			before.files,
			with.files,
			next.files,
			before.maps,
			with.maps,
			next.maps,
		)
	}
	return with.struck != 0
}
