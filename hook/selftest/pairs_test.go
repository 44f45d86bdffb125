package selftest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// AllPairs lists every two GPUs, except known pairs and a GPU without a lane.
func TestAllPairsOmitsRefusedGPU(t *testing.T) {
	plan := testplan.New("/sys")
	plan.GPUs = append(plan.GPUs, topo.GPU{Index: 3, BusID: "0000:4c:00.0"})
	planned, err := PlannedPairs(plan, config.Default())
	if err != nil {
		t.Fatal(err)
	}
	words := func(list []launch.PairName) string {
		var all []string
		for _, n := range list {
			all = append(all, fmt.Sprintf("%d-%d", n.GPU.Index, n.Server.Index))
		}
		return strings.Join(all, " ")
	}
	if got := words(planned); got != "1-0" {
		t.Errorf("planned are %s", got)
	}
	if got := words(AllPairs(plan, planned)); got != "1-0 0-3 1-3" {
		t.Errorf("all are %s", got)
	}
}
