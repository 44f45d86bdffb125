// Package rules parses the files of packaging/prometheus with Prometheus' parsers, as `promtool
// check rules` does, and checks the queries of the dashboard. Package rules is a separate module,
// because Peerlane's programs do not depend on Prometheus.
package rules

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

const files = "../../prometheus/"

// checkRules performs promtool's check of the form of a file, of each query, and of each template.
func checkRules(text []byte) (count int, err error) {
	groups, errs := rulefmt.Parse(text, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		return 0, errors.Join(errs...)
	}
	for _, g := range groups.Groups {
		count += len(g.Rules)
	}
	return count, nil
}

func TestAlertsAreThoseOfPrometheus(t *testing.T) {
	text, err := os.ReadFile(files + "alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	count, err := checkRules(text)
	if err != nil || count < 5 {
		t.Errorf("%d rules: %v", count, err)
	}
	// Control: checkRules refuses a wrong query, a wrong template and an unknown key.
	for _, c := range [][2]string{
		{"expr: ", "expr: sum by ( + "}, {"summary: ", "summary: '{{ $labels.' #"}, {"  - alert: ", "  - alarm: "}, {"for: ",
			"for: 5 parsecs #"},
	} {
		if !strings.Contains(string(text), c[0]) {
			t.Errorf("no %q in alerts.yaml", c[0])
		} else if _, err := checkRules([]byte(strings.Replace(string(text), c[0], c[1], 1))); err == nil {
			t.Errorf("with %q in place of %q nothing is found", c[1], c[0])
		}
	}
}

// variable matches a variable of Grafana, replaced before the query.
var variable = regexp.MustCompile(`\$__(?:rate_)?interval|\$\{?[a-z_]+\}?`)

func fill(query string) string {
	return variable.ReplaceAllStringFunc(query, func(v string) string {
		if strings.Contains(v, "interval") {
			return "5m"
		}
		return "x"
	})
}

// queries returns every "expr" of a document, at any depth.
func queries(document any) (list []string) {
	switch d := document.(type) {
	case map[string]any:
		for name, value := range d {
			if text, ok := value.(string); ok && name == "expr" {
				list = append(list, text)
			}
			list = append(list, queries(value)...)
		}
	case []any:
		for _, value := range d {
			list = append(list, queries(value)...)
		}
	}
	return list
}

func TestQueriesOfTheDashboardAreThoseOfPrometheus(t *testing.T) {
	text, err := os.ReadFile(files + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var document any
	if err := json.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	list := queries(document)
	if len(list) < 5 {
		t.Fatalf("%d queries", len(list))
	}
	p := parser.NewParser(parser.Options{})
	for _, q := range list {
		if _, err := p.ParseExpr(fill(q)); err != nil {
			t.Errorf("%s: %v", q, err)
		}
		if _, err := p.ParseExpr(fill(q) + " by ("); err == nil {
			t.Error(fmt.Errorf("an incomplete query after %s is accepted", q))
		}
	}
}
