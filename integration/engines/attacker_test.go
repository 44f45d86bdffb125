//go:build engines

package engines

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/integration/attack"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/packet"
)

// `test attack NAME KIND,ARGUMENT…` runs an attack from a container, writes its state as lines to
// the file NAME in the directory of reports, and stays until it is killed.

// attackReport is a line of an attack.
type attackReport struct {
	Error string `json:"error,omitempty"`
	// Filtered reports a seccomp filter, Capabilities has the effective set, and Label the label of
	// a security module.
	Filtered     bool   `json:"filtered"`
	Capabilities string `json:"capabilities"`
	Label        string `json:"label,omitempty"`
	// Control lists the methods of the attack that succeed on an object of the attacker.
	Control []string `json:"control,omitempty"`
	// Succeeded lists the methods that succeed on an object of Peerlane.
	Succeeded []string `json:"succeeded,omitempty"`
	// Refused has the error of a call that the engine's profile may refuse.
	Refused string `json:"refused,omitempty"`
	// Tried and Count count the objects of the attack.
	Tried int    `json:"tried,omitempty"`
	Count uint64 `json:"count,omitempty"`
}

// attacker writes the reports of an attack.
type attacker struct {
	name      string
	arguments []string
}

func (a attacker) report(r attackReport) error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	r.Filtered = strings.Contains(string(status), "\nSeccomp:\t2\n")
	for line := range strings.Lines(string(status)) {
		if set, ok := strings.CutPrefix(line, "CapEff:"); ok {
			r.Capabilities = strings.TrimSpace(set)
		}
	}
	label, _ := os.ReadFile("/proc/self/attr/current") // an error without a security module
	r.Label = strings.TrimRight(string(label), "\x00\n")
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return writeLine(filepath.Join(reportsDir, a.name), append(text, '\n'))
}

// number returns an argument as a number.
func (a attacker) number(i int) (uint64, error) { return strconv.ParseUint(a.arguments[i], 10, 64) }

func playAttack(name, list string) int {
	words := strings.Split(list, ",")
	a := attacker{name, words[1:]}
	attacks := map[string]func(attacker) error{
		"take-uid": attacker.takeUID, "in-flight": attacker.inFlight, "trace": attacker.trace, "reach": attacker.reach,
		"flood": attacker.flood, "escape": attacker.escape, "link": attacker.link,
	}
	do := attacks[words[0]]
	if do == nil {
		fmt.Fprintf(os.Stderr, "no attack %q\n", words[0])
		return 2
	}
	if err := do(a); err != nil {
		if err := a.report(attackReport{Error: err.Error()}); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		return 1
	}
	select {}
}

// ofUID starts a process that has a uid and a gid from its first instruction, and sleeps.
func ofUID(uid uint32, name string) (*exec.Cmd, error) {
	c := exec.Command("/usr/bin/busybox", "1000000")
	c.Args[0] = "sleep"
	c.Path = name
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
	return c, c.Start()
}

// takeUID runs a process with a relay's uid, and with the name of a relay's process before the
// relay is executed.
func (a attacker) takeUID() error {
	uid, err := a.number(0)
	if err != nil {
		return err
	}
	text, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		return err
	}
	const exe = "/tmp-exe/exe"
	if err := errors.Join(os.Mkdir(filepath.Dir(exe), 0o755), os.WriteFile(exe, text, 0o755)); err != nil {
		return err
	}
	c, err := ofUID(uint32(uid), exe)
	if err != nil {
		return a.report(attackReport{Refused: err.Error()})
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid))
	if err != nil {
		return err
	}
	r := attackReport{}
	if strings.Contains(string(status), fmt.Sprintf("\nUid:\t%d\t%d\t%d\t", uid, uid, uid)) {
		r.Control = []string{"setresuid"}
	}
	return a.report(r)
}

