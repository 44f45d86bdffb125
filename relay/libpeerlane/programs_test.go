package libpeerlane_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/softhost"
)

// kinds are how the C programs run: as shipped, and with sanitizers.
var kinds = map[string]kind{"as shipped": plain, "address sanitizer": address, "thread sanitizer": thread}

// kindOf tells of the programs that eachKind has built.
var kindOf = map[string]kind{}

// eachKind runs a test of a C program per build that the compiler supports.
func eachKind(t *testing.T, name string, f func(t *testing.T, path string)) {
	for words, k := range kinds {
		t.Run(words, func(t *testing.T) {
			if why := lacks(t, k); why != "" {
				t.Skipf("the C compiler has no -fsanitize=%s: %s", k, why)
			}
			path := program(t, "tests", name, k)
			kindOf[path] = k
			f(t, path)
		})
	}
}

// lacks returns the reason that a program of that kind cannot be built or run here, "" if possible.
func lacks(t *testing.T, k kind) string {
	t.Helper()
	if k == plain {
		return ""
	}
	library(t)
	dir := once(t, "sanitizer-"+string(k), func(dir string) error {
		source, binary := filepath.Join(dir, "empty.c"), filepath.Join(dir, "empty")
		if err := os.WriteFile(source, []byte("int main(void) { return 0; }\n"), 0o644); err != nil {
			return err
		}
		for _, c := range []*exec.Cmd{exec.Command("cc", "-fsanitize="+string(k), "-o", binary, source),
			exec.Command(binary)} {
			if out, err := c.CombinedOutput(); err != nil {
				return os.WriteFile(filepath.Join(dir, "lacks"), fmt.Appendf(nil, "%v: %s", err, out), 0o644)
			}
		}
		return nil
	})
	why, err := os.ReadFile(filepath.Join(dir, "lacks"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(why)
}

func gpus(from, to int) (list []string) {
	for i := from; i < to; i++ {
		list = append(list, devices[i].UUID)
	}
	return list
}

func numbers(n int) (list []int) {
	for i := range n {
		list = append(list, i)
	}
	return list
}

func TestEightThreadsShareOneSession(t *testing.T) {
	eachKind(t, "threads", func(t *testing.T, path string) {
		a, b := newHost(t).pair(launch.RouteStaged, numbers(clients)...)
		start(t, path, append([]string{a, b}, gpus(0, clients)...)...).end()
	})
}

func TestForkedChildHasNoSession(t *testing.T) {
	eachKind(t, "fork", func(t *testing.T, path string) {
		a, b := newHost(t).pair(launch.RouteDirect, 0)
		start(t, path, a, b, devices[0].UUID).end()
	})
}

// --- a relay that can die -------------------------------------------------------

// roleConfig is the configuration of a relay in a separate process.
const roleConfig = "PEERLANE_TEST_CONFIG"

func playRelay() int {
	var c launch.Config
	err := json.Unmarshal([]byte(os.Getenv(roleConfig)), &c)
	var clients, peers *net.UnixListener
	at := func(name string) *net.UnixListener {
		if err != nil {
			return nil
		}
		path := filepath.Join(c.Peers, name)
		os.Remove(path) // of a killed relay
		var l *net.UnixListener
		l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		return l
	}
	clients, peers = at(c.Container), at(c.Generation+".sock")
	var r *relay.Relay
	if err == nil {
		r, err = relay.New(clients, peers, -1)
	}
	if err == nil {
		err = errors.Join(softhost.Join(r.Secrets), r.Configure(c))
	}
	if err == nil {
		fmt.Println("ready")
		err = r.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// process starts a relay in a separate process; the returned program is the relay, with the socket
// of relay for clients.
func (h *host) process(c launch.Config) *process {
	h.Helper()
	text, err := json.Marshal(c)
	if err != nil {
		h.Fatal(err)
	}
	h.Setenv(roleVariable, "relay")
	h.Setenv(roleConfig, string(text))
	defer os.Unsetenv(roleVariable)
	exe, err := os.Executable()
	if err != nil {
		h.Fatal(err)
	}
	p := start(h.T, exe)
	if line := p.line(); line != "ready" {
		h.Fatalf("the relay says %q", line)
	}
	return p
}

func (p *process) kill() {
	p.Helper()
	if err := p.Process.Kill(); err != nil {
		p.Fatal(err)
	}
	p.Wait()
	p.waited = true
}

func TestTimelinesAfterRelayDeathAreReleased(t *testing.T) {
	eachKind(t, "timelines", func(t *testing.T, path string) {
		h := newHost(t)
		a := h.relay("a", launch.RouteDirect, 0, 0)
		config := h.config("b", launch.RouteDirect, 1, 1)
		b := h.process(config)
		p := start(t, path, a, filepath.Join(h.dir, "b"), devices[0].UUID, devices[1].UUID)
		p.demand("kill b")
		time.Sleep(100 * time.Millisecond) // so that the stream waits, mostly
		b.kill()
		p.demand("start b")
		h.process(config)
		p.say("it is there")
		p.demand("done")
		p.end()
	})
}

func TestCapturedGraphsAfterRelayDeathAreReleased(t *testing.T) {
	eachKind(t, "handover", func(t *testing.T, path string) {
		for _, route := range routes {
			h := newHost(t)
			a := h.relay("a", route, 0, 0)
			b := h.process(h.config("b", route, 1, 1))
			p := start(t, path, a, filepath.Join(h.dir, "b"), devices[0].UUID, devices[1].UUID)
			p.demand("kill b")
			time.Sleep(100 * time.Millisecond) // so that the streams wait, mostly
			b.kill()
			p.demand("done")
			p.end()
		}
	})
}

func TestInvalidArgumentsAreRefused(t *testing.T) {
	eachKind(t, "arguments", func(t *testing.T, path string) {
		a := newHost(t).relay("a", launch.RouteDirect, 0, 0)
		start(t, path, a, devices[0].UUID).end()
	})
}

func TestMemoryOfEachKindTransfers(t *testing.T) {
	eachKind(t, "kinds", func(t *testing.T, path string) {
		for _, route := range routes {
			h := newHost(t)
			h.ipc = []string{"a"}
			a, b := h.pair(route, 0, 1)
			start(t, path, a, b, devices[0].UUID, devices[1].UUID).end()
		}
	})
}

func TestClientCopiesThroughStagingMemory(t *testing.T) {
	eachKind(t, "copies", func(t *testing.T, path string) {
		for _, route := range routes {
			h := newHost(t)
			h.copying = []string{"a", "b"}
			a, b := h.relay("a", route, 0, 0), h.relay("b", route, 1, 1)
			start(t, path, a, b, devices[0].UUID, devices[1].UUID, h.relay("c", route, 0, 0)).end()
		}
	})
}

func TestIPCEventsDelaySends(t *testing.T) {
	eachKind(t, "events", func(t *testing.T, path string) {
		for _, route := range routes {
			h := newHost(t)
			h.copying, h.events = []string{"a"}, []string{"a"}
			a, b := h.pair(route, 0, 1)
			start(t, path, a, b, devices[0].UUID, devices[1].UUID).end()
		}
	})
}

func TestHotPathAllocatesNothingAndMakesNoSystemCall(t *testing.T) {
	a, b := newHost(t).pair(launch.RouteDirect, 0)
	p := start(t, program(t, "tests", "hot", plain), a, b, devices[0].UUID)
	p.demand("ready")
	p.end()
}
