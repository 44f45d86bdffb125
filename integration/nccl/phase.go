package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
)

// clearing is the part of a limit reserved for the end of the processes.
const clearing = 8 * time.Second

// before is the running time of the ranks before a kill.
const before = 2 * time.Second

// noticed is the limit for an error in a rank after another rank or a relay was killed.
const noticed = 10 * time.Second

// phase is the result of a phase.
type phase struct {
	settings
	Skipped  string       `json:"skipped,omitempty"`
	Problems []string     `json:"problems"`
	Seconds  float64      `json:"seconds"`
	Torch    string       `json:"torch,omitempty"`
	NCCL     string       `json:"nccl,omitempty"`
	GPU      string       `json:"gpu,omitempty"`
	Rates    []RateFound  `json:"rates,omitempty"`
	Checked  int          `json:"checked,omitempty"` // compared buffers of every rank
	Trained  []TrainFound `json:"trained,omitempty"`
	Lists    []listRow    `json:"lists,omitempty"`
	Routes   []string     `json:"routes,omitempty"` // lines in which NIXL's backend reports its route
	NIXL     string       `json:"nixl,omitempty"`
	// seconds from the kill to the error, or to the end, of each surviving rank
	Noticed []float64      `json:"noticed,omitempty"`
	Errors  []string       `json:"errors,omitempty"` // errors of these ranks, in the same order
	Chosen  *chosen        `json:"chosen,omitempty"` // NCCL's choice, from the log of rank 0
	Log     []string       `json:"log,omitempty"`    // distinct lines about the network in NCCL's log of rank 0
	Relays  []relayUsage   `json:"relays,omitempty"`
	Doing   map[int]string `json:"doing,omitempty"` // last action of each rank, after a problem
}

// RateFound is a rate that rank 0 measured.
type RateFound struct {
	Operation    string  `json:"operation,omitempty"`
	Bytes        int     `json:"bytes,omitempty"`
	Queued       bool    `json:"queued,omitempty"`
	Microseconds float64 `json:"microseconds,omitempty"` // median of seven batches
	Min          float64 `json:"min,omitempty"`
	Max          float64 `json:"max,omitempty"`
	Calls        int     `json:"calls,omitempty"`
	Algorithm    float64 `json:"algorithm,omitempty"` // GB/s
	Bus          float64 `json:"bus,omitempty"`       // GB/s, in the sense of nccl-tests
}

// TrainFound is the result of a rank's training.
type TrainFound struct {
	Steps   int       `json:"steps,omitempty"`
	Losses  []float64 `json:"losses,omitempty"`
	Longest float64   `json:"longest_ms,omitempty"`
	Took    float64   `json:"seconds,omitempty"`
}

// relayUsage is the resource usage of a rank's relay at the end of the phase.
type relayUsage struct {
	Rank   int             `json:"rank"`
	CPU    float64         `json:"cpuSeconds"`
	Report json.RawMessage `json:"report,omitempty"`
}

func (p *phase) problem(format string, arguments ...any) {
	p.Problems = append(p.Problems, fmt.Sprintf(format, arguments...))
}

// phase runs a phase within its limit, and ends every process that it started.
func (h *host) phase(ctx context.Context, s settings, limit time.Duration) *phase {
	// Reserve time for ending the processes.
	begun, working := time.Now(), limit-clearing
	s.Job.Limit = int(working.Seconds())
	p := &phase{settings: s, Problems: []string{}, Doing: map[int]string{}}
	dir := filepath.Join(h.logs(), s.Name)
	ctx, cancel := context.WithTimeout(ctx, working)
	defer cancel()
	if err := h.during(ctx, p, dir); err != nil {
		p.problem("%v", err)
	}
	p.readLogs(dir, h.ranks)
	p.readChosen(dir)
	if len(p.Job.Lists) > 0 {
		p.readRoutes(dir, h.ranks)
	}
	if len(p.Problems) == 0 {
		p.Doing = nil
	}
	p.Seconds = time.Since(begun).Seconds()
	return p
}

