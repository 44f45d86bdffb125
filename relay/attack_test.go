package relay_test

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/softhost"
	"github.com/peerlane/peerlane/relay/wire"
)

// victim is a relay in a separate process, so that the test can measure its resources, and a
// well-behaved client.
type victim struct {
	t      *testing.T
	host   *host
	pid    int
	socket string
	log    string
	good   *client.Session

	sending, receiving *client.Connection
	memory             *memory
	before             taken
}

// taken counts the resources of a process.
type taken struct {
	files, threads int
	resident       uint64 // bytes
}

func playRelay() error {
	logrus.SetOutput(os.Stderr)
	var c launch.Config
	if err := json.Unmarshal([]byte(os.Getenv("PEERLANE_TEST_CONFIG")), &c); err != nil {
		return err
	}
	var listeners []*net.UnixListener
	for fd := uintptr(3); fd < 5; fd++ {
		l, err := net.FileListener(os.NewFile(fd, "listener"))
		if err != nil {
			return err
		}
		listeners = append(listeners, l.(*net.UnixListener))
		unix.CloseOnExec(int(fd))
	}
	if err := watchedFrom(5); err != nil {
		return err
	}
	r, err := relay.New(listeners[0], listeners[1], -1)
	if err != nil {
		return err
	}
	r.Patient(time.Minute)
	if err := softhost.Join(r.Secrets); err != nil {
		return err
	}
	if err := r.Configure(c); err != nil {
		return err
	}
	// It ends with the test.
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		r.Stop("the test is over")
	}()
	return r.Run()
}

// relayListeners are the sockets of a relay in a separate process, which outlive the relay, as a
// supervisor's sockets do.
func relayListeners(t *testing.T, paths ...string) []*os.File {
	t.Helper()
	var files []*os.File
	for _, path := range paths {
		l := listen(t, path)
		l.SetUnlinkOnClose(false)
		file, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		files = append(files, file)
	}
	return files
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// startRelay starts a relay in a separate process, which ends with its standard input. The start
// can be repeated with the same listeners.
func startRelay(c launch.Config, listeners []*os.File, log *os.File,
	environment ...string) (*exec.Cmd, io.Closer, error) {
	config, err := json.Marshal(c)
	if err != nil {
		return nil, nil, err
	}
	return startRole("relay", listeners, log, append(environment, "PEERLANE_TEST_CONFIG="+string(config))...)
}

func startRole(role string, files []*os.File, log *os.File, environment ...string) (*exec.Cmd, io.Closer, error) {
	cmd := exec.Command("/proc/self/exe")
	// The race detector makes a process wait for a second at the end.
	cmd.Env = append(append(os.Environ(), "PEERLANE_TEST_ROLE="+role, "GORACE=atexit_sleep_ms=0"), environment...)
	cmd.Stderr, cmd.ExtraFiles = log, files
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	return cmd, stdin, err
}

func newVictim(t *testing.T, change func(*launch.Config), environment ...string) *victim {
	t.Helper()
	h := newHost(t)
	v := &victim{t: t, host: h, socket: filepath.Join(h.dir, "v"), log: filepath.Join(t.TempDir(), "log")}
	id := hex.EncodeToString(random(t, 16))
	c := launch.Config{
		Generation: id, Container: "victim", Lanes: []launch.Lane{far(0, 1, "nic0")}, Route: launch.RouteDirect,
		Transport: launch.TransportAuto,
		Slots:     4, SlotBytes: 1 << 20, Peers: h.dir,
	}
	if change != nil {
		change(&c)
	}
	if c.Route == launch.RouteStaged {
		h.nic("nic0")
		environment = append(environment, h.withNICs(&c)...)
	}
	log, err := os.Create(v.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	listeners := relayListeners(t, v.socket, filepath.Join(h.dir, id+".sock"))
	defer closeFiles(listeners)
	cmd, stdin, err := startRelay(c, listeners, log, environment...)
	if err != nil {
		t.Fatal(err)
	}
	v.pid = cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		stdin.Close()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the relay ended with %v", err)
			}
		case <-testutil.After(time.Minute):
			t.Error("the relay does not end")
			_ = cmd.Process.Kill()
			<-ended
		}
		if text, err := os.ReadFile(v.log); err != nil || t.Failed() {
			t.Logf("its log (%v): %.8000s", err, text)
		}
	})
	v.good = attach(t, v.socket)
	v.memory = exported(t, v.good, 0, 4<<20)
	v.sending, v.receiving, _ = join(t, v.good, 0, v.good, 0)
	v.goesOn()
	v.before = v.takes()
	return v
}

// goesOn moves bytes in the session of the good client.
func (v *victim) goesOn() {
	v.t.Helper()
	const n = 1 << 20
	want := random(v.t, n)
	v.memory.write(0, want)
	receive, err := v.receiving.Receive(v.memory.Memory, 2*n, n)
	if err != nil {
		v.t.Fatal(err)
	}
	send, err := v.sending.Send(v.memory.Memory, 0, n)
	for _, op := range []*client.Operation{send, receive} {
		if moved, err := wait(v.t, op, err); err != nil || moved != n {
			v.t.Fatalf("the good client: %d bytes, %v", moved, err)
		}
	}
	if !bytes.Equal(v.memory.read(2*n, n), want) {
		v.t.Fatal("the good client has wrong bytes")
	}
}

