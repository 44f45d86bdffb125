package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/nccl"
	"github.com/peerlane/peerlane/topo"
)

// becomeRank is the argument that turns this program into a rank without a container: its relay
// needs the pid, and the rank needs the relay's socket.
const becomeRank = "become-rank"

// become reads the socket's path, or an empty line without a relay, and executes the program.
func become(in io.Reader, arguments []string) error {
	line, err := bufio.NewReader(in).ReadString('\n')
	if err != nil {
		return fmt.Errorf("wait for the relay's socket: %w", err)
	}
	if path := strings.TrimSpace(line); path != "" {
		if err := os.Setenv("PEERLANE_SOCKET", path); err != nil {
			return err
		}
	}
	program, err := exec.LookPath(arguments[0])
	if err != nil {
		return err
	}
	return &os.PathError{Op: "execve", Path: program, Err: syscall.Exec(program, arguments, os.Environ())}
}

// event is a line of a rank's output.
type event struct {
	Kind    string `json:"kind"`
	Rank    int    `json:"rank"`
	What    string `json:"what"` // of "doing"
	Torch   string `json:"torch"`
	NCCL    string `json:"nccl"`
	NIXL    string `json:"nixl"`
	GPU     string `json:"gpu"`
	Problem string `json:"problem"` // of "check"
	Error   string `json:"error"`   // of "failed"
	RateFound
	TrainFound
	ListFound
	// ended reports the end of the rank; the harness sets it.
	ended bool
	exit  error
}

// runningRank is a started rank.
type runningRank struct {
	number    int
	id        string // of the container, and of the generation's
	container bool
	command   *exec.Cmd
	in        io.WriteCloser // closing it lets the rank exit
	stderr    *os.File
	done      bool // the rank reported done
	noticed   bool // reported the death of another rank
	dies      bool // the rank to be killed
	ended     bool
}

// start starts a rank, which sends events to events.
func (h *host) start(ctx context.Context, s settings, number int, dir, master string,
	events chan<- event) (*runningRank, error) {
	h.starts++
	g := h.gpus[number]
	r := &runningRank{number: number, id: h.ContainerID(fmt.Sprintf("rank-%d-%d", number, h.starts))}
	text, err := json.Marshal(s.Job)
	if err != nil {
		return nil, err
	}
	arguments := []string{h.python, filepath.Join(h.inside(), "rank.py"), string(text)}
	if s.Torchrun {
		address, port, _ := strings.Cut(master, " ")
		arguments = slices.Concat([]string{h.python, "-m", "torch.distributed.run", fmt.Sprintf("--nnodes=%d", h.ranks),
			"--nproc-per-node=1",
			fmt.Sprintf("--node-rank=%d", number), "--master-addr=" + address, "--master-port=" + port}, arguments[1:])
	}
	if h.program != "" {
		arguments = []string{filepath.Join(h.inside(), "program"), string(text)}
	}
	environment := h.environment(s, number, dir, master)
	if h.installed {
		environment = h.plainEnvironment(s, number, dir, master)
	}
	// NCCL sees all GPUs as one node.
	if h.installed && s.By == byNVLink {
		if err := h.enterCommon(ctx, r, s, dir, arguments, append(environment, h.Environment...)); err != nil {
			return nil, err
		}
	} else if r.container = h.runtime != nil && s.By != byNVLink; r.container {
		network := ""
		if h.network != nil {
			network = h.network.files[number]
		}
		b, err := h.bundle(filepath.Join(h.work, r.id), s, []topo.GPU{g}, dir, network, arguments,
			append(environment, h.Environment...)...)
		if err != nil {
			return nil, err
		}
		runtime := *h.runtime
		if s.Hosts { // the relay is in the namespace of the runtime
			runtime.Before = []string{"nsenter", "--net=" + h.hosts.files[number], runtime.Path()}
		}
		r.command = runtime.Run(ctx, b, r.id)
	} else {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		r.command = exec.CommandContext(ctx, self, append([]string{becomeRank}, arguments...)...)
		own := h.Environment
		if s.By != byNVLink {
			if own, err = h.PlainEnvironment(g); err != nil {
				return nil, err
			}
		}
		r.command.Env = append(environment, own...)
		r.command.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	}
	if r.stderr, err = os.Create(filepath.Join(dir, fmt.Sprintf("rank-%d.stderr", number))); err != nil {
		return nil, err
	}
	r.command.Stderr = r.stderr
	if r.in, err = r.command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := r.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	output, err := os.Create(filepath.Join(dir, fmt.Sprintf("rank-%d.stdout", number)))
	if err != nil {
		return nil, err
	}
	if err := r.command.Start(); err != nil {
		return nil, errors.Join(err, output.Close(), r.stderr.Close())
	}
	go r.follow(io.TeeReader(out, output), output, events)
	if !r.container {
		err = h.giveRelay(s, r, g)
	}
	return r, err
}

