package vm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/wiring"
)

// Options are the options of a machine.
type Options struct {
	Image *Image
	// Dir is the directory of this machine, with a short path for sockets. console.log has the text
	// of the console.
	Dir string
	// Agent is the path of the guest program, a static binary.
	Agent string
	// Share is the host's directory at /share in the guest, and Source the read-only directory at
	// /source.
	Share, Source string
	// MemoryMiB is the guest's memory; 0 for 4608.
	MemoryMiB int
	// Network joins this machine with another machine, as guest 0 or 1; nil for a single machine.
	Network *Network
	Guest   int
	// HangTimeout is the time without an answer to a ping after which the guest counts as hanging;
	// 0 for a minute.
	HangTimeout time.Duration
	// kernelOptions are appended to the kernel's command line.
	kernelOptions []string
}

// Network joins two machines with a cable for each card.
type Network struct {
	// Dir is the directory of the cables' sockets.
	Dir string

	mu       sync.Mutex
	machines [wiring.Guests]*Machine // running machines
}

// joined registers a machine for requests of the other machine.
func (n *Network) joined(m *Machine) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.machines[m.options.Guest] = m
}

func (n *Network) machine(guest int) *Machine {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.machines[guest]
}

// Boot limits, ten times the usual duration.
var bootTimeout = map[string]time.Duration{Small: 2 * time.Minute, Full: 6 * time.Minute}

// defaultHangTimeout is the time without an answer to a ping after which a guest counts as hanging.
// Emulation on a busy host is slow, and the agent shares the processor.
const defaultHangTimeout = 60 * time.Second

// Machine is a running guest.
type Machine struct {
	// agent runs processes in the guest.
	agent *control.Client
	// Booted is the time from QEMU's start to the agent's first message.
	Booted time.Duration
	// Ready is the agent's first message.
	Ready control.Ready

	options Options
	qemu    *exec.Cmd
	errs    *tail
	monitor *monitor
	// down is cancelled at the end of the machine, with the reason as its cause.
	down   context.Context
	fail   context.CancelCauseFunc
	exited chan struct{}
}

// Start boots a machine and waits until its agent serves. An error includes the end of the
// console's text.
func Start(ctx context.Context, o Options) (*Machine, error) {
	if o.MemoryMiB == 0 {
		o.MemoryMiB = 4608
	}
	if o.HangTimeout == 0 {
		o.HangTimeout = defaultHangTimeout
	}
	m := &Machine{options: o, errs: &tail{}, exited: make(chan struct{})}
	m.down, m.fail = context.WithCancelCause(context.Background())
	if err := m.start(ctx); err != nil {
		m.Stop()
		return nil, fmt.Errorf("start a %s virtual machine: %w", o.Image.kind, m.explain(err))
	}
	return m, nil
}

func (m *Machine) start(ctx context.Context) error {
	began := time.Now()
	agentPort, err := m.listen("agent")
	if err != nil {
		return err
	}
	defer agentPort.Close()
	hostPort, err := m.listen("host")
	if err != nil {
		return err
	}
	defer hostPort.Close()
	initramfs := filepath.Join(m.options.Dir, "initramfs.cpio")
	if err := makeInitramfs(ctx, initramfs, m.options); err != nil {
		return err
	}
	m.qemu = exec.Command("qemu-system-x86_64", m.arguments(initramfs)...)
	m.qemu.Stdout, m.qemu.Stderr = m.errs, m.errs
	// Otherwise QEMU would outlive a killed runner.
	m.qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.qemu.Start(); err != nil {
		m.qemu = nil
		return fmt.Errorf("%w; install it with integration/prerequisites vm", err)
	}
	go func() {
		err := m.qemu.Wait()
		m.fail(fmt.Errorf("the machine ended (QEMU: %v)", exitText(err)))
		close(m.exited)
	}()

	ctx, cancel := context.WithTimeoutCause(ctx, bootTimeout[m.options.Image.kind],
		fmt.Errorf("not up within %v", bootTimeout[m.options.Image.kind]))
	defer cancel()
	conn, err := m.accept(ctx, agentPort)
	if err != nil {
		return err
	}
	m.agent = control.NewClient(conn)
	requests, err := m.accept(ctx, hostPort)
	if err != nil {
		return err
	}
	defer func() {
		if m.monitor == nil {
			requests.Close()
		}
	}()
	stop := context.AfterFunc(m.down, cancel)
	defer stop()
	if m.Ready, err = m.agent.Ready(ctx); err != nil {
		return m.cause(ctx, err)
	}
	m.Booted = time.Since(began)
	// QEMU creates its sockets in any order, and listens when the guest runs.
	if m.monitor, err = dialMonitor(filepath.Join(m.options.Dir, "monitor")); err != nil {
		return err
	}
	if m.options.Network != nil {
		m.options.Network.joined(m)
	}
	go m.serve(requests)
	go m.watch()
	return nil
}

func exitText(err error) string {
	if err == nil {
		return "it was switched off, or its kernel panicked"
	}
	return err.Error()
}

func (m *Machine) listen(name string) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(m.options.Dir, name), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("a socket for the machine: %w", err)
	}
	return l, nil
}