// stopped does something while no thread of the relay runs.
func (v *victim) stopped(f func()) {
	v.t.Helper()
	if err := unix.Kill(v.pid, unix.SIGSTOP); err != nil {
		v.t.Fatal(err)
	}
	defer func() {
		if err := unix.Kill(v.pid, unix.SIGCONT); err != nil {
			v.t.Fatal(err)
		}
	}()
	for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", v.pid))
		if err != nil || len(threads) == 0 {
			v.t.Fatalf("%d threads: %v", len(threads), err)
		}
		running := 0
		for _, thread := range threads {
			text, err := os.ReadFile(thread)
			if _, state, ok := strings.Cut(string(text), ") "); err == nil && ok && state[0] != 'T' {
				running++
			}
		}
		if running == 0 {
			break
		}
		if end.Over() {
			v.t.Fatalf("%d threads are not stopped", running)
		}
	}
	f()
}

// comes is another client, which is served, and goes.
func (v *victim) comes() {
	v.t.Helper()
	s, err := client.Dial(within(v.t), v.socket)
	if err == nil {
		_, err = s.Statistics(within(v.t))
		err = errors.Join(err, s.Close())
	}
	if err != nil {
		v.t.Fatal(err)
	}
}

func (v *victim) takes() taken {
	v.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", v.pid))
	if err != nil {
		v.t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.pid))
	if err != nil {
		v.t.Fatal(err)
	}
	now := taken{files: len(entries)}
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		switch {
		case f[0] == "VmRSS:":
			kib, err := strconv.ParseUint(f[1], 10, 64)
			if err != nil {
				v.t.Fatal(err)
			}
			now.resident = kib << 10
		case f[0] == "Threads:":
			if now.threads, err = strconv.Atoi(f[1]); err != nil {
				v.t.Fatal(err)
			}
		}
	}
	return now
}

// An attacked relay may keep the grown size of its Go runtime: some threads, and memory that the
// garbage collector gives back late.
const (
	moreFiles    = 16
	moreThreads  = 400
	moreResident = 96 << 20
)

// closes waits until the relay has closed the files of ended clients.
func (v *victim) closes() (now taken) {
	v.t.Helper()
	for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
		if now = v.takes(); now.files <= v.before.files+moreFiles {
			return now
		}
		if end.Over() {
			v.t.Errorf("the relay has %d files open, and had %d", now.files, v.before.files)
			return now
		}
	}
}

// recovered demands that the relay has its former resources, with a tolerance.
func (v *victim) recovered() {
	v.t.Helper()
	v.goesOn()
	now := v.closes()
	if now.threads > v.before.threads+moreThreads || now.resident > v.before.resident+moreResident {
		v.t.Errorf("the relay takes %+v, and took %+v", now, v.before)
	}
	v.t.Logf("before %+v, after %+v", v.before, now)
	v.comes()
	if info, err := os.Stat(v.log); err != nil || info.Size() > 256<<10 {
		v.t.Errorf("its log has %d bytes (%v)", info.Size(), err)
	}
}

func (v *victim) dial() packet.Conn {
	v.t.Helper()
	c, err := packet.Dial(v.socket)
	if err != nil {
		v.t.Fatal(err)
	}
	if err := c.SetDeadline(testutil.Deadline()); err != nil {
		v.t.Fatal(err)
	}
	return c
}

// session is a session without a cleanup.
func (v *victim) session() packet.Conn {
	v.t.Helper()
	c := v.dial()
	_, fds, err := c.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, time.Minute)
	if err != nil {
		v.t.Fatal(err)
	}
	packet.CloseAll(fds)
	if err := c.SetDeadline(testutil.Deadline()); err != nil {
		v.t.Fatal(err)
	}
	return c
}

// ends reads until the relay has closed, and returns the last message.
func ends(t *testing.T, c packet.Conn) error {
	t.Helper()
	defer c.Close()
	var last error
	for {
		m, _, fds, err := c.Receive()
		packet.CloseAll(fds)
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("the relay does not hang up")
			}
			return last
		}
		if f, ok := m.(*wire.Failure); ok {
			last = f.Err()
		}
	}
}

func TestSocketWithThousandConnectionsStillServes(t *testing.T) {
	v := newVictim(t, func(c *launch.Config) { c.Limits.Clients = 40 })
	const n = 1000
	var silent []packet.Conn
	for i := range n {
		silent = append(silent, v.dial())
		if i%250 == 249 {
			v.goesOn()
			v.comes() // a client with a hello is not kept out
		}
	}
	if now := v.takes(); now.files > v.before.files+300 {
		t.Errorf("the relay has %d files open for those that say nothing", now.files)
	}
	told := 0 // to others the time was over before
	for _, c := range silent[:n/2] {
		if errors.Is(ends(t, c), &wire.Error{Status: wire.StatusBusy}) {
			told++
		}
	}
	if told == 0 {
		t.Error("nobody of those that had to go was told why")
	}
	for _, c := range silent[n/2:] {
		c.Close()
	}
	v.recovered()

	// The same with sessions: connections above the limit are refused with a message.
	var open []packet.Conn
	var lock sync.Mutex
	var wait sync.WaitGroup
	refused := 0
	for range 20 {
		wait.Go(func() {
			for range n / 20 {
				c, err := packet.Dial(v.socket)
				if err != nil {
					t.Error(err)
					return
				}
				_, fds, err := c.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, time.Minute)
				packet.CloseAll(fds)
				lock.Lock()
				if err != nil {
					refused++
					if !errors.Is(err, &wire.Error{Status: wire.StatusLimit}) || !errors.Is(err, codes.LimitMet) {
						t.Errorf("a client hears %v", err)
					}
					c.Close()
				} else {
					open = append(open, c)
				}
				lock.Unlock()
			}
		})
	}
	wait.Wait()
	if len(open) == 0 || len(open) > 40 || refused != n-len(open) {
		t.Errorf("%d sessions are open, and %d were refused", len(open), refused)
	}
	v.goesOn()
	for _, c := range open {
		c.Close()
	}
	for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
		s, err := client.Dial(within(t), v.socket)
		if err == nil {
			s.Close()
			break
		}
		if end.Over() {
			t.Fatalf("nobody can attach again: %v", err)
		}
	}
	v.recovered()
}

