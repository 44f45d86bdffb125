package doctor

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNCCLEffectsFollowVariables(t *testing.T) {
	for _, c := range []struct {
		name      string
		variables map[string]string
		want      []string // variables of the effects
	}{
		{"Peerlane's file", map[string]string{"NCCL_NET_PLUGIN": "peerlane"}, nil},
		{"a path", map[string]string{"NCCL_NET_PLUGIN": "/usr/lib/peerlane/libnccl-net-peerlane.so"}, nil},
		{"a list", map[string]string{"NCCL_NET_PLUGIN": "ofi,peerlane"}, nil},
		{"a list without", map[string]string{"NCCL_NET_PLUGIN": "ofi,peerlane2"}, []string{"NCCL_NET_PLUGIN"}},
		{"an empty plugin", map[string]string{"NCCL_NET_PLUGIN": ""}, []string{"NCCL_NET_PLUGIN"}},
		{"no plugin", map[string]string{}, []string{"NCCL_NET_PLUGIN"}},
		{"the network", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_NET": "Peerlane"}, nil},
		{"another network hides the rest", map[string]string{"NCCL_NET": "IB", "NCCL_CUMEM_ENABLE": "0"},
			[]string{"NCCL_NET"}},
		{"topologies of Peerlane", map[string]string{"NCCL_NET_PLUGIN": "peerlane",
			"NCCL_TOPO_FILE": "/run/peerlane/nccl-topology.xml"}, nil},
		{"the virtual topology", map[string]string{"NCCL_NET_PLUGIN": "peerlane",
			"NCCL_TOPO_FILE": "/etc/nccl-topology.xml"}, nil},
		{"a tuner that has LL128", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_TUNER_PLUGIN": "ofi",
			"NCCL_PROTO": "Simple,LL128"}, []string{"NCCL_TUNER_PLUGIN"}},
		{"a tuner without LL128", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_TUNER_PLUGIN": "ofi",
			"NCCL_PROTO": "^LL128"}, nil},
		{"a tuner with one protocol", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_TUNER_PLUGIN": "ofi",
			"NCCL_PROTO": "simple"}, nil},
		{"a tuner without LL", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_TUNER_PLUGIN": "ofi",
			"NCCL_PROTO": "^LL"}, []string{"NCCL_TUNER_PLUGIN"}},
		{"memory that is not shared", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_CUMEM_ENABLE": "0",
			"NCCL_NET_GDR_LEVEL": "loc"}, []string{"NCCL_CUMEM_ENABLE", "NCCL_NET_GDR_LEVEL"}},
		{"memory that is shared", map[string]string{"NCCL_NET_PLUGIN": "peerlane", "NCCL_CUMEM_ENABLE": "1",
			"NCCL_NET_GDR_LEVEL": "PIX"}, nil},
	} {
		var got []string
		for _, e := range ncclEffects(c.variables) {
			got = append(got, e.Variable)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

// setting is a variable in the table of docs/nccl/images.md.
var setting = regexp.MustCompile("`(NCCL_[A-Z_0-9]+)=([^`]*)`")

// TestDocumentedImagesHaveTheirFindings compares each row of the page's table with the findings for
// the row's variables.
func TestDocumentedImagesHaveTheirFindings(t *testing.T) {
	const path = "../../../docs/nccl/images.md"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	rows, want := 0, ""
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, " | ")
		if len(cells) == 4 && strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "| image ") {
			rows++
			cells[2] = findingsOf(cells[1])
		}
		want += strings.Join(cells, " | ")
	}
	if rows < 10 {
		t.Errorf("the page has %d rows", rows)
	}
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s (-want +got; rewrite with go test -update):\n%s", path, diff)
	}
}

// findingsOf returns the findings for a container with the variables of a cell.
func findingsOf(cell string) string {
	variables := map[string]string{}
	if !strings.Contains(cell, "`/etc/nccl.conf`") { // such a container has Peerlane's file
		variables["NCCL_NET_PLUGIN"] = "peerlane"
	}
	for _, v := range setting.FindAllStringSubmatch(cell, -1) {
		variables[v[1]] = v[2]
	}
	var found []string
	for _, e := range ncclEffects(variables) {
		found = append(found, e.Found)
	}
	if len(found) == 0 {
		return "nothing"
	}
	return strings.Join(found, "; ")
}
