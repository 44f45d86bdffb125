package exporter

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"go.yaml.in/yaml/v3"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

const gpu3 = "0000:3b:00.0"

// errDamaged is the error of a generation that is not in the list.
var errDamaged = errors.New("generation a4: the file is damaged")

// working returns a host with a working relay, a relay that does not answer, a relay without a
// supervisor, a drained relay, and the files of an ended container.
func working() ([]generation.Info, control.Reports, error) {
	info := func(id, container, state string, supervised bool) generation.Info {
		return generation.Info{
			Generation: generation.Generation{ID: id, Container: generation.Container{ID: container}, Config: launch.Config{
				Lanes: []launch.Lane{{
					GPU: launch.GPU{Index: 3, BusID: gpu3}, NICs: []string{"mlx5_0", "mlx5_1"},
					Servers: []launch.GPU{{Index: 1, BusID: "0000:18:00.0"}}, Spares: []launch.Spare{
						{GPU: launch.GPU{Index: 4, BusID: "0000:5d:00.0"}}},
				}},
			}},
			Status: generation.Status{State: state, Starts: 2}, Alive: true, Supervised: supervised,
		}
	}
	sent := launch.Figures{
		Operations: 10, Bytes: 4096, Failed: 1, InPlace: 100, InFlight: 3,
		// Relays of earlier releases write the second cause with a blank.
		Stalls: []launch.Stall{{Cause: launch.StallNoGrant, Count: 4, Time: 3 * time.Second, Waiting: 2,
			Longest: time.Second}, {Cause: "ring full", Count: 5}},
		Latency: []launch.Bucket{{From: 768, To: 896, Count: 2}, {From: 1 << 20, To: 5 << 18, Count: 7},
			{From: 7 << 33, To: 1 << 36, Count: 1}},
	}
	report := &launch.Report{
		Used: launch.Limits{Clients: 2, Connections: 5, Memories: 7,
			HostMemory: 1 << 20}, BadHandles: 6, Staged: 8192, Direct: 1024,
		Lanes: []launch.LaneFigures{{GPU: gpu3, Sent: sent}, {GPU: gpu3, Sent: sent}, {GPU: "\xff"}},
		Staging: []launch.Staging{
			{GPU: "0000:18:00.0", Bytes: 100, Wanted: 200, Clients: 5}, {GPU: "0000:18:00.0", Bytes: 11, Wanted: 22},
			{GPU: "0000:5d:00.0", Bytes: 7},
			{Host: true, Lane: gpu3, Bytes: 64},
			// The relay reports GPUs outside its configuration.
			{GPU: "0000:99:00.0", Bytes: 1}, {Host: true, Lane: "0000:99:00.0", Bytes: 1},
		},
	}
	trainer := info("a1", "trainer", generation.StateReady, true)
	trainer.Pod = &generation.Pod{Namespace: "research", Name: "job-0", Container: "main", UID: "0a1b"}
	ended := info("a6", "over", generation.StateReady, false)
	ended.Alive = false
	return []generation.Info{ended, info("a5", "drained", generation.StateDrained, true),
			trainer, info("a2", "silent", "", true), info("a3", "gone",
				generation.StateReady, false)},
		control.Reports{"a1": {Report: report}, "a2": {NoReport: "it starts"}}, errDamaged
}

func registry(t *testing.T) (*prometheus.Registry, *[]error) {
	t.Helper()
	var logged []error
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(&Collector{look: func() (Snapshot, error) {
		infos, reports, err := working()
		return snapshot(infos, reports), err
	}, names: true, log: func(err error) { logged = append(logged, err) }})
	return r, &logged
}

