package rules

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
)

// ofPods has the alerts and the dashboard of the chart.
const ofPods = "../../../kubernetes/chart/files/"

// metric matches a row of docs/metrics.md.
var metric = regexp.MustCompile(`(?m)^\| (peerlane_[a-z_]+) \| ([a-z]+) \| ([a-z_, ]*) \|`)

// metrics returns the labels of each metric that the DaemonSet exports, which have the labels of the
// target, too. Tests of the exporters compare the same names with their registries.
func metrics(t *testing.T) map[string]map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]map[string]bool{}
	add := func(name, list string, more ...string) {
		known[name] = map[string]bool{"instance": true, "job": true, "node": true}
		for _, l := range append(strings.Split(list, ", "), more...) {
			known[name][l] = true
		}
	}
	for _, row := range metric.FindAllStringSubmatch(string(text), -1) {
		if add(row[1], row[3]); row[2] == "histogram" {
			add(row[1]+"_bucket", row[3], "le")
		}
	}
	source, err := os.ReadFile("../../../kubernetes/health/metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	const declared = `[]string{"gpu", "condition"}`
	if !strings.Contains(string(source), `"peerlane_lane_condition"`) || !strings.Contains(string(source), declared) {
		t.Errorf("health/metrics.go declares peerlane_lane_condition otherwise than %s", declared)
	}
	add("peerlane_lane_condition", "gpu, condition")
	if len(known) < 20 {
		t.Fatalf("docs/metrics.md has the metrics %v", slices.Sorted(maps.Keys(known)))
	}
	return known
}

// unknownNames returns the metrics of a query that do not exist, and the labels that no metric of the query has.
func unknownNames(known map[string]map[string]bool, query string) (wrong []string, err error) {
	expression, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		if s, ok := node.(*parser.VectorSelector); ok {
			of := known[s.Name]
			if of == nil {
				wrong = append(wrong, s.Name)
			}
			for _, m := range s.LabelMatchers {
				if m.Name != labels.MetricName && of != nil && !of[m.Name] {
					wrong = append(wrong, s.Name+"{"+m.Name+"}")
				}
			}
			maps.Copy(all, of)
		}
		return nil
	})
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		var used []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			used = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = append(slices.Clone(n.VectorMatching.MatchingLabels), n.VectorMatching.Include...)
			}
		}
		for _, l := range used {
			if !all[l] {
				wrong = append(wrong, l)
			}
		}
		return nil
	})
	return wrong, nil
}

func TestQueriesOfPodsNameExistingMetricsAndLabels(t *testing.T) {
	known := metrics(t)
	text, err := os.ReadFile(ofPods + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var document any
	if err := json.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	list := queries(document)
	for _, r := range podAlerts(t) {
		list = append(list, r.Expr)
	}
	if len(list) < 20 {
		t.Errorf("%d queries", len(list))
	}
	for _, q := range list {
		if wrong, err := unknownNames(known, fill(q)); err != nil || len(wrong) > 0 {
			t.Errorf("%v: %v in %s", err, wrong, q)
		}
	}
	for query, want := range map[string][]string{
		`rate(peerlane_lane_octets_total[5m])`:                                 {"peerlane_lane_octets_total"},
		`sum by (rail) (peerlane_relays)`:                                      {"rail"},
		`peerlane_relays{nic="x"}`:                                             {"peerlane_relays{nic}"},
		`peerlane_relay_up * on (instance, zone) group_left peerlane_pod_info`: {"zone"},
	} {
		if got, err := unknownNames(known, query); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %v; %v is expected", query, got, err, want)
		}
	}
}

// labelValues matches the query of a variable of Grafana.
var labelValues = regexp.MustCompile(`^label_values\(([^,]+), ([a-z_]+)\)$`)

