package main

import (
	"bytes"
	"strings"
	"testing"
)

// The man page documents every exit status.
func TestRelayExitStatusEqualsManPage(t *testing.T) {
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"version"}, 0, ""},
		{[]string{"srve"}, 2, `unknown command "srve"`},
		{[]string{"serve", "--fast"}, 2, "unknown flag: --fast"},
		{[]string{"serve", "x"}, 2, `unknown command "x"`},
		{[]string{"version", "--log-level", "loud"}, 2, "--log-level"},
		{[]string{"software-device"}, 2, `required flag(s) "socket"`},
		{[]string{"software-device", "--socket", "/nowhere/s"}, 1, "/nowhere/s"},
	} {
		var out, errOut bytes.Buffer
		status := run(c.args, &out, &errOut)
		if status != c.status || !strings.Contains(errOut.String(), c.want) || (status == 0) != (errOut.Len() == 0) {
			t.Errorf("peerlane-relay %v: exit status %d, %q", c.args, status, errOut.String())
		}
	}
}
