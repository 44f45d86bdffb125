package relay_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// clientCalls is a program's report on the CUDA calls of package client.
type clientCalls struct {
	First, Second string // errors of the program's two tries
	Begin, End    int    // range of the first try's calls of package client, among the program's calls
	Files, Maps   int    // at the end
}

// playClient is a program that makes the CUDA calls of package client, twice.
func playClient() error {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	runtime.LockOSThread()
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	if _, err := d.CtxCreate(0, cuda.CtxOptions{}); err != nil {
		return err
	}
	stream, err := d.StreamCreate()
	if err != nil {
		return err
	}
	id, err := wire.ParseGPU(os.Getenv("PEERLANE_TEST_GPU"))
	if err != nil {
		return err
	}
	self := &subject{cmd: &exec.Cmd{Process: &os.Process{Pid: os.Getpid()}}}
	before, err := self.holds()
	if err != nil {
		return err
	}
	s, err := client.Dial(ctx, os.Getenv("PEERLANE_TEST_SOCKET"), id)
	if err != nil {
		return err
	}
	calls := func() int {
		text, _ := os.ReadFile(os.Getenv("PEERLANE_TEST_CALLS"))
		return strings.Count(string(text), "\n")
	}
	said := clientCalls{Begin: calls()}
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	said.First = text(callCUDA(ctx, d, stream, s, id))
	said.End = calls()
	said.Second = text(callCUDA(ctx, d, stream, s, id))
	if err := s.Close(); err != nil {
		return err
	}
	h, err := self.holds()
	// The end of the session unmaps the rings a moment after Close. A lost context frees nothing,
	// and the test does not check the rest then.
	fault := os.Getenv("PEERLANE_TEST_FAULT")
	call, _, _ := strings.Cut(fault, ":")
	lost, most := contextLost(fault), before.mappings+kept[call].mappings
	for w := testutil.BeginFor(2 * time.Second); err == nil && !lost && h.mappings > most &&
		!w.Over(); time.Sleep(10 * time.Millisecond) {
		h, err = self.holds()
	}
	if err != nil {
		return err
	}
	said.Files, said.Maps = h.files, h.mappings
	return json.NewEncoder(os.Stdout).Encode(said)
}

// kept has the resources that stay if the driver does not free memory: the file and the mapping.
var kept = map[string]holding{"cuMemRelease": {files: 1, mappings: 1}, "cuMemUnmap": {files: 1, mappings: 1}}

// contextLost reports that a CUDA context is lost after a fault with this effect.
func contextLost(effect string) bool {
	return strings.HasSuffix(effect, "lost") || strings.HasSuffix(effect, "error=700")
}

// callCUDA makes and frees timelines, a hand-over and staging memory.
func callCUDA(ctx context.Context, d *cuda.Driver, stream cuda.Stream, s *client.Session, id wire.UUID) (err error) {
	timelines, err := s.RegisterTimelines(d)
	if err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	defer func() {
		failed := timelines.Unregister()
		if failed != nil { // can be repeated
			failed = errors.Join(failed, timelines.Unregister())
		}
		err = errors.Join(err, failed)
	}()
	m, err := s.Staging(ctx, d, client.Staging{Bytes: mib, GPU: id})
	if err != nil {
		return fmt.Errorf("staging: %w", err)
	}
	defer func() { err = errors.Join(err, m.Unexport(ctx)) }()
	line, err := s.Timeline(0)
	if err != nil {
		return err
	}
	hand, err := s.HandOver(1, wire.TurnStream)
	if err != nil {
		return err
	}
	line.Advance(1)
	return errors.Join(timelines.Wait(stream, line, 1), timelines.Write(stream, line, 2), timelines.Take(stream, hand),
		timelines.Give(stream, hand),
		d.StreamSynchronize(stream))
}

