package admin

import (
	"encoding/json"
	"net"
	"testing"
)

// FuzzAdmin checks that a request gets one answer, and that only a valid request reaches the
// supervisor.
func FuzzAdmin(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) == 0 || len(text) > 4<<10 {
			return // the socket has neither
		}
		ours, theirs := net.Pipe()
		defer ours.Close()
		requests := make(chan Request)
		over := make(chan struct{})
		go func() {
			defer close(over)
			serveAdmin(theirs, requests, replyTimeout)
		}()
		var command string
		reached := false
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			select {
			case r := <-requests:
				command, reached = r.Command, true
				r.Reply(nil)
			case <-over:
			}
		}()
		if _, err := ours.Write(text); err != nil {
			t.Fatal(err)
		}
		var answer Answer
		if err := json.NewDecoder(ours).Decode(&answer); err != nil {
			t.Fatalf("%q has no answer: %v", text, err)
		}
		<-over
		<-answered
		var asked message
		sense := json.Unmarshal(text, &asked) == nil && asked.Version == Version
		if reached != sense || reached && command != asked.Command {
			t.Errorf("%q reached the supervisor: %v, as %q", text, reached, command)
		}
		if answer.Version != Version || (answer.Error == "") != sense {
			t.Errorf("%q is answered with %+v", text, answer)
		}
	})
}
