package supervisor

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/hostnetwork"
	"github.com/peerlane/peerlane/relay/launch"
)

// keyInterval is the time between two checks for a changed cluster key. During a rotation the
// file has both keys.
const keyInterval = 5 * time.Second

// refusedInterval is the time after which the supervisor sends refused secrets again: a
// certificate can become valid without a change of the file.
const refusedInterval = time.Minute

// goOnNetwork reads the relay's network configuration before the relay starts.
func (s *supervisor) goOnNetwork() {
	var err error
	if s.networking, err = hostnetwork.New(s.layout, s.generation.Network, s.generation.Tenant, s.generation.Rails,
		s.generation.NetworkMemory); err != nil {
		s.log.WithError(err).Error("this container's relay is not on the network")
	}
}

// sendSecrets sends the secrets to the relay. The relay's answer follows later.
func (s *supervisor) sendSecrets() {
	if s.networking.Where == nil {
		return
	}
	if err := s.relay.request(launch.Request{Request: launch.RequestSecrets, Secrets: &s.networking.Secrets}); err != nil {
		s.logKeyError(fmt.Sprintf("sending the cluster key to the relay failed: %v", err))
	}
}

// secretsAnswered handles the relay's answer to the secrets.
func (s *supervisor) secretsAnswered(a launch.Status) {
	if s.relay.secretsAccepted = a.OK; a.OK {
		s.keyError = ""
		return
	}
	s.relay.secretsRetry = time.Now().Add(refusedInterval)
	s.logKeyError("the relay refused the cluster key or the certificates: " + a.Error)
}

// checkKey sends a changed key to a relay on the network until the relay accepts the key. A
// relay without the new key would lose its connections when the rotation ends.
func (s *supervisor) checkKey() {
	if s.relay == nil || s.networking.Where == nil || slices.Contains(s.relay.asked, launch.RequestSecrets) {
		return
	}
	text, err := paths.ReadSecret(hostnetwork.KeyFile(s.layout, s.generation.Network), launch.MaxSecret)
	if err != nil {
		s.logKeyError(fmt.Sprintf("the cluster key has become unreadable; the relay keeps the previous key: %v", err))
		return
	}
	if !bytes.Equal(text, s.networking.File) {
		s.log.Info("the cluster key has changed")
		if err := s.networking.Key(text, s.generation.Network, s.generation.Tenant); err != nil {
			s.logKeyError(fmt.Sprintf("the relay keeps the previous key: %v", err))
			return
		}
		s.relay.secretsAccepted, s.relay.secretsRetry = false, time.Time{}
	}
	switch {
	case s.relay.secretsAccepted:
		s.keyError = ""
	case !time.Now().Before(s.relay.secretsRetry):
		s.sendSecrets()
	}
}

// logKeyError logs an error of the key once, not at every check.
func (s *supervisor) logKeyError(text string) {
	if text != s.keyError {
		s.keyError = text
		s.log.Error(text)
	}
}