func TestExporterMetricsHaveReportedValues(t *testing.T) {
	r, logged := registry(t)
	const lane = `container="trainer",direction="sent",gpu="0000:3b:00.0",index="3",nic="mlx5_0,mlx5_1",relay="068620d1ac2ad8e4"`
	want := `
# HELP peerlane_pod_info 1, with the pod of the container, where names are shown.
# TYPE peerlane_pod_info gauge
peerlane_pod_info{container="trainer",namespace="research",pod="job-0",pod_container="main",relay="068620d1ac2ad8e4",uid="0a1b"} 1
# HELP peerlane_relays Number of containers by the state of their relay.
# TYPE peerlane_relays gauge
peerlane_relays{state="down"} 0
peerlane_relays{state="drained"} 1
peerlane_relays{state="draining"} 0
peerlane_relays{state="ended"} 1
peerlane_relays{state="ending"} 0
peerlane_relays{state="left"} 1
peerlane_relays{state="ready"} 1
peerlane_relays{state="starting"} 1
peerlane_relays{state="stopped"} 0
peerlane_relays{state="stopping"} 0
peerlane_relays{state="waiting"} 0
# HELP peerlane_relay_up Whether the relay answered this scrape.
# TYPE peerlane_relay_up gauge
peerlane_relay_up{container="drained",relay="38b61dd6648f2f75"} 0
peerlane_relay_up{container="gone",relay="dfaa881903bc2324"} 0
peerlane_relay_up{container="silent",relay="d389ccdfe17105ef"} 0
peerlane_relay_up{container="trainer",relay="068620d1ac2ad8e4"} 1
# HELP peerlane_relay_wanted Whether the relay should run: 0 if it was stopped or drained, or its container is ending.
# TYPE peerlane_relay_wanted gauge
peerlane_relay_wanted{container="drained",relay="38b61dd6648f2f75"} 0
peerlane_relay_wanted{container="gone",relay="dfaa881903bc2324"} 1
peerlane_relay_wanted{container="silent",relay="d389ccdfe17105ef"} 1
peerlane_relay_wanted{container="trainer",relay="068620d1ac2ad8e4"} 1
# HELP peerlane_staging_bytes Staging memory of the relay, in bytes.
# TYPE peerlane_staging_bytes gauge
peerlane_staging_bytes{container="trainer",gpu="0000:18:00.0",memory="gpu",relay="068620d1ac2ad8e4"} 111
peerlane_staging_bytes{container="trainer",gpu="0000:3b:00.0",memory="host",relay="068620d1ac2ad8e4"} 64
peerlane_staging_bytes{container="trainer",gpu="0000:5d:00.0",memory="gpu",relay="068620d1ac2ad8e4"} 7
# HELP peerlane_exporter_last_scrape_error 1 if a part of the relays' state could not be read.
# TYPE peerlane_exporter_last_scrape_error gauge
peerlane_exporter_last_scrape_error 1
`
	if err := testutil.GatherAndCompare(r, strings.NewReader(want), "peerlane_relays", "peerlane_relay_up",
		"peerlane_relay_wanted", "peerlane_pod_info",
		"peerlane_staging_bytes", "peerlane_exporter_last_scrape_error"); err != nil {
		t.Error(err)
	}
	if len(*logged) != 1 || !errors.Is((*logged)[0], errDamaged) {
		t.Errorf("logged %v", *logged)
	}
	if n, err := testutil.GatherAndCount(r, "peerlane_lane_bytes_total"); err != nil || n != 2 {
		t.Errorf("%d series of the one lane, of two directions: %v", n, err)
	}
	values := map[string]float64{}
	for _, f := range gather(t, r) {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			key := strings.TrimPrefix(f.GetName(), "peerlane_") + "{" + strings.Join(labels, ",") + "}"
			values[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if h := m.GetHistogram(); h != nil && strings.Contains(key, `index="3"`) && strings.Contains(key, `"sent"`) {
				checkHistogram(t, h)
			}
		}
	}
	relay := `{container="trainer",relay="068620d1ac2ad8e4"}`
	cause := `{cause="no_grant",` + lane + `}`
	for key, want := range map[string]float64{
		"relay_starts_total" + relay: 2, "relay_clients" + relay: 2, "relay_connections" + relay: 5, "relay_memories" +
			relay: 7, "relay_host_memory_bytes" + relay: 1 << 20,
		"relay_bad_handles_total" + relay: 6, "relay_staged_bytes_total" + relay: 8192, "relay_direct_bytes_total" +
			relay: 1024,
		"lane_bytes_total{" + lane + "}": 4096, "lane_operations_total{" + lane + "}": 10, "lane_failed_operations_total{" +
			lane + "}": 1,
		"lane_in_place_bytes_total{" + lane + "}": 100, "lane_operations_in_flight{" + lane + "}": 3,
		"lane_stalls_total" + cause: 4, "lane_stall_seconds_total" + cause: 3, "lane_stalled_operations" + cause: 2,
		"lane_longest_stall_seconds" + cause:                                                                 1,
		"lane_stalls_total" + strings.Replace(cause, "no_grant", "no_slot", 1):                               0,
		"lane_stalls_total" + strings.Replace(cause, "no_grant", "ring_full", 1):                             5,
		`staging_wanted_bytes{container="trainer",gpu="0000:18:00.0",memory="gpu",relay="068620d1ac2ad8e4"}`: 222,
		`staging_client_bytes{container="trainer",gpu="0000:18:00.0",memory="gpu",relay="068620d1ac2ad8e4"}`: 5,
	} {
		if got, ok := values[key]; !ok || got != want {
			t.Errorf("%s is %v (%v), want %v", key, got, ok, want)
		}
	}
}

