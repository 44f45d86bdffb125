package verbs

import (
	"testing"

	"github.com/peerlane/peerlane/relay/internal/statemachine/statetest"
)

func TestReconnectStatesFollowReviewedCells(t *testing.T) {
	for _, m := range []statetest.Machine{statetest.Of(releaseTable), statetest.Of(agreementTable)} {
		t.Run(m.Title(), func(t *testing.T) {
			statetest.Check(t, m, "testdata/"+m.Title()+".txt", "../../../docs/states")
		})
	}
}