func TestSocketGarbageEndsConnectionOnly(t *testing.T) {
	t.Parallel() // it waits more than it works
	v := newVictim(t, nil)
	for i := range 300 {
		c := v.dial()
		if i%2 == 1 {
			c.Close()
			c = v.session()
		}
		for range 1 + i%3 {
			if _, err := c.Write(random(t, 1+uint64(mathrand.IntN(5000)))); err != nil {
				break // cut off already
			}
		}
		demand(t, ends(t, c), wire.StatusMalformed)
	}
	v.recovered()
}

// Every message of a session, cut at every word, and with an additional byte.
func TestTruncatedMessagesEndTheirSession(t *testing.T) {
	t.Parallel() // it waits more than it works
	v := newVictim(t, nil)
	for _, m := range []wire.Message{
		&wire.Hello{}, &wire.Export{}, &wire.Unexport{}, &wire.Listen{}, &wire.Unlisten{}, &wire.Accept{}, &wire.Connect{},
		&wire.Disconnect{}, &wire.Goodbye{}, &wire.Statistics{}, &wire.Lanes{}, &wire.LaneNIC{}, &wire.Staging{},
		&wire.Event{}, &wire.EventClose{}, &wire.Expose{}, &wire.Revoke{}, &wire.DMABuf{}, &wire.PeerHello{},
		&wire.PeerGrant{}, &wire.PeerRegion{},
	} {
		whole := wire.Encode(m, 1)
		lengths := []int{len(whole) + 1, 1, 7}
		for n := 8; n < len(whole); n += 8 {
			lengths = append(lengths, n)
		}
		for _, n := range lengths {
			c := v.session()
			if _, err := c.Write(append(whole, 0)[:n]); err != nil {
				t.Fatal(err)
			}
			demand(t, ends(t, c), wire.StatusMalformed)
		}
	}
	v.recovered()
}

func TestMessageWithThousandDescriptorsIsRefused(t *testing.T) {
	v := newVictim(t, nil)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	many := make([]int, 253) // SCM_MAX_FD
	for i := range many {
		many[i] = int(null.Fd())
	}
	text := wire.Encode(&wire.Export{Bytes: 4096, Length: 4096, GPU: uuid(t, 0), Access: wire.AccessSend}, 1)
	for range 8 {
		c := v.session()
		// The kernel frees descriptors that wait in a closed socket.
		for range 4 {
			if _, _, err := c.WriteMsgUnix(text, unix.UnixRights(many...), nil); err != nil {
				break
			}
		}
		demand(t, ends(t, c), wire.StatusMalformed)
	}
	// The maximum number for a message, and too many for the request.
	c := v.session()
	for range 1000 {
		_, _, err := c.Exchange(&wire.Export{Bytes: 4096, Length: 4096, GPU: uuid(t, 0), Access: wire.AccessSend},
			time.Minute, many[:wire.MaxDescriptors]...)
		if !errors.Is(err, &wire.Error{Status: wire.StatusLimit}) { // which is said where closing them takes long
			demand(t, err, wire.StatusMalformed)
		}
	}
	// And with messages without descriptors.
	for range 1000 {
		_, fds, err := c.Exchange(&wire.Statistics{}, time.Minute, many[:wire.MaxDescriptors]...)
		if err != nil {
			t.Fatal(err)
		}
		packet.CloseAll(fds)
	}
	c.Close()
	v.recovered()
}

func TestClientThatNeverReadsIsDisconnected(t *testing.T) {
	t.Parallel() // it waits more than it works
	v := newVictim(t, nil)
	for range 3 {
		c := v.session()
		text := wire.Encode(&wire.Statistics{}, 1)
		cut := false
		for range 1_000_000 {
			if _, err := c.Write(text); err != nil {
				cut = errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
				break
			}
		}
		if !cut {
			t.Error("a client that reads nothing was not cut off")
		}
		if now := v.takes(); now.resident > v.before.resident+moreResident {
			t.Errorf("the relay takes %+v, and took %+v", now, v.before)
		}
		v.goesOn()
		c.Close()
	}
	v.recovered()
}

