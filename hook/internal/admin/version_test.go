package admin

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
)

// The answer of a supervisor of another release contains the version.
func TestAskOfAnotherReleaseNamesBothVersions(t *testing.T) {
	root, err := os.MkdirTemp("", "pl") // a short path, for the limit of sun_path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	l := paths.New(root)
	const id = "0123456789abcdef0123456789abcdef"
	if err := os.MkdirAll(filepath.Dir(Socket(l, id)), 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unixpacket", Socket(l, id))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		text, err := json.Marshal(Answer{Version: Version + 1, Error: "unknown"})
		if err == nil {
			_, err = conn.Read(make([]byte, 4<<10))
		}
		if err == nil {
			_, err = conn.Write(text)
		}
		if err != nil {
			t.Error(err)
		}
	}()
	_, err = Ask(l, id, Inspect)
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
