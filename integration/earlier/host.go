package earlier

import (
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"testing"
)

// Made is the output of Host: the bundles of two containers, and the directory of the library.
type Made struct {
	Bundles []string
	Library string
}

// StartHost makes the earlier commit write configuration, plan, CDI specifications and the bundles
// of two containers on a route below root, and starts the NICs of the host until the end of the
// test. built is the result of Build, and programs the directory of the hook and the relay.
func StartHost(t testing.TB, built, root, programs, route string) (m Made) {
	t.Helper()
	c := exec.Command(filepath.Join(built, Host), root, programs, filepath.Join(built, Library),
		filepath.Join(built, Program), route)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), c.Wait()); err != nil {
			t.Errorf("%v: %s", err, &stderr)
		}
	})
	if err := json.NewDecoder(out).Decode(&m); err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	return m
}
