package integration_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/attack"
)

// spyTime is the time after a relay's execution in which a spy tries to trace the relay. The spy
// begins before the execution.
const spyTime = 200 * time.Millisecond

// spy looks for processes that become relays, takes the uid of each process, as a container with
// CAP_SETUID and the host's PID namespace can, and tries to trace the process for spyTime. It
// prints "spied" for each process, with the successful methods, and ends with its input.
func spy(arguments []string) error {
	relay := arguments[0]
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(done)
	}()
	emit(event{Kind: "spying"})
	seen := map[int]bool{}
	var attacks sync.WaitGroup
	defer attacks.Wait()
	for {
		select {
		case <-done:
			return nil
		default:
		}
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return err
		}
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err != nil || seen[pid] {
				continue
			}
			command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err != nil || len(command) == 0 {
				continue // the process has ended
			}
			_, after, confines := bytes.Cut(command, []byte("\x00--uid="))
			if !confines || !bytes.Contains(command, []byte("\x00"+relay+"\x00serve")) {
				continue
			}
			seen[pid] = true
			uid, _, _ := bytes.Cut(after, []byte{0})
			n, err := strconv.Atoi(string(uid))
			if err != nil || n == 0 {
				return fmt.Errorf("process %d has %q for a uid", pid, uid)
			}
			attacks.Go(func() {
				attack.OnThread(func() {
					methods := attack.Trace(pid, uint32(n), attack.AfterStart(pid, spyTime))
					emit(event{Kind: "spied", Error: strings.Join(methods, ", ")})
				})
			})
		}
	}
}

// A container with the host's PID namespace and CAP_SETUID, a capability of Docker's default, takes
// a relay's uid before the relay is executed, and cannot trace the relay: the kernel makes a
// program undumpable that its user may not read.
func TestRelayTracedDuringItsStartRefusesEachAttach(t *testing.T) {
	const starts = 4
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(self, "role", "spy", b.Config.Relay.Binary)
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(out)
			next := func() (s event) {
				if !lines.Scan() {
					return event{}
				}
				if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
					t.Errorf("the spy says %q", lines.Text())
				}
				return s
			}
			if s := next(); s.Kind != "spying" {
				t.Fatalf("the spy says %+v", s)
			}
			for range starts {
				c := b.start(b.lanes[0], "hold")
				c.next("hello")
				c.end()
			}
			if err := in.Close(); err != nil {
				t.Error(err)
			}
			spied := 0 // the spy may miss a relay on a busy host
			for s := next(); s.Kind != ""; s = next() {
				spied++
				if s.Kind != "spied" || s.Error != "" {
					t.Errorf("a process of the relay's uid can trace the relay: %+v", s)
				}
			}
			if err := cmd.Wait(); err != nil || spied == 0 {
				t.Errorf("the spy saw %d of %d relays start, %v", spied, starts, err)
			}
			t.Logf("the spy saw %d of %d relays start", spied, starts)
		})
	}
}

// The relays of the demo, of `make install` and of packages come from files that relays cannot
// read.
func TestRelayProgramIsUnreadableToRelays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are installed as root's")
	}
	dir := t.TempDir()
	bin := binaries
	// packaging/install installs everything or nothing; only the relay's mode matters here.
	built := t.TempDir()
	for _, name := range []string{"peerlane", "peerlane-runtime", "peerlane-hook", "peerlane-relay", "libpeerlane.so.0",
		"libnccl-net-peerlane.so"} {
		if err := os.WriteFile(filepath.Join(built, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	install := exec.Command("../packaging/install", built, dir, "/usr")
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, path := range []string{filepath.Join(bin, "peerlane-relay"),
		filepath.Join(dir, "usr/libexec/peerlane/peerlane-relay")} {
		info, err := os.Stat(path)
		if err != nil {
			t.Error(err)
		} else if mode := info.Mode(); mode != 0o711 {
			t.Errorf("%s has mode %v, want 0711", path, mode)
		}
	}
	text, err := os.ReadFile("../packaging/nfpm/peerlane.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if want := "dst: /usr/libexec/peerlane/peerlane-relay, file_info: {mode: 0711}"; !strings.Contains(string(text),
		want) {
		t.Errorf("packages do not have %q", want)
	}
}