// A client can map the whole submit memory for writing, and write any bytes there at any time.
func TestRingRewrittenAtRandomHarmsNoOtherClient(t *testing.T) {
	v := newVictim(t, nil)
	cut := 0
	for round := range 60 {
		c := v.dial()
		_, fds, err := c.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetDeadline(testutil.Deadline()); err != nil {
			t.Fatal(err)
		}
		submit, err := unix.Mmap(fds[0], 0, wire.SubmitBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		shared, err := ring.OpenClient(fds[0], fds[1])
		if err != nil {
			t.Fatal(err)
		}
		connection, region, own := v.withConnection(c)
		rng := mathrand.New(mathrand.NewPCG(uint64(round), 7))
		for i := range 2000 {
			// Some operations are valid, so that the rewritten memory is in use.
			if i%4 == 0 {
				_, _ = shared.Post(wire.Descriptor{
					Operation: 1 + uint32(i/4)%3, Connection: connection, Memory: region, Length: 1 << 16, Cookie: uint64(i),
					WaitTimeline: wire.NoTimeline, SignalTimeline: uint32(rng.IntN(300)), SignalValue: rng.Uint64(),
				})
				one := [8]byte{1}
				_, _ = unix.Write(fds[2], one[:])
			}
			word := rng.IntN(wire.SubmitBytes/8) * 8
			switch rng.IntN(8) {
			case 0: // a position: most of these end the session
				if round%3 == 0 && i > 1000 {
					word = rng.IntN(3) * 8
				}
			case 1, 2:
				word = wire.SubmitEntries + rng.IntN(wire.RingEntries*128/8)*8
			}
			if round%3 != 0 && word < 24 {
				continue // so that in most rounds the session lives on
			}
			binary.LittleEndian.PutUint64(submit[word:], rng.Uint64()>>rng.IntN(64))
		}
		_, _ = c.Write(wire.Encode(&wire.Statistics{}, 9))
		for answered := false; !answered; {
			m, _, received, err := c.Receive()
			packet.CloseAll(received)
			if err != nil {
				cut++
				break
			}
			switch m := m.(type) {
			case *wire.StatisticsReply:
				answered = true
			case *wire.Failure:
				demand(t, m.Err(), wire.StatusBadRing)
			}
		}
		c.Close()
		packet.CloseAll(fds)
		unix.Close(own.fd)
		if err := errors.Join(unix.Munmap(submit), shared.Close()); err != nil {
			t.Fatal(err)
		}
		if round%10 == 0 {
			v.goesOn()
		}
	}
	t.Logf("%d of 60 sessions were cut off", cut)
	if cut == 0 {
		t.Error("the rewriting touched nothing")
	}
	v.recovered()
}

// withConnection exports memory on a raw session with a loopback connection; the receiving end
// belongs to the good client, which takes every message.
func (v *victim) withConnection(c packet.Conn) (connection, region uint32, own *memory) {
	v.t.Helper()
	own = allocate(v.t, 0, 2<<20)
	ask := func(m wire.Message, fds ...int) wire.Message {
		v.t.Helper()
		if err := c.Send(m, 5, fds...); err != nil {
			v.t.Fatal(err)
		}
		for {
			answer, sequence, received, err := c.Receive()
			packet.CloseAll(received)
			if err != nil {
				v.t.Fatal(err)
			}
			if sequence == 5 {
				return answer
			}
		}
	}
	listening, ok := ask(&wire.Listen{GPU: uuid(v.t, 0)}).(*wire.Listening)
	if !ok {
		v.t.Fatal("no listener")
	}
	exported, ok := ask(&wire.Export{Bytes: own.bytes, Length: own.bytes, GPU: uuid(v.t, 0),
		Access: wire.AccessSend | wire.AccessReceive}, own.fd).(*wire.Exported)
	if !ok {
		v.t.Fatal("nothing is exported")
	}
	connected, ok := ask(&wire.Connect{GPU: uuid(v.t, 0), Handle: listening.Handle}).(*wire.Connected)
	if !ok {
		v.t.Fatal("not connected")
	}
	return connected.Connection, exported.Memory, own
}

// No client can write memory that only the relay writes: not by the descriptor, not by a second
// descriptor of the same file, not by a change of the size.
func TestCompletionsCannotBeForged(t *testing.T) {
	v := newVictim(t, nil)
	c := v.dial()
	defer c.Close()
	_, fds, err := c.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer packet.CloseAll(fds)
	complete := fds[1]
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", complete), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(again)
	for _, fd := range []int{complete, again} {
		if _, err := unix.Mmap(fd, 0, wire.CompleteBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			t.Error("the completions can be mapped for writing")
		}
		if _, err := unix.Pwrite(fd, []byte{1}, 0); err == nil {
			t.Error("the completions can be written")
		}
		if unix.Ftruncate(fd, 0) == nil || unix.Ftruncate(fd, 2*wire.CompleteBytes) == nil ||
			unix.Ftruncate(fds[0], 4096) == nil {
			t.Error("the shared memory can be made shorter or longer")
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
			t.Error("a client can seal what the relay writes")
		}
		if unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096) == nil {
			t.Error("a client can punch a hole into the completions")
		}
	}
	mapped, err := unix.Mmap(complete, 0, wire.CompleteBytes, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if unix.Mprotect(mapped, unix.PROT_READ|unix.PROT_WRITE) == nil {
		t.Error("a mapping of the completions can be made writable")
	}
	if err := unix.Munmap(mapped); err != nil {
		t.Fatal(err)
	}
	v.recovered()
}

// Timelines are the client's own to write: forged values affect only operations of that client.
func TestForgedTimelinesAffectOwnOperationsOnly(t *testing.T) {
	v := newVictim(t, nil)
	bad := attachRaw(t, v.socket)
	if err := bad.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	connection, region, own := v.withConnection(bad.Conn)
	defer unix.Close(own.fd)
	held, err := v.good.Timeline(5)
	if err != nil {
		t.Fatal(err)
	}
	receive, err := v.receiving.Receive(v.memory.Memory, 0, 64, client.Tag(1))
	if err != nil {
		t.Fatal(err)
	}
	waiting, err := v.sending.Send(v.memory.Memory, 0, 64, client.Tag(1), client.After(held, 1))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		for n := range uint32(wire.Timelines) {
			bad.Advance(n, mathrand.Uint64())
		}
		_, _ = bad.Post(wire.Descriptor{
			Operation: wire.OpSend, Connection: connection, Memory: region, Length: 8, Cookie: uint64(i),
			WaitTimeline: uint32(i % wire.Timelines), WaitValue: mathrand.Uint64(), SignalTimeline: uint32(i % wire.Timelines),
			SignalValue: mathrand.Uint64(),
		})
	}
	one := [8]byte{1}
	_, _ = unix.Write(bad.wakeRelay, one[:])
	if _, fds, err := bad.Exchange(&wire.Statistics{}, time.Minute); err != nil {
		t.Fatal(err)
	} else {
		packet.CloseAll(fds)
	}
	select {
	case <-waiting.Done():
		t.Error("the timelines of one session moved an operation of another")
	default:
	}
	held.Advance(1)
	for _, op := range []*client.Operation{waiting, receive} {
		if _, err := wait(t, op, nil); err != nil {
			t.Error(err)
		}
	}
	v.recovered()
}

