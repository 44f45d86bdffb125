package relay

import (
	"testing"

	"github.com/peerlane/peerlane/relay/internal/statemachine/statetest"
)

func TestStatesFollowReviewedCells(t *testing.T) {
	for _, m := range []statetest.Machine{statetest.Of(operationTable), statetest.Of(connectionTable),
		statetest.Of(lifeTable), statetest.Of(memoryTable), statetest.Of(targetTable)} {
		t.Run(m.Title(), func(t *testing.T) {
			statetest.Check(t, m, "testdata/states/"+m.Title()+".txt", "../docs/states")
		})
	}
}