// giveRelay starts the relay of a rank without a container, if the phase uses relays, and lets the
// rank begin.
func (h *host) giveRelay(s settings, r *runningRank, g topo.GPU) error {
	socket := ""
	if s.By == byPeerlane {
		made, err := h.Launch(r.id, g, r.command.Process.Pid)
		if err != nil {
			return fmt.Errorf("rank %d's relay: %w", r.number, err)
		}
		socket = h.Socket(made)
	}
	_, err := fmt.Fprintln(r.in, socket)
	return err
}

// follow forwards the rank's events, and finally the end.
func (r *runningRank) follow(out io.Reader, log io.Closer, events chan<- event) {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		var e event
		// Libraries print lines of text too.
		if json.Unmarshal(lines.Bytes(), &e) == nil && e.Kind != "" {
			e.Rank = r.number
			events <- e
		}
	}
	_, drained := io.Copy(io.Discard, out) // an overlong line must not block the rank
	exit := errors.Join(lines.Err(), drained, r.command.Wait(), log.Close(), r.stderr.Close())
	events <- event{Rank: r.number, ended: true, exit: exit}
}

// environment returns a rank's environment: that of this program without variables that select
// NCCL's network.
func (h *host) environment(s settings, number int, dir, master string) []string {
	var list []string
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		switch name {
		case "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_HOSTID", "NCCL_TOPO_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE",
			"NCCL_DEBUG_SUBSYS", "CUDA_VISIBLE_DEVICES", "PEERLANE_SOCKET", "NCCL_SOCKET_IFNAME":
		default:
			list = append(list, v)
		}
	}
	address, port, _ := strings.Cut(master, " ")
	local, card := 0, "lo"
	if h.network != nil && s.By != byNVLink {
		card = "eth0"
	}
	if s.By == byNVLink {
		local = number % len(h.Topology.GPUs)
	}
	list = append(list,
		fmt.Sprintf("RANK=%d", number), fmt.Sprintf("WORLD_SIZE=%d", h.ranks), fmt.Sprintf("LOCAL_RANK=%d",
			local), "MASTER_ADDR="+address, "MASTER_PORT="+port,
		"NCCL_SOCKET_IFNAME="+card, "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV,TUNING",
		"NCCL_DEBUG_FILE="+filepath.Join(dir, fmt.Sprintf("nccl-%d.log", number)), "PYTHONUNBUFFERED=1")
	if s.By != byNVLink {
		// Separate nodes: no P2P and no shared memory between the ranks.
		list = append(list, fmt.Sprintf("NCCL_HOSTID=peerlane-rank-%d", number))
	}
	switch s.By {
	case byPeerlane:
		list = append(list, "NCCL_NET=Peerlane", "NCCL_NET_PLUGIN="+filepath.Join(h.inside(), cmp.Or(s.Plugin, nccl.Name)))
		if s.Topology {
			list = append(list, "NCCL_TOPO_FILE="+filepath.Join(h.inside(), topologyFile))
		} else {
			list = append(list, "NCCL_NET_GDR_LEVEL=SYS") // for any distance
		}
	case bySocket:
		list = append(list, "NCCL_NET=Socket", "NCCL_NET_PLUGIN=none")
	}
	return append(list, s.Variables...)
}

// signal sends a signal to the rank's program.
func (h *host) signal(r *runningRank, s unix.Signal) error {
	if r.container {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return h.runtime.Kill(ctx, r.id, fmt.Sprint(int(s)))
	}
	return unix.Kill(-r.command.Process.Pid, s)
}

// kill ends a rank and its children.
func (h *host) kill(r *runningRank) error {
	if !r.container {
		if err := unix.Kill(-r.command.Process.Pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return err
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return h.runtime.Delete(ctx, r.id)
}

// relay finds the process of a rank's relay.
func (h *host) relay(r *runningRank) (int, error) {
	list, err := generation.List(h.Layout)
	if err != nil {
		return 0, err
	}
	for _, info := range list {
		if info.Container.ID != r.id {
			continue
		}
		i, err := control.Inspect(h.Layout, info.ID)
		if err != nil {
			return 0, err
		}
		for _, p := range i.Processes {
			if p.Role == "relay" {
				return p.PID, nil
			}
		}
	}
	return 0, fmt.Errorf("rank %d has no relay that runs", r.number)
}