func (h *host) during(ctx context.Context, p *phase, dir string) (err error) {
	// Writable for every uid: root of a container has no capabilities.
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o777)); err != nil {
		return err
	}
	if p.Plugin != "" && !exists(filepath.Join(h.inside(), p.Plugin)) {
		return fmt.Errorf("%s is not among the binaries", p.Plugin)
	}
	h.Pace = p.Pace
	if p.By == byPeerlane && !h.installed {
		if err := h.configure(p.settings); err != nil {
			return err
		}
	}
	if p.Hosts && h.hosts == nil {
		if h.runtime == nil {
			return fmt.Errorf("two hosts need containers: %s", h.why)
		}
		if h.hosts, err = newHosts(h.work); err != nil {
			h.hosts = nil
			return err
		}
	}
	if p.Route == launch.RouteStaged {
		stop, err := h.StartNICs(context.WithoutCancel(ctx), h.Plan.Lanes...)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	master, err := h.master(p.By)
	if err != nil {
		return err
	}
	events := make(chan event, 64)
	var ranks []*runningRank
	stopLogs := h.keepLogs(dir)
	defer func() {
		stopLogs()
		err = errors.Join(err, h.end(p, ranks, events))
	}()
	for i := range h.ranks {
		r, err := h.start(context.WithoutCancel(ctx), p.settings, i, dir, master, events)
		if r != nil {
			ranks = append(ranks, r)
		}
		if err != nil {
			return fmt.Errorf("start rank %d: %w", i, err)
		}
	}
	h.follow(ctx, p, ranks, events, dir)
	h.usage(p, ranks)
	return nil
}

// follow reads the ranks' events until every rank is done, a rank has failed, or the time is over.
func (h *host) follow(ctx context.Context, p *phase, ranks []*runningRank, events <-chan event, dir string) {
	done, running := 0, 0
	var kill <-chan time.Time // the time of the kill
	var killed time.Time
	var late, looks <-chan time.Time
	failed := false
	for done < len(ranks) {
		select {
		case e := <-events:
			r := ranks[e.Rank]
			r.ended = r.ended || e.ended
			switch {
			case !killed.IsZero():
				if e.ended || e.Kind == "failed" {
					p.notice(r, killed, e.Error)
				}
				if e.ended {
					done++
				}
			case e.ended && !failed && !r.done:
				p.problem("rank %d ended before it was done: %v", e.Rank, e.exit)
			case e.ended:
			case e.Kind == "failed":
				p.problem("rank %d: %s", e.Rank, e.Error)
			case e.Kind == "running":
				if running++; running == len(ranks) {
					kill = time.After(before)
					if h.Simulated {
						kill = time.After(0)
					}
				}
			default:
				if p.handleEvent(e) {
					r.done = true
					done++
				}
			}
			if len(p.Problems) > 0 && !failed && killed.IsZero() && (e.ended || e.Kind == "failed") {
				// Wait for the errors of other ranks, for a limited time.
				failed, late = true, time.After(h.patience)
			}
		case <-kill:
			kill, killed = nil, time.Now()
			if err := h.killOne(p.Kill, ranks); err != nil {
				p.problem("killing a %s: %v", p.Kill, err)
				return
			}
			late = time.After(3 * noticed)
			ticks := time.NewTicker(20 * time.Millisecond)
			defer ticks.Stop()
			looks = ticks.C
		case <-looks: // also detects an NCCL error that PyTorch does not report
			for _, r := range ranks {
				if text := ncclError(dir, r.number); text != "" {
					p.notice(r, killed, text)
				}
			}
		case <-late:
			if !failed {
				p.problem("%d of %d ranks have not ended %v after a %s was killed", len(ranks)-done, len(ranks), 3*noticed, p.Kill)
				h.diagnose(ranks, dir)
			}
			return
		case <-ctx.Done():
			p.problem("not done within %d s", p.Job.Limit)
			h.diagnose(ranks, dir)
			return
		}
	}
	for _, s := range p.Noticed {
		if s > noticed.Seconds() {
			p.problem("a rank had an error %.1f s after a %s was killed: at most %v are allowed", s, p.Kill, noticed)
		}
	}
}