// Memory that changes, or whose owner ends, during a copy.
func TestExportRemovedDuringCopyHarmsNoOtherClient(t *testing.T) {
	v := newVictim(t, nil)
	listener, err := v.good.Listen(within(t), uuid(t, 0))
	if err != nil {
		t.Fatal(err)
	}
	for round := range 20 {
		s, err := client.Dial(within(t), v.socket)
		if err != nil {
			t.Fatal(err)
		}
		m := allocate(t, 0, 32<<20)
		if m.Memory, err = s.Export(within(t), client.Allocation{FD: m.fd, Bytes: m.bytes, GPU: uuid(t, 0)}); err != nil {
			t.Fatal(err)
		}
		sending, err := s.Connect(within(t), uuid(t, 0), listener.Handle())
		if err != nil {
			t.Fatal(err)
		}
		receiving, err := listener.Accept(within(t))
		if err != nil {
			t.Fatal(err)
		}
		receive, err := receiving.Receive(v.memory.Memory, 0, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sending.Send(m.Memory, 0, 1<<20); err != nil {
			t.Fatal(err)
		}
		// The memory is sealed against changes that would make the relay fail.
		if unix.Ftruncate(m.fd, 4096) == nil {
			t.Error("exported memory can be made shorter")
		}
		if err := unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(m.bytes)); err != nil &&
			round == 0 {
			t.Logf("punching a hole: %v", err)
		}
		switch round % 3 {
		case 0:
			err = m.Unexport(within(t))
		case 1:
			err = s.Close()
		default:
			err = nil // the socket closes without a goodbye, below
		}
		if err != nil {
			t.Fatal(err)
		}
		_, _ = wait(t, receive, nil) // done, or the remote side has ended
		if err := receiving.Close(within(t)); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		unix.Close(m.fd)
	}
	v.recovered()
}

// fuse is a file system with a single file, whose close hangs until the test releases it. It is
// mounted nowhere: the holder of the file has it. Until then no process may start, because the
// process would hang before exec.
type fuse struct {
	t    *testing.T
	file int // the file, open
	fd   int // /dev/fuse
	lock sync.Mutex
	held []uint64 // requests to flush
	free bool
}

// The kernel's protocol, include/uapi/linux/fuse.h.
const (
	fuseLookup, fuseGetattr, fuseOpen, fuseRelease, fuseFlush, fuseInit = 1, 3, 14, 18, 25, 26
	fuseStatfs, fuseForget, fuseInterrupt, fuseBatchForget              = 17, 2, 36, 42
)

func newFuse(t *testing.T) *fuse {
	t.Helper()
	f := &fuse{t: t}
	dir := t.TempDir()
	var err error
	if f.fd, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		t.Skipf("/dev/fuse cannot be used here: %v", err)
	}
	served := make(chan struct{})
	mounted := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its namespace
		// A mount that others see, those in other namespaces have as well, and the
		// file system would end when the last of them has.
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount("peerlane-test", dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID,
				fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", f.fd))
		}
		if err != nil {
			mounted <- err
			return
		}
		go func() {
			defer close(served)
			f.serve()
		}()
		f.file, err = unix.Open(filepath.Join(dir, "file"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		mounted <- errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
	}()
	if err := <-mounted; err != nil {
		unix.Close(f.fd)
		t.Skipf("no FUSE file system can be mounted here: %v", err)
	}
	t.Cleanup(func() {
		f.letGo()
		unix.Close(f.file)
		select {
		case <-served:
			unix.Close(f.fd)
		case <-testutil.After(time.Minute):
			t.Error("somebody still has the file")
		}
	})
	return f
}