func TestVariablesOfThePodsDashboardNameExistingLabels(t *testing.T) {
	known := metrics(t)
	text, err := os.ReadFile(ofPods + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, v := range d.Templating.List {
		names = append(names, v.Name)
		if v.Definition == "" {
			continue
		}
		parts := labelValues.FindStringSubmatch(v.Definition)
		if parts == nil {
			t.Errorf("%s: %s", v.Name, v.Definition)
			continue
		}
		wrong, err := unknownNames(known, fmt.Sprintf("group by (%s) (%s)", parts[2], fill(parts[1])))
		if err != nil || len(wrong) > 0 {
			t.Errorf("%s: %v, %v", v.Name, wrong, err)
		}
	}
	for _, used := range regexp.MustCompile(`\$([a-z]+)`).FindAllStringSubmatch(string(text), -1) {
		if !slices.Contains(names, used[1]) {
			t.Errorf("the dashboard has no variable %s", used[1])
		}
	}
}

// podAlerts returns the alerts of the chart.
func podAlerts(t *testing.T) []rulefmt.Rule {
	t.Helper()
	text, err := os.ReadFile(ofPods + "alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := checkRules(text); err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.Parse(text, false, model.UTF8Validation, parser.NewParser(parser.Options{}), nil)
	if len(errs) > 0 || len(groups.Groups) != 1 {
		t.Fatal(errs)
	}
	return groups.Groups[0].Rules
}

// quiet are series of a node on which no alert fires: two pods, the second with two lanes.
const quiet = `
	peerlane_pod_info{instance="a",relay="r1",container="id1",namespace="ml",pod="one",pod_container="main",uid="1"} 1x60
	peerlane_pod_info{instance="a",relay="r2",container="id2",namespace="ml",pod="two",pod_container="trainer",uid="2"} 1x60
	peerlane_relay_up{instance="a",relay="r1",container="id1",pod="peerlane-x",namespace="peerlane"} 1x60
	peerlane_relay_up{instance="a",relay="r2",container="id2",pod="peerlane-x",namespace="peerlane"} %[1]s
	peerlane_relay_wanted{instance="a",relay="r1",container="id1",pod="peerlane-x",namespace="peerlane"} 1x60
	peerlane_relay_wanted{instance="a",relay="r2",container="id2",pod="peerlane-x",namespace="peerlane"} 1x60
	peerlane_relay_starts_total{instance="a",relay="r2",container="id2"} %[2]s
	peerlane_lane_operations_in_flight{instance="a",relay="r1",container="id1",gpu="g0",index="0",nic="n",direction="sent"} 0x60
	peerlane_lane_operations_in_flight{instance="a",relay="r2",container="id2",gpu="g1",index="1",nic="n",direction="sent"} 0x60
	peerlane_lane_operations_in_flight{instance="a",relay="r2",container="id2",gpu="g1",index="1",nic="n",direction="received"} 0x60
	peerlane_lane_operations_in_flight{instance="a",relay="r2",container="id2",gpu="g2",index="2",nic="n",direction="sent"} 0x60
	peerlane_lane_condition{instance="a",gpu="g0",condition="no-network"} 0x60
	peerlane_lane_condition{instance="a",gpu="g1",condition="no-network"} %[3]s
	peerlane_lane_condition{instance="a",gpu="g1",condition="degraded"} %[4]s
	peerlane_lane_condition{instance="a",gpu="g2",condition="no-network"} 0x60
	peerlane_lane_failed_operations_total{instance="a",relay="r2",container="id2",gpu="g1",index="1",nic="n",direction="sent"} %[5]s
	peerlane_lane_longest_stall_seconds{instance="a",relay="r2",container="id2",gpu="g1",index="1",nic="n",direction="sent",cause="no_grant"} %[6]s
	peerlane_staging_bytes{instance="a",relay="r2",container="id2",gpu="g1",memory="host"} %[7]s
`

// firing returns the alerts that fire at the end of an hour on series with a value per minute, with
// the labels of each alert. A rule fires if the query has the series at each evaluation of the rule's time.
func firing(t *testing.T, series string) map[string]labels.Labels {
	t.Helper()
	storage := promqltest.LoadedStorage(t, "load 1m"+series)
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	end := time.Unix(0, 0).Add(time.Hour)
	fires := map[string]labels.Labels{}
	for _, r := range podAlerts(t) {
		for at := end.Add(-time.Duration(r.For)); ; at = at.Add(30 * time.Second) {
			query, err := engine.NewInstantQuery(t.Context(), storage, nil, r.Expr, at)
			if err != nil {
				t.Fatal(err)
			}
			result := query.Exec(t.Context())
			vector, err := result.Vector()
			if err != nil {
				t.Fatalf("%s: %v", r.Alert, err)
			}
			if len(vector) == 0 {
				delete(fires, r.Alert)
				break
			}
			if len(vector) != 1 {
				t.Errorf("%s has %d alerts: %v", r.Alert, len(vector), vector)
			}
			fires[r.Alert] = sample(vector[0])
			query.Close()
			if !at.Before(end) {
				break
			}
		}
	}
	return fires
}

func sample(s promql.Sample) labels.Labels { return s.Metric.Copy() }

// mentioned matches a label in an annotation.
var mentioned = regexp.MustCompile(`\$labels\.([a-z_]+)`)

func TestAlertsOfPodsFireWithTheLabelsOfThePod(t *testing.T) {
	rules := map[string]rulefmt.Rule{}
	for _, r := range podAlerts(t) {
		rules[r.Alert] = r
	}
	good := []any{"1x60", "1x60", "0x60", "0x60", "0x60", "0x60", "0x60"}
	if fires := firing(t, fmt.Sprintf(quiet, good...)); len(fires) > 0 {
		t.Errorf("without a fault these alerts fire: %v", fires)
	}
	tested := map[string]bool{}
	for _, c := range []struct {
		alert string
		place int    // of the values in quiet
		fault string // the values with which the alert fires
		short string // values with which the alert does not fire
	}{
		{"PeerlanePodRelayDown", 0, "1x50 0x9", "1x59 0"},
		{"PeerlanePodRelayRestarts", 1, "1x49 1+1x10", "1x57 1+1x2"},
		{"PeerlanePodLaneWithoutNetwork", 2, "0x59 1", "1x59 0"},
		{"PeerlanePodLaneDegraded", 3, "0x40 1x19", "0x55 1x4"},
		{"PeerlanePodOperationsFail", 4, "0x40 1+1x19", "0x57 1+1x2"},
		{"PeerlanePodOperationStuck", 5, "0x58 240 301", "0x58 240 300"},
		{"PeerlanePodLaneBounces", 6, "0x40 1048576x19", "0x55 1048576x4"},
	} {
		tested[c.alert] = true
		for values, want := range map[string]bool{c.fault: true, c.short: false} {
			with := slices.Clone(good)
			with[c.place] = values
			fires := firing(t, fmt.Sprintf(quiet, with...))
			of, fired := fires[c.alert]
			if fired != want || len(fires) > 1 {
				t.Errorf("with %s %v fires, and %s is %v", values, fires, c.alert, want)
			}
			if !fired {
				continue
			}
			if of.Get("namespace") != "ml" || of.Get("pod") != "two" || of.Get("container") != "trainer" {
				t.Errorf("%s has the labels %s", c.alert, of)
			}
			for _, text := range rules[c.alert].Annotations {
				for _, l := range mentioned.FindAllStringSubmatch(text, -1) {
					if !of.Has(l[1]) {
						t.Errorf("%s: an annotation has the label %s; the alert has %s", c.alert, l[1], of)
					}
				}
			}
		}
	}
	for name := range rules {
		if !tested[name] {
			t.Errorf("no case has the alert %s", name)
		}
	}
}