// notice records the first error of a rank after the kill of another rank or of a relay. The killed
// rank has no error.
func (p *phase) notice(r *runningRank, killed time.Time, text string) {
	if r.noticed || r.dies {
		return
	}
	r.noticed = true
	p.Noticed = append(p.Noticed, time.Since(killed).Seconds())
	p.Errors = append(p.Errors, text)
}

// ncclError returns the error from NCCL's log of a rank whose progress thread has failed.
func ncclError(dir string, rank int) string {
	text, _ := os.ReadFile(filepath.Join(dir, fmt.Sprintf("nccl-%d.log", rank)))
	if !bytes.Contains(text, []byte("[Progress Thread]")) {
		return ""
	}
	for _, line := range bytes.Split(text, []byte("\n")) {
		if _, warning, ok := bytes.Cut(line, []byte("NCCL WARN ")); ok {
			return string(warning)
		}
	}
	return "[Progress Thread]"
}

// handleEvent processes an event of a rank, and reports whether the rank is done.
func (p *phase) handleEvent(e event) bool {
	switch e.Kind {
	case "ready":
		p.Torch, p.NCCL, p.NIXL, p.GPU = e.Torch, e.NCCL, e.NIXL, e.GPU
	case "doing":
		p.Doing[e.Rank] = e.What
	case "check":
		p.Checked++
		if e.Problem != "" {
			p.problem("rank %d: %s of %d bytes: %s", e.Rank, e.Operation, e.Bytes, e.Problem)
		}
	case "rate":
		if e.Rank == 0 {
			p.Rates = append(p.Rates, e.RateFound)
		}
	case "list":
		p.Lists = append(p.Lists, listRow{e.Operation, e.ListFound})
	case "trained":
		p.Trained = append(p.Trained, e.TrainFound)
	}
	return e.Kind == "done"
}

// killOne kills the last rank, or its relay. Rank 0 hosts the rendezvous.
func (h *host) killOne(who string, ranks []*runningRank) error {
	last := ranks[len(ranks)-1]
	if who == killRank {
		last.dies = true
		return h.signal(last, unix.SIGKILL)
	}
	pid, err := h.relay(last)
	if err != nil {
		return err
	}
	return unix.Kill(pid, unix.SIGKILL)
}

// diagnose makes hanging processes write their stacks to the logs.
func (h *host) diagnose(ranks []*runningRank, dir string) {
	for _, r := range ranks {
		if r.ended {
			continue
		}
		if pid, err := h.relay(r); err == nil {
			// Go programs then print the stacks of goroutines.
			unix.Kill(pid, unix.SIGQUIT)
		}
		if !r.container {
			writeStacks(r.command.Process.Pid, filepath.Join(dir, fmt.Sprintf("threads-%d", r.number)))
		}
		h.signal(r, unix.SIGUSR1) // Python's: faulthandler
	}
	time.Sleep(min(h.patience, 1500*time.Millisecond)) // time to write
}

// writeStacks writes the kernel stacks of a process's threads.
func writeStacks(pid int, file string) {
	var all bytes.Buffer
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, t := range threads {
		for _, what := range []string{"comm", "wchan", "syscall", "stack"} {
			text, _ := os.ReadFile(filepath.Join(t, what))
			fmt.Fprintf(&all, "%s/%s: %s\n", filepath.Base(t), what, bytes.TrimSpace(text))
		}
	}
	os.WriteFile(file, all.Bytes(), 0o644)
}

