package supervisor

import (
	"encoding/json"
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/staging"
	"github.com/peerlane/peerlane/relay/launch"
)

// claimIn parses a datagram of a relay as a claim.
func claimIn(datagram []byte) (launch.Claim, bool) {
	var c launch.Claim
	err := json.Unmarshal(datagram, &c)
	return c, err == nil && c.Claim != 0
}

// admitClaims answers the claims of a generation's relay until the relay ends. It runs on its own
// goroutine, because the lock can take long.
func admitClaims(l paths.Layout, id string, log *logrus.Entry, r *relay) {
	for c := range r.claims {
		a, err := staging.Admit(l, id, r.process, c)
		if err != nil {
			a = launch.Admission{Claim: c.Claim, Error: fmt.Sprintf("admitting staging failed: %v", err)}
		}
		if !a.OK { // debug only: the relay logs the refusal, and can ask at any rate
			log.Debugf("not admitted: %s", a.Error)
		}
		if err := r.send(a); err != nil {
			log.WithError(err).Debug("answering a claim") // the relay has closed the socket and is ending
		}
	}
}