// accept waits for QEMU's connection, which QEMU opens before the guest runs.
func (m *Machine) accept(ctx context.Context, l *net.UnixListener) (net.Conn, error) {
	stop := context.AfterFunc(m.down, func() { l.Close() })
	defer stop()
	stop2 := context.AfterFunc(ctx, func() { l.Close() })
	defer stop2()
	conn, err := l.Accept()
	if err == nil {
		return conn, nil
	}
	return nil, m.cause(ctx, err)
}

// cause returns the reason of an error: the end of the machine, which is detected after the end of
// the sockets, or of ctx, or err itself.
func (m *Machine) cause(ctx context.Context, err error) error {
	select {
	case <-m.down.Done():
		return context.Cause(m.down)
	case <-time.After(2 * time.Second):
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// arguments returns QEMU's command line.
func (m *Machine) arguments(initramfs string) []string {
	o := m.options
	in := func(name string) string { return filepath.Join(o.Dir, name) }
	options := append([]string{
		"console=ttyS0", "quiet", "root=/dev/vda", "rw", "peerlane.image=" + o.Image.kind,
		// A panic ends the machine, so that tests do not wait for it.
		"panic=-1", "oops=panic",
		// Skip kernel features that cost time under emulation and do not affect Peerlane.
		"nokaslr", "mitigations=off", "tsc=reliable", "no_timer_check", "cryptomgr.notests", "random.trust_cpu=on",
		"rcupdate.rcu_expedited=1",
		"audit=0", "nowatchdog", "net.ifnames=0",
	}, o.kernelOptions...)
	if o.Image.kind == Small {
		options = append(options, "apparmor=0")
	} else {
		options = append(options, "apparmor=1", "security=apparmor", "systemd.show_status=false",
			"systemd.log_target=console")
	}
	a := []string{
		"-M", "q35",
		// No KVM even if /dev/kvm exists: a guest can hang forever. One thread for both processors:
		// with two, QEMU 7.2 can execute an instruction that the other processor is patching, and
		// the guest's kernel panics at an int3 that no longer exists (each cgroup patches code).
		// Tests take the same time, and boots are faster.
		"-accel", "tcg,thread=single",
		// 48-bit addresses, for the large BARs of GPUs. Without "fast string operations", which
		// glibc, Go and the kernel would use: the emulator moves a byte at a time, 40 MB/s instead
		// of 2 GB/s.
		"-cpu", "max,phys-bits=48,-erms,-fsrm,vendor=GenuineIntel,family=6,model=143,stepping=8,model-id=Intel(R) Xeon(R) " +
			"Platinum 8462Y+",
		"-m", fmt.Sprintf("%dM", o.MemoryMiB),
		"-smp", "2,sockets=2,cores=1,threads=1",
		"-display", "none", "-nodefaults", "-no-user-config", "-no-reboot",
		"-serial", "file:" + in("console.log"),
		"-kernel", o.Image.Kernel, "-initrd", initramfs, "-append", strings.Join(options, " "),
		// Writes go to a temporary file. If this host's disk is full, the guest gets an error; the
		// default, a stopped guest, would look like a hang.
		"-drive", "file=" + o.Image.Disk + ",if=none,id=root,format=raw,snapshot=on,cache=unsafe,werror=report", "-device",
		"virtio-blk-pci,drive=root",
		"-fsdev", "local,id=share,path=" + o.Share + ",security_model=none,multidevs=remap", "-device",
		"virtio-9p-pci,fsdev=share,mount_tag=share",
		"-fsdev", "local,id=source,path=" + o.Source + ",security_model=none,multidevs=remap,readonly=on", "-device",
		"virtio-9p-pci,fsdev=source,mount_tag=source",
		"-device", "virtio-serial-pci",
		"-chardev", "socket,id=agent,path=" + in(
			"agent"), "-device", "virtserialport,chardev=agent,name=" + wiring.ControlPort,
		"-chardev", "socket,id=host,path=" + in("host"), "-device", "virtserialport,chardev=host,name=" + wiring.HostPort,
		"-qmp", "unix:" + in("monitor") + ",server=on,wait=off",
		"-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
	}
	for node := range 2 {
		a = append(a,
			"-object", fmt.Sprintf("memory-backend-ram,id=memory%d,size=%dM", node, o.MemoryMiB/2),
			"-numa", fmt.Sprintf("node,nodeid=%d,cpus=%d,memdev=memory%d", node, node, node))
	}
	a = append(a, "-numa", "dist,src=0,dst=1,val=21")
	for i, card := range wiring.Cards {
		if card == "control" && o.Network == nil {
			continue // the card joins two guests
		}
		cables := o.Dir
		if o.Network != nil {
			cables = o.Network.Dir
		}
		// Datagrams need no connection, so the guests can start in any order, and a single guest
		// has an open cable.
		end := func(guest int) string { return filepath.Join(cables, fmt.Sprintf("%s-%d", card, guest)) }
		a = append(a, "-netdev", fmt.Sprintf("dgram,id=%s,local.type=unix,local.path=%s,remote.type=unix,remote.path=%s",
			card, end(o.Guest), end(1-o.Guest)))
		a = append(a, "-device", fmt.Sprintf("virtio-net-pci,id=card-%s,netdev=%s,mac=%s,speed=400000,duplex=full", card,
			card, wiring.MAC(i, o.Guest)))
	}
	return a
}

// makeInitramfs packs the agent and the modules of the disk.
func makeInitramfs(ctx context.Context, path string, o Options) error {
	tree := path + ".tree"
	for _, dir := range []string{"modules", "proc", "sys", "dev", "root"} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o755); err != nil {
			return err
		}
	}
	if err := copyFile(o.Agent, filepath.Join(tree, "init")); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(tree, "modules"), os.DirFS(o.Image.boot)); err != nil {
		return err
	}
	if _, err := step(ctx, tree, "sh", "-c", `find . | cpio --quiet -o -H newc > "$0"`, path); err != nil {
		return err
	}
	return os.RemoveAll(tree)
}

