package main

import (
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
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
)

// behaviour is the variable that turns this program into a rank and selects the rank's behaviour.
const behaviour = behaviourOfTests

var binaries string

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == becomeRank {
		fmt.Fprintln(os.Stderr, become(os.Stdin, os.Args[2:]))
		os.Exit(1)
	}
	if how := os.Getenv(behaviour); how != "" {
		if err := beRank(how, os.Args[len(os.Args)-1]); err != nil {
			report("failed", map[string]any{"error": err.Error()})
			os.Exit(1)
		}
		report("done", nil)
		io.Copy(io.Discard, os.Stdin) // until the test closes the input
		return
	}
	dir, remove, err := programs.Directory(programs.Hook, programs.Relay)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binaries = dir
	status := m.Run()
	if err := remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}

func report(kind string, what map[string]any) {
	if what == nil {
		what = map[string]any{}
	}
	what["kind"] = kind
	text, _ := json.Marshal(what) // of strings and numbers
	fmt.Println(string(text))
}

// beRank is a rank in place of PyTorch: it sends bytes to the peer through its relay, and compares
// the received bytes.
func beRank(how, text string) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return err
	}
	report("ready", map[string]any{"torch": "none", "nccl": "none", "gpu": "simulated"})
	switch how {
	case "installed":
		return beInstalled(j)
	case "nixl":
		return beAgent(j)
	}
	if err := os.WriteFile(os.Getenv("NCCL_DEBUG_FILE"), []byte(
		"host:1:1 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Peerlane/0/GDRDMA\nhost:1:1 [0] NCCL INFO "+
			"Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Peerlane/0/GDRDMA\n"), 0o644); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "a line of standard error")
	switch last := os.Getenv("RANK") == "1"; {
	case how == "hangs":
		report("doing", map[string]any{"what": "nothing"})
		select {}
	case how == "dies" && last:
		return errors.New("it did")
	case how == "wrong" && last:
		report("check", map[string]any{"operation": "all_reduce", "bytes": 8, "problem": "1 of 2 elements are wrong"})
	case how == "lingers" && last:
		report("done", nil)
		select {}
	}
	if os.Getenv("NCCL_NET") != "Peerlane" {
		report("rate", map[string]any{"operation": "all_reduce", "bytes": 256 * mib, "microseconds": 4000, "bus": 67.1})
		return nil
	}
	return exchange(j)
}

// ncclLog is a part of a log of NCCL 2.28.
const ncclLog = `rank:7:7 [0] NCCL INFO NCCL_DEBUG set by environment to INFO.
rank:7:9 [0] NCCL INFO NET/Peerlane: all lanes of this container reach only this host: NCCL_BUFFSIZE is 16777216 now
rank:7:9 [0] NCCL INFO Using network Peerlane
rank:7:9 [0] NCCL INFO TUNER/Plugin: Using Peerlane (v5)
rank:7:9 [0] NCCL INFO 32 coll channels, 32 collnet channels, 0 nvls channels, 32 p2p channels, 16 p2p channels per peer
`

// beInstalled is a rank of --installed: it reports the variables and the files that select NCCL's
// network.
func beInstalled(j job) error {
	for _, v := range os.Environ() {
		if strings.HasPrefix(v, "NCCL_") && !strings.HasPrefix(v, "NCCL_DEBUG") && !strings.Contains(v, "SOCK") {
			return fmt.Errorf("the rank has the variable %s", v)
		}
	}
	conf, err := os.ReadFile("/etc/nccl.conf")
	_, lane := os.Stat("/run/peerlane/relay.sock")
	if (err == nil) != (lane == nil) || err == nil && !strings.HasPrefix(string(conf), "NCCL_NET_PLUGIN=peerlane\n") {
		return fmt.Errorf("/etc/nccl.conf is %q (%v), and the relay's socket: %v", conf, err, lane)
	}
	if log := os.Getenv("NCCL_DEBUG_FILE"); log != "" {
		if err := os.WriteFile(log, []byte(ncclLog), 0o644); err != nil {
			return err
		}
	}
	if nodes, _ := filepath.Glob("/dev/nvidia[0-9]*"); os.Getenv("LOCAL_RANK") == "1" || len(nodes) != 1 {
		// Both GPUs are in one container.
		report("rate", map[string]any{"operation": "all_reduce", "bytes": 256 * mib, "microseconds": 500, "bus": 500})
		if len(nodes) != 2 {
			return fmt.Errorf("the container has the nodes %q", nodes)
		}
		return nil
	}
	if lane != nil {
		report("rate", map[string]any{"operation": "all_reduce", "bytes": 256 * mib, "microseconds": 4000, "bus": 67.1})
		return nil
	}
	return exchange(j)
}