// inFlight puts descriptors of a relay's uid in flight, up to the container's limit of open files.
func (a attacker) inFlight() error {
	uid, err := a.number(0)
	if err != nil {
		return err
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	sent, err := attack.DescriptorsInFlight(uint32(uid), limit.Max)
	if err != nil {
		return err
	}
	return a.report(attackReport{Count: sent, Control: []string{"sendmsg until ETOOMANYREFS"}})
}

const (
	// traceTime is how long the attack tries to trace a running process, or a relay after its
	// execution.
	traceTime = 500 * time.Millisecond
	// watchTime is how long a new process may take to become a relay's.
	watchTime = 2 * time.Second
)

// trace tries to trace a running relay, and each relay that starts from then on, with the relay's
// uid. The first line is of the running relay, and each further line of a starting relay.
func (a attacker) trace() error {
	relay := a.arguments[0]
	pid, err := a.number(1)
	if err != nil {
		return err
	}
	uid, err := a.number(2)
	if err != nil {
		return err
	}
	victim, err := ofUID(uint32(uid), "/usr/bin/busybox")
	if err != nil {
		return err
	}
	r := attackReport{Tried: 1}
	r.Control = <-traceAs(victim.Process.Pid, uint32(uid), attack.For(traceTime))
	// Without control groups an engine does not end a process of the host's PID namespace.
	_ = victim.Process.Kill()
	_ = victim.Wait() // the status is that of SIGKILL
	r.Succeeded = <-traceAs(int(pid), uint32(uid), attack.For(traceTime))
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/stat", pid)); err != nil {
		return fmt.Errorf("the relay is not in this PID namespace: %w", err)
	}
	last, err := lastPID()
	if err != nil {
		return err
	}
	if err := a.report(r); err != nil {
		return err
	}
	// A relay's process has the sandbox's arguments first. Each new process is watched for a while:
	// listing /proc would take longer than a sandbox on a busy host.
	watched := map[int]time.Time{}
	for ; ; time.Sleep(100 * time.Microsecond) {
		newest, err := lastPID()
		if err != nil {
			return err
		}
		for last < newest {
			last++
			watched[last] = time.Now().Add(watchTime)
		}
		for n, until := range watched {
			if time.Now().After(until) {
				delete(watched, n)
				continue
			}
			command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", n))
			if errors.Is(err, os.ErrNotExist) {
				delete(watched, n) // the process has ended
			}
			_, after, confines := bytes.Cut(command, []byte("\x00--uid="))
			if !confines || !bytes.Contains(command, []byte("\x00"+relay+"\x00serve")) {
				continue
			}
			delete(watched, n)
			text, _, _ := bytes.Cut(after, []byte{0})
			uid, err := strconv.ParseUint(string(text), 10, 32)
			if err != nil {
				return fmt.Errorf("process %d has the uid %q", n, text)
			}
			result := traceAs(n, uint32(uid), attack.AfterStart(n, traceTime))
			go func() { _ = a.report(attackReport{Tried: 1, Succeeded: <-result}) }() // the test misses the line
		}
	}
}

// traceAs runs attack.Trace on a thread that ends with the trace, and returns the result.
func traceAs(pid int, uid uint32, over func() bool) <-chan []string {
	result := make(chan []string, 1)
	go attack.OnThread(func() { result <- attack.Trace(pid, uid, over) })
	return result
}

// lastPID returns the number of the newest process or thread of this PID namespace.
func lastPID() (int, error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	return strconv.Atoi(fields[len(fields)-1])
}

