package integration_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/traffic"
)

func torture(transfers int) traffic.Torture {
	return traffic.Torture{
		GPUs: testbed.GPUsSimulated, MaxGPUs: 2, Binaries: binaries, Seed: 20261122, Transfers: transfers,
		Limit: 5 * time.Minute, Containers: 1,
		Bytes: 2 << 20, Largest: 256 << 10, Pairs: 1, Memory: []string{
			traffic.MemoryGPU}, Load: measure.LoadMemory, KillEach: 200 * time.Millisecond, Kills: 4,
	}
}

// A small run of integration/gpus/transfers on simulated GPUs: messages between all GPUs by both
// routes and in both directions, beside kernels, while the test kills clients and relays.
func TestTransfersSurviveKills(t *testing.T) {
	o := torture(200)
	r, err := o.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if !r.OK(o) {
		t.Errorf("%d transfers, %d wrong, left %v: %s", r.Transfers, r.Wrong, r.Left, strings.Join(r.Problems, "\n"))
	}
	if len(r.Pairs) != 2 || r.Computed <= 0 || !r.Simulated {
		t.Errorf("pairs %v, kernels ran for %v of the time, simulated %v", r.Pairs, r.Computed, r.Simulated)
	}
	t.Logf("%d transfers in %.1f s, sizes %v, killed %v, of which clients met %v", r.Transfers, r.Seconds, r.Sizes,
		r.Kills, r.Explained)
}

// The verification detects a corrupt byte.
func TestTransfersDetectCorruptByte(t *testing.T) {
	o := torture(5000)
	o.KillEach, o.Load = 0, "none"
	o.Change = func(c *config.Config) {
		c.Relay.Environment = append(c.Relay.Environment, "PEERLANE_SIM_FAULT=cuMemcpyAsync:after=20:corrupt=1")
	}
	r, err := o.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(r.Problems, "\n"); r.OK(o) || r.Wrong == 0 || !strings.Contains(text, "WRONG, from") {
		t.Errorf("after %d transfers, %d wrong, the problems are %s", r.Transfers, r.Wrong, text)
	}
}

// The GPU of the relay's copies also executes the baseline, without cuMemcpyPeerAsync, which the
// source's GPU executes.
func TestRawCopiesAvoidPeerAsync(t *testing.T) {
	b := newBed(t, "runc", asItIs)
	b.Environment = append(b.Environment, "PEERLANE_SIM_FAULT=cuMemcpyPeerAsync:error=1")
	m, err := b.StartMeasuring(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	client, server := b.lanes[0].GPU, b.lanes[0].Servers[0]
	for _, direction := range [][2]string{{client, server}, {server, client}} {
		for _, kind := range []string{measure.Raw, measure.Local} {
			job := measure.Job{Kind: kind, From: direction[0], To: direction[1], Issuer: client, Size: 64 << 10, Depth: 2,
				Duration: time.Millisecond, Mapped: true}
			r, err := m.Do(job)
			if err != nil || r.GBs <= 0 && r.Times == nil {
				t.Errorf("%s from %s to %s: %+v, %v", kind, direction[0], direction[1], r, err)
			}
			job.Mapped = false
			if _, err := m.Do(job); err == nil {
				t.Errorf("%s that is not mapped does without cuMemcpyPeerAsync", kind)
			}
		}
	}
}