// beAgent is an agent of NIXL: rank 1 reports a time for each list, ten times Peerlane's for UCX.
func beAgent(j job) error {
	_, lane := os.Stat("/run/peerlane/relay.sock")
	_, plugin := os.LookupEnv("NIXL_PLUGIN_DIR")
	if ours := j.Backend == "PEERLANE"; ours != (lane == nil) || ours != plugin {
		return fmt.Errorf("backend %s has a relay: %v, and a directory of plugins: %v", j.Backend, lane, plugin)
	}
	fmt.Fprintf(os.Stderr, "%s: agent rank-0: route direct\n", j.Backend)
	if os.Getenv("RANK") == "0" {
		return nil
	}
	for _, l := range j.Lists {
		took := map[string]float64{"PEERLANE": 2, "UCX": 20}[j.Backend]
		report("check", map[string]any{"operation": l.Name})
		report("list", map[string]any{"name": l.Name, "operation": "READ", "median_ms": took, "post_ms": 1})
	}
	return nil
}

// exchange sends in both directions, through the relay.
func exchange(j job) error {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	socket := os.Getenv("PEERLANE_SOCKET")
	if socket == "" {
		socket = "/run/peerlane/relay.sock"
	}
	s, err := client.Dial(ctx, socket)
	if err != nil {
		return err
	}
	lanes, err := s.Lanes(ctx)
	if err != nil {
		return err
	}
	gpu := lanes[0].GPU
	listener, err := s.Listen(ctx, gpu)
	if err != nil {
		return err
	}
	theirs, own := listener.Handle(), listener.Handle()
	c, err := meet(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	wrote := json.NewEncoder(c).Encode(own[:])
	var raw []byte
	if err := errors.Join(wrote, json.NewDecoder(c).Decode(&raw)); err != nil {
		return err
	}
	copy(theirs[:], raw)
	to, err := s.Connect(ctx, gpu, theirs)
	if err != nil {
		return err
	}
	of, err := listener.Accept(ctx)
	if err != nil {
		return err
	}
	const size = 1 << 20
	out, err := s.HostMemory(ctx, client.HostMemory{Bytes: size, GPU: gpu})
	if err != nil {
		return err
	}
	in, err := s.HostMemory(ctx, client.HostMemory{Bytes: size, GPU: gpu})
	if err != nil {
		return err
	}
	rank := os.Getenv("RANK")
	copy(out.Data, bytes.Repeat([]byte(rank), size))
	receive, err := of.Receive(in, 0, size)
	if err != nil {
		return err
	}
	if _, err := to.Send(out, 0, size); err != nil {
		return err
	}
	if _, err := receive.Wait(ctx); err != nil {
		return err
	}
	problem := ""
	if want := map[string]string{"0": "1", "1": "0"}[rank]; !bytes.Equal(in.Data, bytes.Repeat([]byte(want), size)) {
		problem = "other bytes have come"
	}
	report("check", map[string]any{"operation": "send_recv", "bytes": size, "problem": problem})
	report("rate", map[string]any{"operation": "all_reduce", "bytes": 256 * mib, "microseconds": 1000, "bus": 268.4})
	if !j.Endless {
		return nil
	}
	report("running", nil)
	select {
	case <-of.Down():
		return fmt.Errorf("the connection ended: %w", of.Err())
	case <-s.Ended():
		return fmt.Errorf("the session ended: %w", s.Err())
	case <-ctx.Done():
		return ctx.Err()
	}
}

// meet connects the two ranks at the rendezvous of PyTorch's ranks.
func meet(ctx context.Context) (net.Conn, error) {
	address := net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT"))
	if os.Getenv("RANK") == "0" {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		return l.Accept()
	}
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err == nil || ctx.Err() != nil {
			return c, err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// simulated returns options for phases whose ranks have a behaviour.
func simulated(t *testing.T, how string, phases ...string) options {
	t.Helper()
	t.Setenv(behaviour, how)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // the race detector's delay at the exit of a rank
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	plugin := filepath.Join(t.TempDir(), "plugin.so")
	if err := os.WriteFile(plugin, []byte("nobody loads it"), 0o644); err != nil {
		t.Fatal(err)
	}
	return options{
		binaries: binaries, plugin: plugin, out: t.TempDir(), program: self, runtime: runtimeNone,
		gpus:     testbed.GPUsSimulated,
		patience: time.Minute, ranks: 2, quick: true, phases: phases, limit: 5 * time.Minute, budget: time.Hour,
		set: []string{"FROM_THE_USER=1"},
	}
}

// found returns the result.json of a run.
func found(t *testing.T, o options) *result {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(o.out, "result.json"))
	if err != nil {
		t.Fatal(err)
	}
	r := &result{}
	if err := json.Unmarshal(text, r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRanksExchangeThroughTheirRelays(t *testing.T) {
	runtimes := []string{runtimeNone}
	if _, err := exec.LookPath("runc"); err == nil && os.Geteuid() == 0 {
		runtimes = append(runtimes, "runc")
	}
	for _, runtime := range runtimes {
		o := simulated(t, "well", "peerlane-rates", "socket-default", "nvlink")
		o.runtime = runtime
		if err := run(context.Background(), o); err != nil {
			t.Fatalf("%s: %v", runtime, err)
		}
		r := found(t, o)
		if len(r.Phases) != 3 || r.Phases[0].Checked != 2 || len(r.Phases[0].Relays) != 2 || len(r.Phases[1].Relays) > 0 &&
			runtime == runtimeNone {
			t.Errorf("%s: %+v", runtime, r.Phases)
		}
		if g := r.Goals[0]; g.Value != 4 || g.Min != 40 {
			t.Errorf("%s: four times as fast is %+v", runtime, g)
		}
		if log := strings.Join(r.Phases[0].Log, "\n"); !strings.Contains(log,
			"0: 2× INFO Channel * : 1 -> 0 [receive] via NET/Peerlane/0/GDRDMA") {
			t.Errorf("%s: result from NCCL's log: %q", runtime, log)
		}
		out, err := exec.Command("tar", "tzf", filepath.Join(o.out, "logs.tar.gz")).Output()
		for _, name := range []string{"logs/peerlane-rates/nccl-0.log", "logs/peerlane-rates/rank-1.stderr",
			"logs/nvlink/rank-0.stdout"} {
			if err != nil || !strings.Contains(string(out), name+"\n") {
				t.Errorf("%s: %s is not among the logs: %v %s", runtime, name, err, out)
			}
		}
	}
}

// needRunc skips a test of containers without runc or root. The tests have cells of place host in
// integration/matrix.txt, so make test fails if one is skipped.
func needRunc(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("runc"); err != nil || os.Geteuid() != 0 {
		t.Skip("needs runc and root")
	}
}

// Containers of --installed have lane=auto, the packages' defaults, and no variable; in NVLink's
// phases a single container has every GPU.
func TestHarnessOfInstalledPackagesSetsNoVariable(t *testing.T) {
	needRunc(t)
	t.Setenv("NCCL_NET", "Socket") // of this program's environment
	o := simulated(t, "installed", installedPrefix+"default", installedPrefix+"log", "socket-4x4", "nvlink",
		"nvlink-with-lanes")
	o.runtime, o.installed, o.set = "runc", true, nil
	if err := run(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	r := found(t, o)
	if len(r.Phases) != 5 {
		t.Fatalf("%d phases", len(r.Phases))
	}
	relays := []int{2, 2, 0, 1, 0} // a container has one relay
	for i, p := range r.Phases {
		if len(p.Relays) != relays[i] || len(p.Rates) != 1 {
			t.Errorf("%s: %d relays, %d rates", p.Name, len(p.Relays), len(p.Rates))
		}
	}
	want := &chosen{
		Network: "Peerlane", Tuner: "Peerlane", Channels: "32 coll channels, 32 collnet channels, 0 nvls channels, 32 p2p " +
			"channels, 16 p2p channels per peer",
		Variables: []string{"NCCL_DEBUG set by environment to INFO",
			"NET/Peerlane: all lanes of this container reach only this host: NCCL_BUFFSIZE is 16777216 now"},
	}
	if diff := cmp.Diff(want, r.Phases[1].Chosen); diff != "" {
		t.Errorf("chosen: -want +got:\n%s", diff)
	}
	for _, want := range []string{"network Peerlane; 32 coll channels",
		"| all_reduce 256 MiB without a variable against the best NET/Socket | 4.00 |", "over NVLink in one container, " +
			"with lanes against without | 1.00 |"} {
		if table := r.table(); !strings.Contains(table, want) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}
}

// Agents of NIXL have lanes and the plugin's directory in the phase over Peerlane alone.
func TestHarnessComparesListsOfNIXL(t *testing.T) {
	needRunc(t)
	o := simulated(t, "nixl", "nixl-peerlane", "nixl-ucx-isolated", "nixl-ucx-shared")
	o.runtime, o.installed, o.set = "runc", true, nil
	if err := run(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	r := found(t, o)
	if r.Row != "nixl" || len(r.Phases) != 3 {
		t.Fatalf("row %q has %d phases", r.Row, len(r.Phases))
	}
	for _, p := range r.Phases {
		if len(p.Lists) != len(p.Job.Lists) || p.Checked != len(p.Job.Lists) {
			t.Errorf("%s: %d lists and %d checks of %d", p.Name, len(p.Lists), p.Checked, len(p.Job.Lists))
		}
	}
	table := r.table()
	for _, want := range []string{
		"| A, READ, against ucx-isolated | 10.00 | ≥ 5 | 2.000 ms to 20.000 ms |",
		"| A, READ, ms | 2.00 | ≤ 30 |",
		"| A, WRITE, ms | not measured |",
		"nixl-peerlane: PEERLANE: agent rank-0: route direct",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}
}

// On a host with one GPU two ranks share the GPU, and the run omits phases that need a second GPU.
// A host that cannot be configured ends the run with an error.
func TestHarnessOnOneGPUSharesIt(t *testing.T) {
	o := simulated(t, "well", "peerlane-rates", "nvlink", "peerlane-staged")
	o.gpus, o.ranks, o.quick = testbed.GPUsOne, 0, false
	if err := run(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	r := found(t, o)
	if len(r.Phases) != 1 || r.Phases[0].Name != "peerlane-rates" || r.Ranks != 2 || len(r.Phases[0].Relays) != 2 {
		t.Errorf("%d ranks: %+v", r.Ranks, r.Phases)
	}
	o.plugin = filepath.Join(t.TempDir(), "none.so")
	if err := run(context.Background(), o); err == nil || !strings.Contains(err.Error(), "none.so") {
		t.Errorf("without a plugin: %v", err)
	}
}

func TestRanksExchangeAsBetweenHosts(t *testing.T) {
	o := simulated(t, "well", "peerlane-tcp-4", "peerlane-staged")
	o.quick = false
	if err := run(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	for _, p := range found(t, o).Phases {
		want := p.Transport
		if want == "" {
			want = launch.TransportVerbs // the phase before leaves no setting
		}
		if len(p.Relays) != 2 {
			t.Errorf("%s: %d relays", p.Name, len(p.Relays))
		}
		for _, r := range p.Relays {
			var report launch.Report
			if err := json.Unmarshal(r.Report, &report); err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(report.Connections, func(c launch.ConnectionFigures) bool { return c.Sends })
			if i < 0 || report.Connections[i].Transport != want {
				t.Errorf("%s: rank %d sends by %+v, want %s", p.Name, r.Rank, report.Connections, want)
			}
		}
	}
}

func TestKillOfRankOrRelayIsNoticed(t *testing.T) {
	o := simulated(t, "well", "peerlane-kill-rank", "peerlane-kill-relay")
	if err := run(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	for i, p := range found(t, o).Phases {
		if len(p.Noticed) != 1+i { // a rank whose relay was killed reports an error too
			t.Errorf("%s: noticed after %v", p.Name, p.Noticed)
		}
	}
}

func TestProblemsOfPhasesAreReported(t *testing.T) {
	for how, want := range map[string]string{
		"dies":    "rank 1: it did",
		"wrong":   "rank 1: all_reduce of 8 bytes: 1 of 2 elements are wrong",
		"lingers": "1 ranks did not end by themselves",
	} {
		o := simulated(t, how, "socket-default")
		o.patience = 100 * time.Millisecond
		if err := run(context.Background(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", how, err)
		}
	}
}

func TestPhaseEndsAtItsLimit(t *testing.T) {
	o := simulated(t, "hangs", "peerlane-rates")
	dir, err := os.MkdirTemp("", "pl") // short, for the length of a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { // relays traverse the directory
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", dir)
	o.limit, o.budget, o.patience = clearing+100*time.Millisecond, 30*time.Second, 100*time.Millisecond
	begun := time.Now()
	err = run(context.Background(), o)
	if err == nil || !strings.Contains(err.Error(), "peerlane-rates: not done within") {
		t.Errorf("%v", err)
	}
	if took := time.Since(begun); took > 5*time.Minute {
		t.Errorf("took %v", took)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// Without time no phase begins.
	o.budget = 10 * time.Second
	if err := run(context.Background(), o); err == nil || !strings.Contains(err.Error(), "s are left of 10s") {
		t.Errorf("%v", err)
	}
}

func TestPlanOfAQuickRunIsPartOfTheWhole(t *testing.T) {
	whole := map[string]bool{}
	for _, s := range plan(options{}, 8) {
		if whole[s.Name] || s.Name == "" {
			t.Errorf("two phases are called %q", s.Name)
		}
		whole[s.Name] = true
	}
	for _, s := range plan(options{quick: true}, 2) {
		if !whole[s.Name] {
			t.Errorf("only the quick run has %s", s.Name)
		}
	}
	seen := map[check]bool{}
	for _, s := range plan(options{}, 8) {
		for _, c := range s.Job.Checks {
			seen[c] = true
		}
	}
	for _, o := range []string{"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"} {
		for _, size := range []int{8, 1 << 30} {
			for _, dtype := range []string{"float32", "bfloat16"} {
				if !seen[check{o, size, dtype}] {
					t.Errorf("nothing checks %s of %d bytes of %s", o, size, dtype)
				}
			}
		}
	}
}

func TestGoalsAreJudged(t *testing.T) {
	measured := func(name string, microseconds float64, losses ...float64) *phase {
		if len(losses) > 0 {
			return &phase{settings: settings{Name: name}, Trained: []TrainFound{{Losses: losses}}}
		}
		p := &phase{settings: settings{Name: name}}
		for _, bytes := range []int{8, 256 * mib} {
			p.Rates = append(p.Rates, RateFound{Operation: "all_reduce", Bytes: bytes, Microseconds: microseconds})
		}
		return p
	}
	paced := measured("peerlane-staged-paced", 50)
	paced.Pace, paced.Rates[1].Bus = 12.5, 5.75
	queued := func(name string, microseconds float64) *phase {
		return &phase{settings: settings{Name: name}, Rates: []RateFound{
			{Operation: "all_reduce", Bytes: 8, Queued: true, Microseconds: microseconds}}}
	}
	r := &result{Ranks: 2, Phases: []*phase{
		paced, queued("peerlane-rates", 12), queued("socket-default", 24),
		measured("peerlane-rates", 20), measured("peerlane-rates-other", 10), measured("socket-default",
			400), measured("socket-8x8", 100), measured("nvlink", 8),
		measured("peerlane-tcp-4", 40), measured("peerlane-tcp-16", 25), measured("peerlane-train", 1, 3, 2,
			1.5), measured("nvlink-train", 1, 1.5, 2, 3.25),
	}}
	r.judge()
	got := map[string]float64{}
	for _, g := range r.Goals {
		got[g.What] = g.Value
	}
	want := map[string]float64{
		"all_reduce 256 MiB against default NET/Socket":                      40, // the faster of ours
		"all_reduce 256 MiB against the best NET/Socket":                     10,
		"all_reduce 256 MiB against one node over NVLink":                    0.8,
		"all_to_all 256 MiB against default NET/Socket":                      0, // not measured
		"all_reduce 8 bytes, time, against NET/Socket":                       0.025,
		"all_reduce 8 bytes queued on the GPU, time, against NET/Socket":     0.5,
		"all_reduce 256 MiB of all ranks over one paced NIC, of its rate":    0.92, // both ranks' 5.75
		"all_reduce 256 MiB over Peerlane's TCP against default NET/Socket":  16,
		"all_reduce 256 MiB over Peerlane's TCP against the best NET/Socket": 4,
		"broadcast 256 MiB over Peerlane's TCP against default NET/Socket":   0,
		"broadcast 256 MiB over Peerlane's TCP against the best NET/Socket":  0,
		"send_recv 256 MiB over Peerlane's TCP against default NET/Socket":   0,
		"send_recv 256 MiB over Peerlane's TCP against the best NET/Socket":  0,
		"losses of peerlane-train that are those of nvlink-train":            2. / 3,
		"losses of peerlane-graphs that are those of nvlink-graphs":          0,
		"losses of peerlane-hosts-train that are those of nvlink-train":      0,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if table := r.table(); !strings.Contains(table, "| all_to_all 256 MiB against default NET/Socket | not measured |") {
		t.Error(table)
	}
}

// PyTorch may report an NCCL error late.
func TestNCCLErrorBehindPyTorchIsFound(t *testing.T) {
	dir := t.TempDir()
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "nccl-1.log"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const warning = "[2026-11-22 18:02:29] container:1:45 [0] connections.c:43 NCCL WARN NET/Peerlane: receiving: the " +
		"relay died\n"
	for _, c := range []struct{ log, want string }{
		{"", ""},
		{warning, ""}, // possibly about an optional feature of NCCL
		{warning + "container:1:45 [0] NCCL INFO proxy.cc:965 -> 6 [Progress Thread]\n",
			"NET/Peerlane: receiving: the relay died"},
		{"container:1:45 [0] NCCL INFO proxy.cc:965 -> 6 [Progress Thread]\n", "[Progress Thread]"},
	} {
		write(c.log)
		if got := ncclError(dir, 1); got != c.want {
			t.Errorf("error of %q: %q", c.log, got)
		}
	}
	if got := ncclError(dir, 0); got != "" {
		t.Errorf("without a log: %q", got)
	}
}
