package relay

import (
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport/verbs"
)

// Data uses NICs with a GPU's memory after the supervisor's test of these GPUs and NICs has found
// the data right (launch.Triple); otherwise data bounces through host memory. The supervisor sends
// the verdicts on triples, as on pairs.

// verifiedMode reports whether a configuration asks for verdicts on triples.
func verifiedMode(c launch.Config) bool {
	return c.SelfTest != "" && c.SelfTest != launch.SelfTestOff
}

// unverified returns the reason why NICs may not access memory of a GPU for a lane; empty if the
// test of each has passed.
func (l *lane) unverified(config launch.Config, on launch.GPU, nics []string) string {
	if !verifiedMode(config) {
		return ""
	}
	for _, nic := range nics {
		name := launch.TripleName{PairName: launch.PairName{GPU: l.spec.GPU, Server: on}, NIC: nic}
		switch t := launch.FindTriple(config.Triples, name); {
		case t == nil:
			return fmt.Sprintf("%v are not verified yet: their test has not ended", name)
		case t.Verdict == launch.VerdictUntested:
			return fmt.Sprintf("%v could not be verified: %s", name, t.Reason)
		case t.Verdict != launch.VerdictGood:
			return fmt.Sprintf("%v failed their test: %s", name, t.Reason)
		}
	}
	return ""
}

// verdict is the result of unverified for the lane's own GPU, for one configuration and the NICs that
// a group had.
type verdict struct {
	configs    int
	nics       verbs.NICsVersion // nil before the first result
	unverified string
}

// unverified returns the reason why NICs of a group may not access the lane's own GPU's memory. Call
// unverified on the loop, which asks for each operation.
func (c *connection) unverified(by *verbs.QPGroup) string {
	r, nics := c.session.relay, by.NICsVersion()
	if v := &c.verdict; v.nics != nics || v.configs != r.configs {
		*v = verdict{r.configs, nics, c.lane.unverified(r.config, c.lane.spec.GPU, c.lane.carriers(by.NICNames(), c.sends()))}
	}
	return c.verdict.unverified
}

// carriers returns the NICs of a group that data of the lane may go by. Another relay picks the NIC
// by which data comes; data leaves by the lane's NICs where the group has one of them.
func (l *lane) carriers(all []string, sends bool) []string {
	own := slices.DeleteFunc(slices.Clone(all), func(nic string) bool { return !slices.Contains(l.spec.NICs, nic) })
	if sends && len(own) > 0 {
		return own
	}
	return all
}

// configured returns the configuration; ok is false while the relay ends. configured may block.
func (r *Relay) configured() (config launch.Config, ok bool) {
	ok = r.loop.Call(func() { config = r.config })
	return config, ok
}
