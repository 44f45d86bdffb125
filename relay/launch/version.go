package launch

import "fmt"

// Versions of the messages between supervisor and relay. A supervisor sends a version with every
// Config. Supervisors of commit a099472 and before version 1 send none, which is version 0. A relay
// serves supervisors of OldestVersion to Version: the supervisor of a running container stays that
// of the release that started the container, while its next relay is the installed program.
const (
	OldestVersion = 0
	Version       = 1
)

// VersionError is the error of a relay that a supervisor of another release has started.
type VersionError struct {
	Supervisor     int // the version of the supervisor
	Oldest, Newest int // the versions of the relay
	// Request is a request that the relay does not know; empty if the versions differ.
	Request string
}

func (e *VersionError) Error() string {
	text := fmt.Sprintf("the supervisor speaks version %d of the messages to its relay, this relay versions %d to %d",
		e.Supervisor, e.Oldest, e.Newest)
	if e.Request != "" {
		text = fmt.Sprintf("unknown request %q: %s", e.Request, text)
	}
	return text + "; restart the container"
}

// CheckVersion returns a *VersionError if this relay cannot serve a supervisor of a version.
func CheckVersion(supervisor int) error {
	if supervisor < OldestVersion || supervisor > Version {
		return &VersionError{Supervisor: supervisor, Oldest: OldestVersion, Newest: Version}
	}
	return nil
}
