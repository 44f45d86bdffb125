// Package exporter exports the figures of a host's relays to Prometheus: the figures of `peerlane
// relay top` and `peerlane relay list`.
package exporter

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
)

// relayStates are the values of the label state: the states of supervisors, "left" for a relay
// without a supervisor, and "ended" for the files of an ended container.
var relayStates = []string{
	generation.StateStarting, generation.StateReady, generation.StateWaiting, generation.StateDown,
	generation.StateStopping, generation.StateStopped,
	generation.StateDraining, generation.StateDrained, generation.StateEnding, stateLeft, stateEnded,
}

const stateLeft, stateEnded = "left", "ended"

// unwanted are the states of relays that are not expected to answer.
var unwanted = []string{generation.StateStopping, generation.StateStopped, generation.StateDraining,
	generation.StateDrained, generation.StateEnding}

// Labels of metrics. relay is opaque and different for every start of a container. container is
// empty unless names are shown. The labels of a lane are the PCI address and the index of its GPU,
// and its NICs, separated by commas.
var (
	ofRelay     = []string{"container", "relay"}
	ofLane      = append(slices.Clone(ofRelay), "gpu", "index", "nic", "direction")
	ofLaneCause = append(slices.Clone(ofLane), "cause")
	ofStaging   = append(slices.Clone(ofRelay), "gpu", "memory")
)

func metric(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc("peerlane_"+name, help, labels, nil)
}

// Metrics. docs/metrics.md, the dashboard and the alerts use them.
var (
	relays      = metric("relays", "Number of containers by the state of their relay.", []string{"state"})
	relayUp     = metric("relay_up", "Whether the relay answered this scrape.", ofRelay)
	relayWanted = metric("relay_wanted",
		"Whether the relay should run: 0 if it was stopped or drained, or its container is ending.", ofRelay)
	relayStarts  = metric("relay_starts_total", "Total number of starts of the container's relay.", ofRelay)
	relayClients = metric("relay_clients", "Number of attached processes of the container.", ofRelay)
	connections  = metric("relay_connections", "Number of open connections, sending and receiving.", ofRelay)
	memories     = metric("relay_memories", "Number of memories that clients have exported.", ofRelay)
	hostMemory   = metric("relay_host_memory_bytes", "Host memory that the relay allocated for its clients, in "+
		"bytes.", ofRelay)
	badHandles = metric("relay_bad_handles_total", "Total number of senders with a handle of no listener of the "+
		"relay.", ofRelay)
	stagedBytes = metric("relay_staged_bytes_total",
		"Total bytes sent and received that were staged on a server GPU or in host memory.", ofRelay)
	directBytes = metric("relay_direct_bytes_total", "Total bytes sent to another container of this host by one copy.",
		ofRelay)

	laneBytes      = metric("lane_bytes_total", "Total bytes of ended operations.", ofLane)
	laneOperations = metric("lane_operations_total", "Total number of ended operations, including failed "+
		"operations.", ofLane)
	laneFailed  = metric("lane_failed_operations_total", "Total number of operations that ended with an error.", ofLane)
	laneInPlace = metric("lane_in_place_bytes_total",
		"Total bytes that NICs read or wrote in GPU memory of clients: staging memory, or memory of near GPUs.", ofLane)
	laneInFlight = metric("lane_operations_in_flight", "Number of operations in flight.", ofLane)
	laneLatency  = metric("lane_operation_duration_seconds",
		"Duration of operations in seconds, from the time at which they could begin; the sum is accurate to an "+
			"eighth.", ofLane)
	laneStalls    = metric("lane_stalls_total", "Total number of ended stalls of operations, by cause.", ofLaneCause)
	laneStallTime = metric("lane_stall_seconds_total", "Total time of stalls of operations, in seconds, by cause.",
		ofLaneCause)
	laneStalled = metric("lane_stalled_operations", "Number of operations that wait now, by cause.", ofLaneCause)
	laneLongest = metric("lane_longest_stall_seconds",
		"Longest current stall of an operation, in seconds, by cause.", ofLaneCause)

	staging       = metric("staging_bytes", "Staging memory of the relay, in bytes.", ofStaging)
	stagingWanted = metric("staging_wanted_bytes", "Staging memory that the relay's configuration requests, in bytes.",
		ofStaging)
	stagingClients = metric("staging_client_bytes", "Staging memory of clients that copy themselves, in bytes.", ofStaging)

	podInfo = metric("pod_info", "1, with the pod of the container, where names are shown.",
		append(slices.Clone(ofRelay), "namespace", "pod", "pod_container", "uid"))

	scrapeErrors = metric("exporter_last_scrape_error", "1 if a part of the relays' state could not be read.", nil)

	buildInfo = metric("build_info", "1, with the release of the exporter and of the compiler.",
		[]string{"version", "commit", "goversion"})

	all = []*prometheus.Desc{
		relays, relayUp, relayWanted, relayStarts, relayClients, connections, memories, hostMemory, badHandles, stagedBytes,
		directBytes,
		laneBytes, laneOperations, laneFailed, laneInPlace, laneInFlight, laneLatency, laneStalls, laneStallTime, laneStalled,
		laneLongest,
		staging, stagingWanted, stagingClients, podInfo, scrapeErrors, buildInfo,
	}
)