func (f *fuse) serve() {
	buffer := make([]byte, 1<<20)
	le := binary.LittleEndian
	for {
		n, err := unix.Read(f.fd, buffer)
		if err == unix.EINTR || err == unix.ENOENT {
			continue
		}
		if err != nil || n < 40 {
			return // unmounted
		}
		operation, unique, node := le.Uint32(buffer[4:]), le.Uint64(buffer[8:]), le.Uint64(buffer[16:])
		attributes := func(node uint64) []byte {
			a := make([]byte, 88)
			le.PutUint64(a, node)
			mode := uint32(unix.S_IFREG | 0o666)
			if node == 1 {
				mode = unix.S_IFDIR | 0o755
			}
			le.PutUint64(a[8:], 2<<20)
			le.PutUint32(a[60:], mode)
			le.PutUint32(a[64:], 1)
			return a
		}
		switch operation {
		case fuseInit:
			out := make([]byte, 64)
			le.PutUint32(out, 7)
			le.PutUint32(out[4:], 31)
			le.PutUint32(out[8:], 4096)
			le.PutUint16(out[16:], 16)
			le.PutUint16(out[18:], 12)
			le.PutUint32(out[20:], 4096)
			f.answer(unique, 0, out)
		case fuseLookup:
			out := make([]byte, 40, 128)
			le.PutUint64(out, 2)
			f.answer(unique, 0, append(out, attributes(2)...))
		case fuseGetattr:
			f.answer(unique, 0, append(make([]byte, 16, 104), attributes(node)...))
		case fuseOpen:
			f.answer(unique, 0, make([]byte, 16))
		case fuseFlush:
			f.lock.Lock()
			if f.free {
				f.answer(unique, 0, nil)
			} else {
				f.held = append(f.held, unique)
			}
			f.lock.Unlock()
		case fuseRelease:
			f.answer(unique, 0, nil)
		case fuseForget, fuseBatchForget, fuseInterrupt:
		default:
			f.answer(unique, -int32(unix.ENOSYS), nil)
		}
	}
}

func (f *fuse) answer(unique uint64, failure int32, out []byte) {
	header := make([]byte, 16, 16+len(out))
	binary.LittleEndian.PutUint32(header, uint32(16+len(out)))
	binary.LittleEndian.PutUint32(header[4:], uint32(failure))
	binary.LittleEndian.PutUint64(header[8:], unique)
	_, _ = unix.Write(f.fd, append(header, out...)) // ENOENT if the requester is gone
}

func (f *fuse) hanging() int {
	f.lock.Lock()
	defer f.lock.Unlock()
	return len(f.held)
}

// letGo lets every close return, also later closes.
func (f *fuse) letGo() {
	f.lock.Lock()
	defer f.lock.Unlock()
	f.free = true
	for _, unique := range f.held {
		f.answer(unique, 0, nil)
	}
	f.held = nil
}

// A file of a file system that the client itself serves: every call on the file can hang, and the
// close does.
func TestHangingFileDescriptorsBlockNoOtherClient(t *testing.T) {
	v := newVictim(t, nil)
	f := newFuse(t) // after that: a process that is started closes the file, and hangs
	file := f.file
	export := &wire.Export{Bytes: 2 << 20, Length: 2 << 20, GPU: uuid(t, 0), Access: wire.AccessSend}
	hung := 0
	for range 12 { // sessions, each as much as it can
		c := v.session()
		limited := 0
		for range 100 {
			_, _, err := c.Exchange(export, time.Minute, file)
			if errors.Is(err, &wire.Error{Status: wire.StatusLimit}) {
				limited++
				continue
			}
			demandCode(t, err, wire.StatusBadDescriptor, codes.NotExported, "")
			hung++
		}
		if limited == 0 {
			t.Error("one session made the relay hold a hundred files that hang")
		}
		v.goesOn()
		c.Close()
	}
	now := v.takes()
	t.Logf("%d files of %d hang (%d at their close); the relay took %+v and takes %+v", hung, 1200, f.hanging(),
		v.before, now)
	if hung > 100 || now.files > v.before.files+200 || now.threads > v.before.threads+400 {
		t.Errorf("%d files hang; the relay took %+v and takes %+v", hung, v.before, now)
	}
	// Also with hello, and no client waits.
	for range 20 {
		c := v.dial()
		_, fds, err := c.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, time.Minute, file)
		packet.CloseAll(fds)
		if err != nil {
			demand(t, err, wire.StatusMalformed)
		}
		c.Close()
	}
	v.goesOn()
	f.letGo()
	for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
		if now = v.takes(); now.files <= v.before.files+moreFiles {
			break
		}
		if end.Over() {
			t.Fatalf("the relay takes %+v, and took %+v", now, v.before)
		}
	}
	own := exported(t, attach(t, v.socket), 0, 2<<20) // descriptors are taken again
	if err := own.Unexport(within(t)); err != nil {
		t.Error(err)
	}
	v.goesOn()
}

// lingering is a TCP socket whose last close waits until release is called.
func lingering(t *testing.T) (fd int, release func()) {
	t.Helper()
	demand := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	small := func(fd int) {
		demand(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096))
		demand(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4096))
	}
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	demand(err)
	defer unix.Close(listener)
	small(listener)
	demand(unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	demand(unix.Listen(listener, 1))
	at, err := unix.Getsockname(listener)
	demand(err)
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	demand(err)
	small(fd)
	demand(unix.Connect(fd, at))
	other, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	demand(err)
	demand(unix.SetNonblock(fd, true))
	for err == nil {
		_, err = unix.Write(fd, make([]byte, 1<<16))
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	demand(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}))
	release = sync.OnceFunc(func() { unix.Close(other) }) // unread bytes there reset both
	t.Cleanup(release)
	return fd, release
}