// Every CUDA call of package client meets every fault: the program is told of the call, in time,
// its next try works where the context is not lost, and nothing is left behind, in the client or in
// the relay, which goes on.
//
// PEERLANE_FAULTS=all tries all faults; else there is one of each call.
//
// It also runs on two real GPUs, with PEERLANE_TEST_CUDA=driver and PEERLANE_TEST_FAULTS_LIBRARY.
func TestClientCUDAFaultsReturnErrors(t *testing.T) {
	needGPUs(t, 2)
	needForwarding(t)
	h := newHost(t)
	h.nic("nic0")
	h.change = func(c *launch.Config) {
		for i := range c.Lanes {
			c.Lanes[i].Copy = true
		}
	}
	socket := h.relay("a", launch.RouteStaged, far(0, 1, "nic0"))
	dir := t.TempDir()
	run := func(number int, fault string) (said clientCalls, calls []string, err error) {
		list := filepath.Join(dir, fmt.Sprint(number))
		log, err := os.Create(list + ".log")
		if err != nil {
			return said, nil, err
		}
		defer log.Close()
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "PEERLANE_TEST_ROLE=client", "GORACE=atexit_sleep_ms=0",
			"PEERLANE_TEST_FAULT="+fault, "PEERLANE_TEST_CALLS="+list,
			"PEERLANE_TEST_SOCKET="+socket, "PEERLANE_TEST_GPU="+devices[0].UUID)
		cmd.Env = append(cmd.Env, faulty(fault, list)...)
		cmd.Stderr = log
		out, err := cmd.Output()
		if err == nil {
			err = json.Unmarshal(out, &said)
		}
		if err != nil {
			text, _ := os.ReadFile(log.Name())
			return said, nil, fmt.Errorf("%w: %s%s", err, out, text)
		}
		text, err := os.ReadFile(list)
		return said, strings.Fields(string(text)), err
	}
	idle, calls, err := run(0, "")
	if err != nil || idle.First+idle.Second != "" {
		t.Fatalf("without a fault: %+v, %v", idle, err)
	}
	all := os.Getenv("PEERLANE_FAULTS") == "all"
	var list []fault
	seen := map[string]int{}
	for i, call := range calls[:idle.End] {
		f := fault{call: call, after: seen[call]}
		seen[call]++
		if i < idle.Begin || call == "cuStreamSynchronize" { // a call of the program
			continue
		}
		for n, effect := range []string{"error=304", "oom", "error=700", "lost", "delay=200"} {
			f.effect = effect
			if all || n == len(list)%4 && !slices.ContainsFunc(list, func(other fault) bool { return other.call == call }) {
				list = append(list, f)
			}
		}
	}
	if len(list) < 8 {
		t.Fatalf("package client makes only these calls: %v", calls[idle.Begin:idle.End])
	}
	var group sync.WaitGroup
	turns := make(chan struct{}, 2)
	for i, f := range list {
		turns <- struct{}{}
		group.Go(func() {
			defer func() { <-turns }()
			said, calls, err := run(i+1, f.String())
			counts := map[string]int{}
			for _, call := range calls {
				counts[call]++
			}
			if f.effect != "delay=200" {
				counts[f.call+" failed"]++
			}
			lost := contextLost(f.effect)
			switch {
			case err != nil:
				t.Errorf("%v: %v", f, err)
			case f.effect == "delay=200" && said.First+said.Second != "":
				t.Errorf("%v: a delay is no error: %+v", f, said)
			case f.effect != "delay=200" && !f.isNamed(said.First):
				t.Errorf("%v: the program was told %q", f, said.First)
			case !lost && said.Second != "":
				t.Errorf("%v: the next try failed: %s", f, said.Second)
			case lost: // no call can release anything
			case said.Files > idle.Files+kept[f.call].files, said.Maps > idle.Maps+kept[f.call].mappings:
				t.Errorf("%v: it leaks: %+v, without a fault %+v", f, said, idle)
			}
			for taken, given := range map[string]string{"cuMemMap": "cuMemUnmap", "cuMemAddressReserve": "cuMemAddressFree",
				"cuMemHostRegister": "cuMemHostUnregister"} {
				if !lost && counts[taken]-counts[taken+" failed"] > counts[given] {
					t.Errorf("%v: of %d %s %d were taken back by %s", f, counts[taken], taken, counts[given], given)
				}
			}
		})
	}
	group.Wait()
	t.Logf("%d faults, of %d calls", len(list), idle.End-idle.Begin)
	// The relay has freed the memory.
	s := attach(t, socket)
	m, err := s.Staging(within(t), driver, client.Staging{Bytes: mib, GPU: uuid(t, 0)})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Unexport(within(t)); err != nil {
		t.Error(err)
	}
}