// answerTimeout limits the wait for relays. Prometheus aborts a scrape of the host after 10 s.
const answerTimeout = 3 * time.Second

// Source reads the state of a host's relays. An error reports unreadable relays; the snapshot then
// has the readable relays.
type Source func() (Snapshot, error)

// Host returns a source that reads the state directly, which requires root.
func Host(l paths.Layout) Source {
	return func() (Snapshot, error) {
		infos, err := generation.List(l)
		var alive []generation.Info
		for _, info := range infos {
			if info.Supervised {
				alive = append(alive, info)
			}
		}
		return snapshot(infos, control.Ask(l, alive, answerTimeout)), err
	}
}

// ErrTenants is the cause of a refusal to export the metrics of a host with several tenants.
var ErrTenants = errors.New(
	"tenancy = \"multi\", and every user of this host can read metrics; set exporter.multi_tenancy = true to allow this")

// CheckTenancy refuses to export the metrics of a host with several tenants, unless
// exporter.multi_tenancy permits it: every user of the host can read them.
func CheckTenancy(l paths.Layout) error {
	c, err := config.Load(l.ConfigFile())
	if err != nil {
		return err
	}
	if c.CDI.Tenancy == config.TenancyMulti && !c.Exporter.MultiTenancy {
		return fmt.Errorf("export metrics: %s has %w", l.ConfigFile(), ErrTenants)
	}
	return nil
}

// Collector reads its source at every scrape.
type Collector struct {
	look  Source
	log   func(error)
	names bool
}

// New returns the collector of a source. names adds the ids of containers to the metrics. log
// receives read errors.
func New(source Source, names bool, log func(error)) *Collector {
	return &Collector{source, log, names}
}

// Describe sends the descriptions of the metrics.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range all {
		to <- d
	}
}

// Collect reads the source and sends the metrics of readable relays.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	state, err := c.look()
	failed := 0.0
	if err != nil {
		failed = 1
		c.log(err)
	}
	e := emitter(to)
	e.gauge(scrapeErrors, failed)
	build := version.Get()
	e.gauge(buildInfo, 1, label(build.Version), label(build.Commit), label(build.Go))
	count := map[string]int{}
	for _, r := range state.Relays {
		state := r.State
		switch {
		case !r.Supervised && !r.Alive:
			count[stateEnded]++ // an ended container has no further metrics
			continue
		case !r.Supervised:
			state = stateLeft
		case !slices.Contains(relayStates, state): // the state is not written yet, or of another release
			state = generation.StateStarting
		}
		count[state]++
		if !c.names {
			r.Container, r.Pod = "", nil
		}
		if p := r.Pod; p != nil {
			e.gauge(podInfo, 1, label(r.Container), label(r.Label), label(p.Namespace), label(p.Name), label(p.Container),
				label(p.UID))
		}
		e.relay(r)
		wanted := 1.0
		if slices.Contains(unwanted, state) {
			wanted = 0
		}
		e.gauge(relayWanted, wanted, label(r.Container), label(r.Label))
	}
	for _, state := range relayStates {
		e.gauge(relays, float64(count[state]), state)
	}
}

// emitter sends metrics.
type emitter chan<- prometheus.Metric

func (e emitter) gauge(d *prometheus.Desc, value float64, labels ...string) {
	e <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

func (e emitter) counter(d *prometheus.Desc, value uint64, labels ...string) {
	e <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), labels...)
}

// label converts text of a runtime or a relay to a valid label value.
func label(text string) string { return strings.ToValidUTF8(text, "?") }

func (e emitter) relay(relay Relay) {
	of := []string{label(relay.Container), label(relay.Label)}
	e.counter(relayStarts, uint64(max(relay.Starts, 0)), of...)
	if relay.Report == nil {
		e.gauge(relayUp, 0, of...)
		return
	}
	r := relay.Report
	e.gauge(relayUp, 1, of...)
	e.gauge(relayClients, float64(r.Used.Clients), of...)
	e.gauge(connections, float64(r.Used.Connections), of...)
	e.gauge(memories, float64(r.Used.Memories), of...)
	e.gauge(hostMemory, float64(r.Used.HostMemory), of...)
	e.counter(badHandles, r.BadHandles, of...)
	e.counter(stagedBytes, r.Staged, of...)
	e.counter(directBytes, r.Direct, of...)
	clients, servers := gpus(relay.Lanes)
	e.staging(r.Staging, clients, servers, of)
	seen := map[string]bool{} // a compromised relay may repeat a lane
	for _, l := range r.Lanes {
		if seen[l.GPU] || !clients[l.GPU] {
			continue
		}
		seen[l.GPU] = true
		index, nics := lane(relay.Lanes, l.GPU)
		of := append(slices.Clone(of), l.GPU, index, nics)
		e.lane(l.Sent, append(slices.Clone(of), "sent"))
		e.lane(l.Received, append(slices.Clone(of), "received"))
	}
}