// The last close of a lingering TCP socket waits in the kernel, in any call: in a receive of a
// message without its descriptors, and in the close of a socket with unread messages.
func TestLingeringSocketsBlockNoOtherClient(t *testing.T) {
	export := &wire.Export{Bytes: 4096, Length: 4096, GPU: uuid(t, 0), Access: wire.AccessSend}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	v := newVictim(t, nil)
	var releases []func()
	var sessions []packet.Conn
	// brings sends a message with a lingering socket, whose only descriptor is in the message.
	brings := func(c packet.Conn, m wire.Message, before int) {
		fd, release := lingering(t)
		releases = append(releases, release)
		fds := []int{}
		for range before {
			fds = append(fds, int(null.Fd()))
		}
		if err := c.Send(m, 1, append(fds, fd)...); err != nil {
			release() // this process's close would wait
			t.Error(err)
		}
		unix.Close(fd)
	}
	for _, a := range []struct {
		name  string
		times int
		hello bool // said, and not the attack's
		sends func(packet.Conn)
	}{
		{"as one of too many", 4, true, func(c packet.Conn) { brings(c, export, 252) }},
		{"behind garbage", 4, true, func(c packet.Conn) {
			for _, text := range []string{"garbage", ""} {
				if _, err := c.Write([]byte(text)); err != nil {
					t.Error(err)
				}
			}
			brings(c, export, 0)
		}},
		{"with hello", 60, false, func(c packet.Conn) {
			brings(c, &wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, 0)
		}},
		{"exported, and more than are taken", 9, true, func(c packet.Conn) {
			for range 10 {
				brings(c, export, 0)
			}
		}},
	} {
		var conns []packet.Conn
		for range a.times {
			if a.hello {
				conns = append(conns, v.session())
			} else {
				conns = append(conns, v.dial())
			}
		}
		// All at once: to be stopped again ends the waits.
		v.stopped(func() {
			for _, c := range conns {
				a.sends(c)
			}
		})
		v.goesOn()
		v.comes()
		now := v.takes()
		t.Logf("%s: the relay took %+v and takes %+v", a.name, v.before, now)
		if now.threads > v.before.threads+moreThreads {
			t.Errorf("%s: the relay takes %+v, and took %+v", a.name, now, v.before)
		}
		sessions = append(sessions, conns...)
	}
	for _, release := range releases {
		release()
	}
	for _, c := range sessions {
		c.Close()
	}
	v.recovered()
	own := exported(t, attach(t, v.socket), 0, 2<<20) // descriptors are taken again
	if err := own.Unexport(within(t)); err != nil {
		t.Error(err)
	}
}

// A handle has 128 random bits. The relay refuses wrong handles before any work, and counts them.
func TestGuessedHandlesAreRefusedAndCounted(t *testing.T) {
	h := newHost(t)
	socketB, relayB := h.start("b", launch.RouteDirect, -1, far(3, 2, "nic1"))
	a := attach(t, h.relay("a", launch.RouteDirect, far(0, 1, "nic0")))
	b := attach(t, socketB)
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	opaque := listener.Handle()
	right := opaque.Layout()
	const guesses = 300
	for i := range guesses {
		guess := right
		if i < 128 {
			guess.Token[i/8] ^= 1 << (i % 8) // each bit counts
		} else if _, err := rand.Read(guess.Token[:]); err != nil {
			t.Fatal(err)
		}
		_, err := a.Connect(within(t), uuid(t, 0), guess.Handle())
		demand(t, err, wire.StatusBadHandle)
	}
	report := relayB.Report()
	if report.BadHandles != guesses {
		t.Errorf("%d wrong handles were counted, not %d", report.BadHandles, guesses)
	}
	if len(report.Contexts) != 0 || report.Used.Connections != 0 {
		t.Errorf("for wrong handles the relay has %+v", report)
	}
	if _, err := a.Connect(within(t), uuid(t, 0), right.Handle()); err != nil {
		t.Errorf("the right handle: %v", err)
	}
	if _, err := listener.Accept(within(t)); err != nil {
		t.Error(err)
	}
}

// A process with a container's socket has the container's lanes: the process can export memory, and
// cannot access memory of further clients.
func TestSocketOfOtherContainerGivesNoMemory(t *testing.T) {
	h := newHost(t)
	socket := h.relay("b", launch.RouteDirect, far(3, 2, "nic1"))
	b := attach(t, socket)
	memory := exported(t, b, 3, 4<<20)
	a := attach(t, h.relay("a", launch.RouteDirect, far(0, 1, "nic0")))
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	sending, err := a.Connect(within(t), uuid(t, 0), listener.Handle())
	if err != nil {
		t.Fatal(err)
	}
	receiving, err := listener.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}

	thief := attachRaw(t, socket)
	if _, fds, err := thief.Exchange(&wire.Lanes{}, time.Minute); err != nil {
		t.Errorf("who has the socket is served: %v", err)
	} else {
		packet.CloseAll(fds)
	}
	for number := range uint32(64) {
		for _, c := range []struct {
			m      wire.Message
			status wire.Status
		}{
			{&wire.Unexport{Memory: number}, wire.StatusUnknownMemory},
			{&wire.Disconnect{Connection: number}, wire.StatusUnknownConnection},
			{&wire.Unlisten{Listener: number}, wire.StatusUnknownListener},
			{&wire.Accept{Listener: number}, wire.StatusUnknownListener},
		} {
			_, _, err := thief.Exchange(c.m, time.Minute)
			demand(t, err, c.status)
		}
		if _, err := thief.Post(wire.Descriptor{
			Operation: wire.OpReceive, Connection: number, Memory: number, Length: 8, Cookie: uint64(number),
			WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline,
		}); err != nil {
			t.Fatal(err)
		}
	}
	one := [8]byte{1}
	if _, err := unix.Write(thief.wakeRelay, one[:]); err != nil {
		t.Fatal(err)
	}
	for got := 0; got < 64; {
		completion, ok := thief.Next()
		if !ok {
			if _, _, err := thief.Exchange(&wire.Statistics{}, time.Minute); err != nil {
				t.Fatal(err)
			}
			continue
		}
		got++
		if wire.Status(completion.Status) != wire.StatusUnknownConnection {
			t.Errorf("an operation on connection %d: %v", completion.Cookie, wire.Status(completion.Status))
		}
	}
	// GPUs of his own container do not count here.
	own := allocate(t, 0, 2<<20)
	_, _, err = thief.Exchange(&wire.Export{Bytes: own.bytes, Length: own.bytes, GPU: uuid(t, 0),
		Access: wire.AccessSend}, time.Minute, own.fd)
	demand(t, err, wire.StatusWrongGPU)

	// And b's own goes on.
	source := exported(t, a, 0, 4<<20)
	want := random(t, 4096)
	source.write(0, want)
	receive, err := receiving.Receive(memory.Memory, 0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	send, err := sending.Send(source.Memory, 0, 4096)
	for _, op := range []*client.Operation{send, receive} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(memory.read(0, 4096), want) {
		t.Error("the bytes are wrong")
	}
}

