package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bench"
	"github.com/peerlane/peerlane/relay/launch"
)

// benches has the files of two separate hosts with a shared cluster key, for one bench per host.
type benches struct {
	*networks
	roots [2]string
	temp  string // for directories of both benches; the name is short, for socket paths
}

func newBenches(t *testing.T) *benches {
	t.Helper()
	root := newRoot(t)
	b := &benches{networks: newNetworks(t), temp: root}
	for i := range b.roots {
		b.roots[i] = filepath.Join(root, string(rune('a'+i)))
		b.mustWrite(filepath.Join(b.roots[i], "etc/peerlane/config.toml"), "[network]\ninterfaces = \"="+b.cables[i]+"\"\n")
	}
	b.must(filepath.Join(binaries, "peerlane"), "key", "generate", "--root", b.roots[0])
	key, err := os.ReadFile(filepath.Join(b.roots[0], "etc/peerlane/cluster.key"))
	if err != nil {
		t.Fatal(err)
	}
	b.mustWrite(filepath.Join(b.roots[1], "etc/peerlane/cluster.key"), string(key))
	if err := os.Chmod(root, 0o711); err != nil { // relays traverse the directory
		t.Fatal(err)
	}
	return b
}

func (b *benches) mustWrite(file, text string) {
	b.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
}

// benchProcess is a running peerlane bench on one host; said receives each line of progress until
// the end.
type benchProcess struct {
	*exec.Cmd
	out, errors bytes.Buffer
	lines       chan string
}

func (b *benches) start(host int, arguments ...string) *benchProcess {
	b.Helper()
	p := &benchProcess{lines: make(chan string, 1000)}
	arguments = append([]string{"--net=/run/netns/" + b.names[host], filepath.Join(binaries, "peerlane"), "bench",
		"--gpus", "simulated", "--root", b.roots[host], "-o", "json"}, arguments...)
	p.Cmd = exec.CommandContext(context.Background(), "nsenter", arguments...)
	p.Env = append(os.Environ(), "TMPDIR="+b.temp)
	p.Stdout = &p.out
	in, out, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	p.Stderr = out
	err = p.Start()
	out.Close()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if p.ProcessState == nil {
			_ = p.Process.Kill() // may have ended
			_ = p.Wait()
		}
		in.Close()
	})
	go func() {
		defer close(p.lines)
		text, _ := io.ReadAll(io.TeeReader(in, &lineWriter{p.lines})) // ends with the process
		p.errors.Write(text)
	}()
	return p
}

// lineWriter is a writer that passes lines on.
type lineWriter struct{ to chan<- string }

func (s *lineWriter) Write(text []byte) (int, error) {
	for line := range strings.Lines(string(text)) {
		select {
		case s.to <- line:
		default: // no test waits for that many lines
		}
	}
	return len(text), nil
}

// await waits for a line of the process.
func (b *benches) await(p *benchProcess, what string) {
	b.Helper()
	for line := range p.lines {
		if strings.Contains(line, what) {
			return
		}
	}
	b.Fatalf("it never said %q: %s", what, p.errors.String())
}

// ended waits for the end of the process, and returns the output and the error.
func (b *benches) ended(p *benchProcess) (stderr string, err error) {
	for range p.lines {
	}
	err = p.Wait()
	return p.errors.String(), err
}

