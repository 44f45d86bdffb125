package supervisor

import (
	"encoding/json"
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/staging"
	"github.com/peerlane/peerlane/relay/launch"
)

// claimIn is the claim that a datagram of a relay holds, if it is one.
func claimIn(datagram []byte) (launch.Claim, bool) {
	var c launch.Claim
	err := json.Unmarshal(datagram, &c)
	return c, err == nil && c.Claim != 0
}

// admitClaims answers the claims of a generation's relay until that has ended.
// They have a goroutine of their own: the lock can be long in coming.
func admitClaims(l paths.Layout, id string, log *logrus.Entry, r *relay) {
	for c := range r.claims {
		a, err := staging.Admit(l, id, r.process, c)
		if err != nil {
			a = launch.Admission{Claim: c.Claim, Error: fmt.Sprintf("its supervisor cannot admit staging: %v", err)}
		}
		if !a.OK { // which the relay says once, and a relay can ask as often as it likes
			log.Debugf("not admitted: %s", a.Error)
		}
		if err := r.send(a); err != nil {
			log.WithError(err).Debug("answering a claim") // the relay has closed its end, and is ending
		}
	}
}