// Every limit of a container can be reached, is named in the error, holds for the container's
// clients together, and ends with the client that reached it.
func TestContainerLimitsHoldForAllClientsTogether(t *testing.T) {
	start := func(l launch.Limits) (string, *relay.Relay) {
		h := newHost(t)
		h.change = func(c *launch.Config) { c.Limits = l }
		return h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	}
	gone := func(r *relay.Relay, what string, used func(launch.Limits) int, want int) {
		t.Helper()
		for end := testutil.Begin(); used(r.Report().Used) != want; time.Sleep(10 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("%s: in use are %+v", what, r.Report().Used)
			}
		}
	}
	export := func(s *client.Session, fd int) (*client.Memory, error) {
		return s.Export(within(t), client.Allocation{FD: fd, Bytes: 2 << 20, GPU: uuid(t, 0)})
	}

	t.Run("clients", func(t *testing.T) {
		socket, r := start(launch.Limits{Clients: 2})
		first := attach(t, socket)
		attach(t, socket)
		_, err := client.Dial(within(t), socket)
		demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.clients")
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		gone(r, "clients", func(l launch.Limits) int { return l.Clients }, 1)
		attach(t, socket)
	})
	t.Run("memories", func(t *testing.T) {
		socket, r := start(launch.Limits{Memories: 3})
		a, b := attach(t, socket), attach(t, socket)
		m := allocate(t, 0, 2<<20)
		var last *client.Memory
		for _, s := range []*client.Session{a, b, a} {
			var err error
			if last, err = export(s, m.fd); err != nil {
				t.Fatal(err)
			}
		}
		_, err := export(b, m.fd)
		demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.memories")
		if err := last.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
		if _, err := export(b, m.fd); err != nil {
			t.Error(err)
		}
		if err := errors.Join(a.Close(), b.Close()); err != nil {
			t.Fatal(err)
		}
		gone(r, "memories", func(l launch.Limits) int { return l.Memories }, 0)
		gone(r, "descriptors", func(l launch.Limits) int { return l.Descriptors }, 0)
	})
	t.Run("connections", func(t *testing.T) {
		socket, r := start(launch.Limits{Connections: 5}) // a connection to oneself is two
		a, b := attach(t, socket), attach(t, socket)
		sending, receiving, handle := join(t, a, 0, b, 0)
		join(t, b, 0, a, 0)
		// The sender's end is the fifth; the receiver's is too much.
		sixth, err := a.Connect(within(t), uuid(t, 0), handle)
		if err == nil {
			select {
			case <-sixth.Down():
				err = sixth.Err()
			case <-within(t).Done():
			}
		}
		demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.connections")
		gone(r, "connections", func(l launch.Limits) int { return l.Connections }, 4)
		if err := errors.Join(sending.Close(within(t)), receiving.Close(within(t))); err != nil {
			t.Fatal(err)
		}
		gone(r, "connections", func(l launch.Limits) int { return l.Connections }, 2)
		join(t, a, 0, b, 0)
		if err := errors.Join(a.Close(), b.Close()); err != nil {
			t.Fatal(err)
		}
		gone(r, "connections", func(l launch.Limits) int { return l.Connections }, 0)
		gone(r, "descriptors", func(l launch.Limits) int { return l.Descriptors }, 0)
	})
	t.Run("descriptors", func(t *testing.T) {
		socket, r := start(launch.Limits{Descriptors: 14}) // two clients, two memories
		a, b := attach(t, socket), attach(t, socket)
		m := allocate(t, 0, 2<<20)
		first, err := export(a, m.fd)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := export(b, m.fd); err != nil {
			t.Fatal(err)
		}
		_, err = export(b, m.fd)
		demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.descriptors")
		_, err = client.Dial(within(t), socket)
		demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.descriptors")
		if err := first.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
		gone(r, "descriptors", func(l launch.Limits) int { return l.Descriptors }, 13)
		if _, err := export(b, m.fd); err != nil {
			t.Error(err)
		}
	})
}