// gpus returns the GPUs of a relay's lanes, and the server GPUs of the lanes. The exporter ignores
// other GPUs in a relay's report, so that no relay creates an unlimited number of series.
func gpus(lanes []launch.Lane) (clients, servers map[string]bool) {
	clients, servers = map[string]bool{}, map[string]bool{}
	for _, l := range lanes {
		clients[l.GPU.BusID], servers[l.GPU.BusID] = true, true
		for _, s := range l.Servers {
			servers[s.BusID] = true
		}
		for _, s := range l.Spares {
			servers[s.BusID] = true
		}
	}
	return clients, servers
}

// lane returns the index of a lane's GPU, and the lane's NICs, as labels.
func lane(lanes []launch.Lane, gpu string) (index, nics string) {
	for _, l := range lanes {
		if l.GPU.BusID == gpu {
			return strconv.Itoa(l.GPU.Index), label(strings.Join(l.NICs, ","))
		}
	}
	return "", ""
}

// staging sums the staging of several lanes on a GPU, or in host memory.
func (e emitter) staging(list []launch.Staging, clients, servers map[string]bool, of []string) {
	type place struct{ gpu, memory string }
	type sum struct{ bytes, wanted, clients float64 }
	sums := map[place]sum{}
	var order []place
	for _, s := range list {
		at, known := place{s.GPU, "gpu"}, servers[s.GPU]
		if s.Host {
			at, known = place{s.Lane, "host"}, clients[s.Lane]
		}
		if !known {
			continue
		}
		total, summed := sums[at]
		if !summed {
			order = append(order, at)
		}
		sums[at] = sum{total.bytes + float64(s.Bytes), total.wanted + float64(s.Wanted), total.clients + float64(s.Clients)}
	}
	for _, at := range order {
		of := append(slices.Clone(of), at.gpu, at.memory)
		e.gauge(staging, sums[at].bytes, of...)
		e.gauge(stagingWanted, sums[at].wanted, of...)
		e.gauge(stagingClients, sums[at].clients, of...)
	}
}

func (e emitter) lane(f launch.Figures, of []string) {
	e.counter(laneBytes, f.Bytes, of...)
	e.counter(laneOperations, f.Operations, of...)
	e.counter(laneFailed, f.Failed, of...)
	e.counter(laneInPlace, f.InPlace, of...)
	e.gauge(laneInFlight, float64(f.InFlight), of...)
	count, sum, buckets := histogram(f.Latency)
	e <- prometheus.MustNewConstHistogram(laneLatency, count, sum, buckets, of...)
	// Export every cause from the beginning, so that a rate has a first value.
	for _, cause := range causes {
		var s launch.Stall
		// A relay that started before an upgrade reports "no grant" for no_grant.
		if i := slices.IndexFunc(f.Stalls, func(s launch.Stall) bool {
			return strings.ReplaceAll(s.Cause, " ",
				"_") == cause
		}); i >= 0 {
			s = f.Stalls[i]
		}
		of := append(slices.Clone(of), cause)
		e.counter(laneStalls, s.Count, of...)
		e <- prometheus.MustNewConstMetric(laneStallTime, prometheus.CounterValue, s.Time.Seconds(), of...)
		e.gauge(laneStalled, float64(s.Waiting), of...)
		e.gauge(laneLongest, s.Longest.Seconds(), of...)
	}
}

// causes are the reasons for which operations wait.
var causes = []string{launch.StallNoGrant, launch.StallNoSlot, launch.StallRingFull}

// firstBound and lastBound are the exponents of the histogram's bounds, from 1 µs to 34 s: powers
// of two of nanoseconds, as in the relays' buckets.
const firstBound, lastBound = 10, 35

// histogram converts the buckets of a relay to a Prometheus histogram, whose buckets count the
// operations up to their bound. sum is in seconds.
func histogram(list []launch.Bucket) (count uint64, sum float64, buckets map[float64]uint64) {
	buckets = map[float64]uint64{}
	for power := firstBound; power <= lastBound; power++ {
		bound := time.Duration(1) << power
		within := uint64(0)
		for _, b := range list {
			if b.To <= bound {
				within += b.Count
			}
		}
		buckets[bound.Seconds()] = within
	}
	for _, b := range list {
		count += b.Count
		sum += float64(b.Count) * (b.From + (b.To-b.From)/2).Seconds()
	}
	return count, sum, buckets
}