// reach tries to connect to the peer socket of another relay, by its path on the host, in the root
// and the working directory of each process of the host, and by the abstract names of the host.
func (a attacker) reach() error {
	peers := a.arguments[0]
	r := attackReport{}
	const own = "/own.sock"
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: own, Net: "unixpacket"})
	if err != nil {
		return err
	}
	defer l.Close()
	connects := func(path string) bool {
		if !strings.HasPrefix(path, "@") { // a path may be too long for a socket address
			dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				return false
			}
			defer unix.Close(dir)
			path = fmt.Sprintf("/proc/self/fd/%d/%s", dir, filepath.Base(path))
		}
		c, err := net.DialTimeout("unixpacket", path, time.Second)
		if err != nil {
			return false
		}
		c.Close()
		return true
	}
	if connects("/proc/self/root" + own) {
		r.Control = []string{"/proc/PID/root"}
	}
	names, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return err
	}
	if bytes.Contains(names, []byte(strings.TrimSuffix(filepath.Base(peers), ".sock"))) {
		r.Control = append(r.Control, "the generation in /proc/net/unix")
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	paths := []string{peers}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			r.Tried++
			paths = append(paths, "/proc/"+e.Name()+"/root"+peers, "/proc/"+e.Name()+"/cwd"+peers,
				"/proc/"+e.Name()+"/cwd/"+filepath.Base(peers))
		}
	}
	for line := range strings.Lines(string(names)) {
		fields := strings.Fields(line)
		if name := fields[len(fields)-1]; strings.HasPrefix(name, "@") && strings.Contains(name, "peerlane") {
			paths = append(paths, name)
		}
	}
	for _, path := range paths {
		if connects(path) {
			r.Succeeded = append(r.Succeeded, path)
		}
	}
	return a.report(r)
}

// flood opens connections to the socket of this container's own relay without a pause, and keeps
// the newest open and silent.
func (a attacker) flood() error {
	const enough = 500
	made := make(chan struct{}, enough)
	for range 3 {
		go func() {
			var open []packet.Conn
			for {
				c, err := packet.Dial(client.DefaultSocket)
				if err != nil {
					continue // the backlog is full: dial again at once
				}
				select {
				case made <- struct{}{}:
				default:
				}
				if open = append(open, c); len(open) > 100 {
					open[0].Close()
					open = open[1:]
				}
			}
		}()
	}
	for range enough {
		<-made
	}
	return a.report(attackReport{Count: enough, Control: []string{"connect"}})
}

// Names that set a terminal's title, clear the screen and set a colour.
const (
	escapeFile    = "/dev/nvidia70\x1b]0;file\x07"
	escapeNode    = "/dev/nvidia71\x1b[2J"
	escapeCommand = "a\x1b[31mb"
)

// escape opens a file and a character device whose names have escape sequences, by a process whose
// name has one.
func (a attacker) escape() error {
	name := append([]byte(escapeCommand), 0)
	if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/self/comm", []byte(escapeCommand), 0); err != nil {
		return err
	}
	r := attackReport{}
	paths := []string{escapeFile}
	if err := unix.Mknod(escapeNode, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil { // as /dev/null
		r.Refused = "mknod: " + err.Error()
	} else {
		paths = append(paths, escapeNode)
		r.Control = append(r.Control, "mknod")
	}
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		held = append(held, f)
	}
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return err
	}
	if slices.ContainsFunc(entries, func(e os.DirEntry) bool { return "/dev/"+e.Name() == escapeFile }) {
		r.Control = append(r.Control, "file")
	}
	if comm, err := os.ReadFile("/proc/self/comm"); err == nil && strings.TrimSuffix(string(comm), "\n") == escapeCommand {
		r.Control = append(r.Control, "comm")
	}
	return a.report(r)
}

// held has files that stay open until the process ends.
var held []*os.File

// link reports the target of the image's link.
func (a attacker) link() error {
	to, err := os.Readlink(linkPath)
	if err != nil {
		return a.report(attackReport{Refused: err.Error()})
	}
	return a.report(attackReport{Control: []string{to}})
}

// linkPath is the mount point of a relay's sockets, and linkTarget the directory in which an
// image has the runtime make device nodes and mount points in its place.
const (
	linkPath   = "/run/peerlane"
	linkTarget = "/dev"
)
