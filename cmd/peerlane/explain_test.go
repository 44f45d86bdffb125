package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestExplainCodePrintsItsEntry(t *testing.T) {
	want, ok := fault.Find(fault.AnchorNotMounted)
	if !ok {
		t.Fatal("no entry")
	}
	for _, typed := range []string{"PL1203", "pl1203", "1203", "[PL1203]"} {
		var e fault.Entry
		if err := json.Unmarshal([]byte(peerlane(t, "explain", typed, "-o", "json")), &e); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, e); diff != "" {
			t.Errorf("%s (-want +got):\n%s", typed, diff)
		}
	}
	text := peerlane(t, "explain", "PL1203")
	for _, part := range append([]string{string(want.Code), want.Title, want.Cause}, want.Remedies...) {
		if !strings.Contains(strings.Join(strings.Fields(text), " "), part) {
			t.Errorf("%q is missing in\n%s", part, text)
		}
	}
	for line := range strings.Lines(text) {
		if len(line) > 90 && strings.Count(strings.TrimSpace(line), " ") > 3 {
			t.Errorf("a line has %d characters: %s", len(line), line)
		}
	}
}

func TestExplainWithoutCodeListsAll(t *testing.T) {
	if got, want := strings.Count(peerlane(t, "explain"), "\n"), len(fault.Entries()); got != want {
		t.Errorf("%d lines, want %d", got, want)
	}
}

func TestExplainUnknownCodeNamesTheNearest(t *testing.T) {
	var out, errOut bytes.Buffer
	if status := run([]string{"explain", "PL1209"}, &out, &errOut); status != exitUsage || out.Len() != 0 {
		t.Errorf("status %d, %q", status, out.String())
	}
	_, err := findEntry("PL1903")
	var usage usageError
	if err == nil || errors.As(err, &usage) || !strings.Contains(errOut.String(), "the nearest is PL120") {
		t.Errorf("%v; %s", err, errOut.String())
	}
}

func TestExplainCompletesEachCode(t *testing.T) {
	got, directive := newExplainCommand(&app{log: logrus.New()}).ValidArgsFunction(nil, nil, "")
	if len(got) != len(fault.Entries()) || directive != cobra.ShellCompDirectiveNoFileComp ||
		!strings.HasPrefix(got[0], "PL1001\t") {
		t.Errorf("%d completions, the first %q", len(got), got[0])
	}
}
