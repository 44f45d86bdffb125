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

// keyInterval is how often it is looked whether the cluster key has been changed: a rotation
// that is not finished has both keys for as long as it takes.
const keyInterval = 5 * time.Second

// refusedInterval is how soon a relay is sent the same secrets again that it has refused: a
// certificate can become valid without a change of its file.
const refusedInterval = time.Minute

// goOnNetwork finds out, before a relay is started, what it can have of the network.
func (s *supervisor) goOnNetwork() {
	var err error
	if s.networking, err = hostnetwork.New(s.layout, s.generation.Network, s.generation.Tenant, s.generation.Rails, s.generation.NetworkMemory); err != nil {
		s.log.WithError(err).Error("this container's relay is not on the network")
	}
}

// tellSecrets sends the relay what nobody else may hear. Its answer says whether it was
// heard.
func (s *supervisor) tellSecrets() {
	if s.networking.Where == nil {
		return
	}
	if err := s.relay.request(launch.Request{Request: launch.RequestSecrets, Secrets: &s.networking.Secrets}); err != nil {
		s.complain(fmt.Sprintf("the relay cannot be sent the cluster key: %v", err))
	}
}

// toldSecrets notes the relay's answer to them.
func (s *supervisor) toldSecrets(a launch.Status) {
	if s.relay.told = a.OK; a.OK {
		s.keyError = ""
		return
	}
	s.relay.tellAgain = time.Now().Add(refusedInterval)
	s.complain("the relay refuses its cluster key, or certificates: " + a.Error)
}

// lookAtKey tells a relay that is on the network of a key that has changed, until it has
// taken it: one that was not heard would cut it off when the rotation is finished.
func (s *supervisor) lookAtKey() {
	if s.relay == nil || s.networking.Where == nil || slices.Contains(s.relay.asked, launch.RequestSecrets) {
		return
	}
	text, err := paths.ReadSecret(hostnetwork.KeyFile(s.layout, s.generation.Network), launch.MaxSecret)
	if err != nil {
		s.complain(fmt.Sprintf("the cluster key cannot be read any more; the relay goes on with the one that it had: %v", err))
		return
	}
	if !bytes.Equal(text, s.networking.File) {
		s.log.Info("the cluster key has changed")
		if err := s.networking.Key(text, s.generation.Network, s.generation.Tenant); err != nil {
			s.complain(fmt.Sprintf("the relay goes on with the key that it had: %v", err))
			return
		}
		s.relay.told, s.relay.tellAgain = false, time.Time{}
	}
	switch {
	case s.relay.told:
		s.keyError = ""
	case !time.Now().Before(s.relay.tellAgain):
		s.tellSecrets()
	}
}

// complain logs what is wrong with the key, once and not each time that it is looked at.
func (s *supervisor) complain(text string) {
	if text != s.keyError {
		s.keyError = text
		s.log.Error(text)
	}
}