// Two benches in separate network namespaces measure a lane over the network, and both return the
// result.
func TestBenchBetweenHostsReturnsBothResults(t *testing.T) {
	b := newBenches(t)
	listening := b.start(1, "--listen", b.addresses[1]+":20500")
	b.await(listening, "listening at")
	connecting := b.start(0, "--connect", b.addresses[1]+":20500", "--transport", "tcp", "--sizes", "8,1MiB", "--depths",
		"1,4", "--duration", "10ms")
	var reports [2]*bench.Report
	for i, p := range []*benchProcess{connecting, listening} {
		stderr, err := b.ended(p)
		if err != nil {
			t.Fatalf("host %d: %v: %s", i, err, stderr)
		}
		if reports[i], err = bench.Read(&p.out); err != nil {
			t.Fatalf("host %d: %v: %s", i, err, stderr)
		}
	}
	one, err := json.Marshal(reports[0])
	if err != nil {
		t.Fatal(err)
	}
	if other, err := json.Marshal(reports[1]); err != nil || !bytes.Equal(one, other) {
		t.Errorf("result of one host: %s; of the other: %s (%v)", one, other, err)
	}
	r := reports[0]
	if !r.Simulated || len(r.Hosts) != 2 {
		t.Errorf("the result is of %+v, simulated: %v", r.Hosts, r.Simulated)
	}
	// Two sizes at two depths in each direction, and 8 bytes; and the hand-off.
	if len(r.Rows) != 11 {
		t.Errorf("%d rows: %+v", len(r.Rows), r.Rows)
	}
	for _, row := range r.Rows {
		if row.Transport != launch.TransportTCP || row.Value <= 0 || row.Times == nil {
			t.Errorf("a row is %+v", row)
		}
		if strings.HasPrefix(row.What, "hand-off") {
			continue
		}
		if ratio, ok := r.Ratio(row); !ok || ratio <= 0 || !strings.HasPrefix(row.Baseline,
			"plain TCP "+row.What[:len("A to B")]) {
			t.Errorf("%s, %d bytes, is %v of %q", row.What, row.Size, ratio, row.Baseline)
		}
		from := map[bool]int{true: 0, false: 1}[strings.HasPrefix(row.What, "A to B")]
		if !strings.Contains(row.Note, b.addresses[1-from]) || !strings.Contains(row.Note, b.cables[from]) {
			t.Errorf("the path of %s is %q", row.What, row.Note)
		}
	}
	b.leftNothing()
}

// An interrupted bench ends the other bench, which reports the cause; no files remain.
func TestBenchInterruptedEndsBothSides(t *testing.T) {
	b := newBenches(t)
	listening := b.start(1, "--listen", b.addresses[1]+":20500")
	b.await(listening, "listening at")
	connecting := b.start(0, "--connect", b.addresses[1]+":20500", "--transport", "tcp", "--sizes", "1MiB", "--duration",
		"1m")
	b.await(connecting, "plain TCP")
	if err := listening.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if stderr, err := b.ended(connecting); err == nil || !strings.Contains(stderr, "disconnected") ||
		connecting.out.Len() > 0 {
		t.Errorf("the bench that had connected ends with %v: %s%s", err, stderr, &connecting.out)
	}
	if stderr, err := b.ended(listening); err == nil {
		t.Errorf("the bench that was ended is content: %s", stderr)
	}
	b.leftNothing()
}

// leftNothing requires that the benches have removed their directories.
func (b *benches) leftNothing() {
	b.Helper()
	left, err := filepath.Glob(filepath.Join(b.temp, "plbench-*"))
	if err != nil || len(left) > 0 {
		b.Errorf("%s is left (%v)", left, err)
	}
}

// A bench that is killed at any step ends the other bench within a minute. The other bench reports
// the cause.
func TestBenchKilledEndsOtherSide(t *testing.T) {
	if !networkSoak() {
		t.Skip("it takes minutes; make soak-network runs it")
	}
	arguments := []string{"--transport", "tcp", "--sizes", "8,1MiB", "--depths", "1,4", "--duration", "200ms"}
	for killed, who := range []string{"the one that connects", "the one that listens"} {
		t.Run(who, func(t *testing.T) {
			b := newBenches(t)
			for step, over := 1, false; !over; step++ {
				at := fmt.Sprintf("%s:%d", b.addresses[1], 20500+step) // the former port may be in TIME_WAIT
				listening := b.start(1, "--listen", at)
				b.await(listening, "listening at")
				connecting := b.start(0, append([]string{"--connect", at}, arguments...)...)
				if killed == 0 {
					b.await(listening, "has connected") // earlier the listener waits for another connection
				}
				both := []*benchProcess{connecting, listening}
				last := ""
				for range step {
					line, more := <-both[killed].lines
					if over = !more; over {
						break
					}
					last = line
				}
				if over {
					break
				}
				if err := both[killed].Process.Kill(); err != nil {
					t.Fatal(err)
				}
				begun := time.Now()
				other := both[1-killed]
				late := time.AfterFunc(patience, func() { _ = other.Process.Signal(syscall.SIGTERM) })
				stderr, err := b.ended(other)
				if !late.Stop() {
					t.Errorf("killed after %q: the other bench ended only by a signal, after %v: %s", last, time.Since(begun), stderr)
				}
				if err == nil || !strings.Contains(stderr, "disconnected") &&
					!strings.Contains(stderr, "no peerlane bench --listen answers") {
					t.Errorf("killed after %q: the other bench ended with %v: %s", last, err, stderr)
				}
				t.Logf("after %q: %v", strings.TrimSpace(last), time.Since(begun).Round(time.Millisecond))
			}
		})
	}
}