// usage queries the counters of each relay.
func (h *host) usage(p *phase, ranks []*runningRank) {
	list, _ := generation.List(h.Layout)
	for _, info := range list {
		k := slices.IndexFunc(ranks, func(r *runningRank) bool { return r.id == info.Container.ID })
		if k < 0 {
			continue
		}
		i, err := control.Inspect(h.Layout, info.ID)
		if err != nil {
			continue // the relay has ended with its rank
		}
		u := relayUsage{Rank: k}
		for _, used := range i.Processes {
			if used.Role == "relay" {
				u.CPU = processorSeconds(used.PID)
			}
		}
		if i.Report != nil {
			u.Report, _ = json.Marshal(i.Report)
		}
		p.Relays = append(p.Relays, u)
	}
}

// processorSeconds returns the CPU time of a process, from /proc/PID/stat.
func processorSeconds(pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(after)
	var user, system float64
	if len(f) > 12 {
		fmt.Sscan(f[11], &user)
		fmt.Sscan(f[12], &system)
	}
	return (user + system) / 100 // USER_HZ
}

// keepLogs copies the logs of relays and supervisors while they exist: a log is removed with its
// rank. The returned function copies a last time and stops.
func (h *host) keepLogs(dir string) func() {
	stop, stopped := make(chan struct{}), make(chan struct{})
	keep := func() {
		files, _ := filepath.Glob(filepath.Join(h.Layout.GenerationDir("*"), "relay.log*"))
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil && len(text) > 0 {
				generation := filepath.Base(filepath.Dir(file))
				os.WriteFile(filepath.Join(dir, strings.Replace(filepath.Base(file), "relay", "relay-"+generation[:8], 1)), text,
					0o644)
			}
		}
	}
	go func() {
		defer close(stopped)
		for tick := time.NewTicker(300 * time.Millisecond); ; {
			select {
			case <-stop:
				tick.Stop()
				return
			case <-tick.C:
				keep()
			}
		}
	}()
	return func() {
		close(stop)
		<-stopped
		keep()
	}
}

// end ends every rank. Ranks that are done may exit within a limit.
func (h *host) end(p *phase, ranks []*runningRank, events <-chan event) error {
	var err error
	left := 0
	for _, r := range ranks {
		if !r.ended {
			left++
		}
		r.in.Close() // already closed for an ended rank
	}
	// After a problem or a kill no rank has time to exit.
	own := len(p.Problems) == 0 && p.Kill == ""
	patience := time.After(h.patience)
	if !own {
		patience = time.After(0)
	}
	var killed <-chan time.Time
	for left > 0 {
		select {
		case e := <-events:
			if e.ended {
				left--
				ranks[e.Rank].ended = true
				if e.exit != nil && killed == nil && own {
					p.problem("rank %d: %v", e.Rank, e.exit)
				}
			}
		case <-patience:
			if own {
				p.problem("%d ranks did not end by themselves", left)
			}
			for _, r := range ranks {
				err = errors.Join(err, h.kill(r))
			}
			killed = time.After(10 * time.Second)
		case <-killed:
			return errors.Join(err, fmt.Errorf("%d ranks cannot be killed", left))
		}
	}
	for _, r := range ranks {
		if killed == nil { // and the remains of killed ranks
			err = errors.Join(err, h.kill(r))
		}
		os.RemoveAll(filepath.Join(h.work, r.id))
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		remaining, _ := filepath.Glob(h.Layout.GenerationDir("*"))
		if len(remaining) == 0 {
			return err
		}
		if time.Now().After(end) {
			return errors.Join(err, fmt.Errorf("%d relays are left", len(remaining)))
		}
	}
}

// master is the rendezvous of ranks: address and port.
func (h *host) master(by string) (string, error) {
	if h.network != nil && by != byNVLink {
		return h.network.address(0) + " 29500", nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return fmt.Sprintf("127.0.0.1 %d", l.Addr().(*net.TCPAddr).Port), nil
}