func checkHistogram(t *testing.T, h *dto.Histogram) {
	t.Helper()
	got := map[float64]uint64{}
	for _, b := range h.GetBucket() {
		got[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	seconds := func(power int) float64 { return (time.Duration(1) << power).Seconds() }
	for power, want := range map[int]uint64{10: 2, 20: 2, 21: 9, 35: 9} {
		if n, ok := got[seconds(power)]; !ok || n != want {
			t.Errorf("%v took at most %g s (%v), want %d", n, seconds(power), ok, want)
		}
	}
	// 2 of 832 ns, 7 of 1.18 ms, one of 64 s.
	if sum := h.GetSampleSum(); h.GetSampleCount() != 10 || sum < 64 || sum > 65 {
		t.Errorf("%d operations took %g s", h.GetSampleCount(), sum)
	}
}

func gather(t *testing.T, r prometheus.Gatherer) []*dto.MetricFamily {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// Every user of the host can scrape the loopback address, so the metrics contain no container id
// and no generation.
func TestExporterHidesContainersWithoutNames(t *testing.T) {
	source := func() (Snapshot, error) {
		infos, reports, _ := working()
		return snapshot(infos, reports), nil
	}
	for _, names := range []bool{false, true} {
		r := prometheus.NewPedanticRegistry()
		r.MustRegister(New(source, names, func(error) {}))
		relays := map[string]bool{}
		for _, f := range gather(t, r) {
			if f.GetName() == "peerlane_pod_info" && !names {
				t.Errorf("%s is there without names", f.GetName())
			}
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					switch l.GetName() {
					case "generation":
						t.Errorf("%s has a generation", f.GetName())
					case "container":
						if (l.GetValue() != "") != names {
							t.Errorf("names %v: %s is of container %q", names, f.GetName(), l.GetValue())
						}
					case "relay":
						relays[l.GetValue()] = true
						if len(l.GetValue()) != 16 {
							t.Errorf("%s is of relay %q", f.GetName(), l.GetValue())
						}
					}
				}
			}
		}
		if len(relays) != 4 {
			t.Errorf("names %v: relays %v", names, relays)
		}
	}
}

// Remote returns the host's snapshot as Write sent it over the socket, with its read errors.
func TestRemoteReturnsWrittenSnapshot(t *testing.T) {
	infos, reports, broken := working()
	socket := filepath.Join(t.TempDir(), "collector.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	served := make(chan error, 2)
	go func() {
		c, err := l.Accept()
		if err == nil {
			err = errors.Join(Write(c, func() (Snapshot, error) { return snapshot(infos, reports), broken }), c.Close())
		}
		served <- err
		if c, err = l.Accept(); err == nil {
			_, err = c.Write([]byte(`{"relays": [`))
			err = errors.Join(err, c.Close())
		}
		served <- err
	}()
	got, err := Remote(socket)()
	if e, ok := errors.AsType[*collectorError](err); !ok || e.text != fmt.Sprint(broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
	got.Error = ""
	want := snapshot(infos, reports)
	text, err := json.Marshal(want) // encoding/json replaces invalid UTF-8
	if err == nil {
		err = json.Unmarshal(text, &want)
	}
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
	_, err = Remote(socket)()
	if f, ok := errors.AsType[*fault.Error](err); !ok || f.Object != socket || !errors.Is(err, io.ErrUnexpectedEOF) ||
		f.Remedy != "journalctl -u 'peerlane-exporter-collector@*' has the collector's error" {
		t.Errorf("error of an incomplete snapshot: %v", err)
	}
	for range 2 {
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
	_, err = Remote(socket + "x")()
	if f, ok := errors.AsType[*fault.Error](err); !ok || !errors.Is(err, fs.ErrNotExist) ||
		f.Remedy != "systemctl start peerlane-exporter-collector.socket" {
		t.Errorf("without a socket: %v", err)
	}
}

// promtool's rules accept the metrics, and the exporter exports every described metric.
func TestMetricsAreNamedAsPrometheusWants(t *testing.T) {
	r, _ := registry(t)
	problems, err := testutil.GatherAndLint(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if families := gather(t, r); len(families) != len(all) {
		t.Errorf("%d families of metrics, and %d are described", len(families), len(all))
	}
}

// labelsOf maps the names of metrics in queries to their labels.
func labelsOf(t *testing.T) map[string][]string {
	t.Helper()
	r, _ := registry(t)
	known := map[string][]string{}
	for _, f := range gather(t, r) {
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		if f.GetType() != dto.MetricType_HISTOGRAM {
			known[f.GetName()] = labels
			continue
		}
		known[f.GetName()+"_bucket"] = append(slices.Clone(labels), "le")
		known[f.GetName()+"_sum"], known[f.GetName()+"_count"] = labels, labels
	}
	return known
}

var (
	metricName = regexp.MustCompile(`\bpeerlane_[a-z0-9_]+`)
	byLabels   = regexp.MustCompile(`\bby \(([^)]*)\)`)
	matcher    = regexp.MustCompile(`([a-z_]+)(?:=~|!~|!=|=)"`)
)

// checkQuery returns the names in a query of one metric that the exporter does not export.
func checkQuery(known map[string][]string, query string) (wrong []string) {
	names := metricName.FindAllString(query, -1)
	if len(names) == 0 {
		return []string{"no metric of Peerlane's"}
	}
	for _, name := range names {
		labels, ok := known[name]
		if !ok {
			wrong = append(wrong, name)
			continue
		}
		var used []string
		for _, m := range byLabels.FindAllStringSubmatch(query, -1) {
			used = append(used, strings.Split(m[1], ", ")...)
		}
		for _, m := range matcher.FindAllStringSubmatch(query, -1) {
			used = append(used, m[1])
		}
		for _, l := range used {
			if l != "instance" && !slices.Contains(labels, l) { // Prometheus adds instance
				wrong = append(wrong, name+" has no label "+l)
			}
		}
	}
	return wrong
}

func TestDashboardNamesExistingMetrics(t *testing.T) {
	known := labelsOf(t)
	text, err := os.ReadFile("../../../packaging/prometheus/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	queries := 0
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			queries++
			for _, wrong := range checkQuery(known, target.Expr) {
				t.Errorf("panel %q: %s in %s", p.Title, wrong, target.Expr)
			}
		}
	}
	for _, v := range d.Templating.List {
		if v.Definition != "" && len(checkQuery(known, v.Definition)) > 0 {
			t.Errorf("variable %s: %s", v.Name, v.Definition)
		}
	}
	if queries < 10 {
		t.Errorf("%d queries were looked at", queries)
	}
	// checkQuery reports wrong names.
	for query, want := range map[string]string{
		`rate(peerlane_lane_octets_total[5m])`: "peerlane_lane_octets_total",
		`sum by (rail) (peerlane_relays)`:      "no label rail",
		`peerlane_relays{nic="x"}`:             "no label nic", `up`: "no metric",
	} {
		if wrong := strings.Join(checkQuery(known, query), ", "); !strings.Contains(wrong, want) {
			t.Errorf("checkQuery(%s) = %q", query, wrong)
		}
	}
}

// duration matches a duration of Prometheus.
var duration = regexp.MustCompile(`^([0-9]+(ms|[smhdwy]))+$`)

func TestAlertsNameExistingMetrics(t *testing.T) {
	known := labelsOf(t)
	f, err := os.Open("../../../packaging/prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var rules struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(&rules); err != nil {
		t.Fatal(err)
	}
	states := map[string]bool{}
	for _, s := range relayStates {
		states[s] = true
	}
	count, up := 0, false
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			count++
			if r.Expr == `up{job="peerlane"} == 0` { // a metric of Prometheus itself
				up = true
				r.Expr = "peerlane_relays"
			}
			if strings.Contains(r.Expr, "peerlane_relay_up ") && !strings.Contains(r.Expr, "peerlane_relay_wanted") {
				t.Errorf("%s is about relays that were stopped on purpose, too", r.Alert)
			}
			if r.Labels["severity"] == "critical" && strings.Contains(r.Expr, "ended") {
				t.Errorf("%s makes what an ended container left critical", r.Alert)
			}
			for _, wrong := range checkQuery(known, r.Expr) {
				t.Errorf("%s: %s in %s", r.Alert, wrong, r.Expr)
			}
			if r.For != "" && !duration.MatchString(r.For) || r.Labels["severity"] == "" || r.Annotations["summary"] == "" ||
				r.Annotations["description"] == "" {
				t.Errorf("%s is not whole: %+v", r.Alert, r)
			}
			for _, m := range regexp.MustCompile(`state=~?"([^"]*)"`).FindAllStringSubmatch(r.Expr, -1) {
				for _, s := range strings.Split(m[1], "|") {
					if !states[s] {
						t.Errorf("%s is about the state %q, which there is not", r.Alert, s)
					}
				}
			}
		}
	}
	if !up {
		t.Error("no alert says that the exporter does not answer")
	}
	if count < 5 {
		t.Errorf("%d alerts", count)
	}
}

func TestMetricsDocumentIsCurrent(t *testing.T) {
	const path = "../../../docs/metrics.md"
	r, _ := registry(t)
	var b strings.Builder
	b.WriteString("<!-- Written by `go test ./cmd/peerlane/exporter -update`. -->\n\n" + `# Metrics

` + "`peerlane exporter`" + ` serves the metrics of a host's relays for Prometheus at
http://127.0.0.1:9836/metrics (` + "`--listen`" + `), and asks relays at each scrape. ` + "`--web-config FILE`" + ` is a
[web configuration](https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md)
for TLS and passwords.

` + "`systemctl enable --now peerlane-exporter.service`" + ` runs it as the user peerlane-exporter without
capabilities; peerlane-exporter-collector.socket, which only that group opens, starts
` + "`peerlane exporter collect`" + ` as root for each scrape. Only /run/peerlane-exporter/metrics.sock, for that
group, has containers' ids. Arguments go into /etc/peerlane/exporter.env:
` + "`PEERLANE_EXPORTER_ARGS=--listen :9836 --web-config /etc/peerlane/web.yaml`" + `. With
` + "`cdi.tenancy = \"multi\"`" + ` it needs ` + "`exporter.multi_tenancy`" + `.

packaging/prometheus (/usr/share/peerlane) has a Grafana dashboard and alerts for the job ` + "`peerlane`" + `.
Tests check their metrics, labels and syntax; the dashboard was not loaded in Grafana.

` + "`relay`" + ` is opaque and new at each start of a container; ` + "`container`" + ` is its id, empty on loopback.
Counters restart with the relay. A relay that does not answer within 3 s, or was stopped, has
` + "`peerlane_relay_up`" + ` 0; ` + "`peerlane_relay_wanted`" + ` says whether it should run. A lane has its GPU's PCI
address (` + "`gpu`" + `), index, and NICs with commas.

| metric | type | labels | |
|---|---|---|---|
`)
	for _, f := range gather(t, r) {
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", f.GetName(), strings.ToLower(f.GetType().String()),
			strings.Join(labels, ", "), f.GetHelp())
	}
	fmt.Fprintf(&b,
		"\n`state` is one of %s; `cause` one of %s; `memory` is gpu, or host where a lane bounces; `direction` is sent or "+
			"received.\n",
		strings.Join(relayStates, ", "), strings.Join(causes, ", "))
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(b.String(), string(got)); diff != "" {
		t.Errorf("%s (-want +got; go test -update writes it):\n%s", path, diff)
	}
}

// The hook and the relay do not link the Prometheus client.
func TestHookAndRelayDoNotGrow(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "../../peerlane-hook", "../../peerlane-relay",
		"../../peerlane-runtime").Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, "github.com/peerlane/peerlane/hook") {
		t.Fatal("the list of packages lacks the hook's")
	}
	for _, p := range packages {
		if strings.Contains(p, "prometheus") || strings.Contains(p, "peerlane/cmd/peerlane/") {
			t.Errorf("%s is linked in", p)
		}
	}
}