// watch finds a guest that hangs.
func (m *Machine) watch() {
	for {
		select {
		case <-m.down.Done():
			return
		case <-time.After(m.options.HangTimeout / 6):
		}
		ctx, cancel := context.WithTimeout(m.down, m.options.HangTimeout)
		err := m.agent.Ping(ctx)
		cancel()
		if err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				m.fail(m.cause(m.down, err)) // the end of the machine is the better reason
				return
			}
			m.fail(fmt.Errorf("no answer of the guest for %v: hung (%w)", m.options.HangTimeout, err))
			return
		}
	}
}

// Run runs a process in the guest. If the machine ends or hangs before the process ends, the error
// includes the end of the console's text.
func (m *Machine) Run(ctx context.Context, cmd control.Command, stdin io.Reader, stdout, stderr io.Writer) error {
	ended := make(chan error, 1)
	go func() { ended <- m.agent.Run(ctx, cmd, stdin, stdout, stderr) }()
	select {
	case err := <-ended:
		var status *control.ExitError
		if err == nil || errors.As(err, &status) {
			return err
		}
		return m.explain(fmt.Errorf("%q in the guest: %w", cmd.Argv, m.cause(ctx, err)))
	case <-m.down.Done():
		return m.explain(fmt.Errorf("%q in the guest: %w", cmd.Argv, context.Cause(m.down)))
	}
}

// explain adds the ends of the console's text and of QEMU's output.
func (m *Machine) explain(err error) error {
	text, readErr := os.ReadFile(filepath.Join(m.options.Dir, "console.log"))
	if readErr != nil && !errors.Is(readErr, os.ErrNotExist) {
		err = errors.Join(err, readErr)
	}
	const lines = 120 // a panic has up to 80 lines
	console := strings.Split(strings.TrimRight(string(bytes.ReplaceAll(text, []byte("\r"), nil)), "\n"), "\n")
	console = console[max(0, len(console)-lines):]
	explanation := "the console's end:\n" + strings.Join(console, "\n")
	if qemu := strings.TrimSpace(string(m.errs.Bytes())); qemu != "" {
		explanation = "QEMU said: " + qemu + "\n" + explanation
	}
	return fmt.Errorf("%w\n%s", err, explanation)
}

// Freeze stops the guest's processors, as if the guest hung.
func (m *Machine) Freeze() error { return m.monitor.do("stop", nil) }

// Stop powers the machine off and discards its disk.
func (m *Machine) Stop() {
	m.fail(errors.New("the machine was switched off"))
	if m.qemu != nil {
		_ = m.qemu.Process.Kill() // the process may have ended
		<-m.exited
	}
	if m.agent != nil {
		m.agent.Close()
	}
	if m.monitor != nil {
		m.monitor.Close()
	}
}

// serve executes requests of tests in the guest.
func (m *Machine) serve(conn net.Conn) {
	defer conn.Close()
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		var answer wiring.Answer
		var request wiring.Request
		err := json.Unmarshal(lines.Bytes(), &request)
		switch {
		case err != nil:
		case request.Other != "":
			err = m.other(request.Other)
		default:
			err = m.plug(request)
		}
		if err != nil {
			answer.Failed = err.Error()
		}
		text, err := json.Marshal(answer)
		if err == nil {
			_, err = conn.Write(append(text, '\n'))
		}
		if err != nil {
			return // the machine has ended
		}
	}
}

func (m *Machine) plug(r wiring.Request) error {
	if !slices.Contains(wiring.Cards, r.Card) {
		return fmt.Errorf("there is no network card %q", r.Card)
	}
	return m.monitor.do("set_link", map[string]any{"name": "card-" + r.Card, "up": r.Plugged})
}

// other stops or continues the other guest's processors.
func (m *Machine) other(what string) error {
	if what != wiring.Stop && what != wiring.Continue {
		return fmt.Errorf("unknown request %q for a guest", what)
	}
	if m.options.Network == nil {
		return errors.New("this guest is alone")
	}
	other := m.options.Network.machine(1 - m.options.Guest)
	if other == nil {
		return errors.New("the other guest is down")
	}
	return other.monitor.do(what, nil)
}
