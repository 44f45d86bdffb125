package admin

import (
	"errors"
	"testing"
)

// The answer of a supervisor of another release contains the version.
func TestAskOfAnotherReleaseNamesBothVersions(t *testing.T) {
	l, f := supervised(t)
	defer f.Close()
	go answerOnce(t, int(f.Fd()), `{"version": 2, "error": "unknown"}`)
	_, err := Ask(l, id, Inspect)
	var refused *versionError
	if !errors.As(err, &refused) || *refused != (versionError{supervisor: Version + 1, request: Inspect}) {
		t.Fatalf("the error is %v", err)
	}
	// An operator reads both versions and the remedy in the text.
	const want = `the supervisor speaks version 2 of requests, this program version 1 for "inspect"; restart the container`
	if err.Error() != want {
		t.Errorf("the error is %q, not %q", err, want)
	}
}
