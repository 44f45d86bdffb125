package supervisor

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
)

// exitOf returns the result of Wait for a shell command.
func exitOf(t *testing.T, script string) error {
	t.Helper()
	return exec.Command("sh", "-c", script).Run()
}

func TestCauseFollowsStrongestEvidence(t *testing.T) {
	killed, two, aborted, one := exitOf(t, "kill -9 $$"), exitOf(t, "exit 2"), exitOf(t, "kill -ABRT $$"),
		exitOf(t, "exit 1")
	gpu := launch.Ending{Cause: launch.EndGPU, Reason: "off the bus"}
	for _, c := range []struct {
		name string
		ending
		cause, want string
	}{
		{"kill -9", ending{err: killed}, causeKilled, "signal 9 (killed)"},
		{"out of memory", ending{err: killed, memory: true}, causeMemory, "relay.memory"},
		{"out of memory while it drains", ending{err: killed, memory: true, held: generation.StateDrained}, causeMemory,
			"relay.memory"},
		{"somebody else was out of memory", ending{err: one, memory: true, last: "no libcuda"}, causeFailed,
			"exit status 1: no libcuda"},
		{"killed by us, while somebody else was", ending{err: killed, memory: true, killReason: "too slow"}, causeUseless,
			"too slow"},
		{"panic", ending{err: two, panicked: "panic: x"}, causePanic, "panic: x"},
		{"panic with a core", ending{err: aborted, panicked: "fatal error: x"}, causePanic, "fatal error: x"},
		{"talk of a panic", ending{err: one, panicked: "panic: x", last: "y"}, causeFailed, "exit status 1: y"},
		{"lost GPU", ending{err: one, word: gpu}, launch.EndGPU, "off the bus"},
		{"lost GPU as the container ends", ending{err: one, word: gpu, container: true}, launch.EndGPU, "off the bus"},
		{"a relay that is dead does not lie", ending{err: killed, word: gpu}, causeKilled, "signal 9"},
		{"a word of its own making", ending{word: launch.Ending{Cause: "container ended", Reason: "x"}}, causeItself, "x"},
		{"SIGTERM", ending{word: launch.Ending{Cause: launch.EndSignal, Reason: "terminated"}}, causeKilled, "terminated"},
		{"container", ending{container: true}, causeContainer, "the container has ended"},
		{"container, and a relay that catches nothing", ending{err: exitOf(t, "kill -TERM $$"), container: true},
			causeContainer, "the container has ended"},
		{"container, stubborn", ending{err: killed, container: true, killReason: "it did not end"}, causeContainer,
			"it did not end"},
		{"supervisor", ending{asked: true}, causeSupervisor, "was stopped"},
		{"drained", ending{held: generation.StateDrained}, causeDrained, "administrator"},
		{"stopped by force", ending{err: killed, held: generation.StateStopped, killReason: "it did not end"}, causeStopped,
			"it did not end"},
		{"renewed", ending{renew: true}, causeRenewed, "sandbox"},
		{"silent", ending{err: killed, killReason: "no answer"}, causeUseless, "no answer"},
		{"status without a word", ending{err: one}, causeFailed, "exit status 1"},
		{"status 0", ending{}, causeItself, "without an error"},
	} {
		if cause, why := c.ending.cause(); cause != c.cause || !strings.Contains(why, c.want) {
			t.Errorf("%s: %q, %q; want %q, %q", c.name, cause, why, c.cause, c.want)
		}
	}
}

func TestEndingInSanitisesReport(t *testing.T) {
	text, err := json.Marshal(map[string]launch.Ending{"ending": {Cause: "a\nb\x1b[2J",
		Reason: strings.Repeat("ü", 4000)}})
	if err != nil {
		t.Fatal(err)
	}
	e, ok := endingIn(text)
	if !ok || e.Cause != "a b [2J" || len(e.Reason) > 1<<10 || strings.ContainsRune(e.Reason, '\ufffd') {
		t.Errorf("%+v, %v", e, ok)
	}
	for _, other := range []string{`{"ok":true}`, `{"claim":1}`, `{"ending":null}`, `[`, `{"ending":7}`} {
		if e, ok := endingIn([]byte(other)); ok {
			t.Errorf("%s is %+v", other, e)
		}
	}
}

func FuzzEnding(f *testing.F) {
	f.Add([]byte(`{"ending":{"cause":"lost GPU","reason":"x"}}`))
	f.Add([]byte(`{"ok":true}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if e, ok := endingIn(text); ok && (len(e.Cause)+len(e.Reason) > 2<<10 ||
			strings.ContainsAny(e.Cause+e.Reason, "\n\x00\x1b")) {
			t.Errorf("%+v", e)
		}
	})
}

func TestStderrTeeSanitisesLines(t *testing.T) {
	h := &stderrTee{to: &bytes.Buffer{}}
	if _, err := h.Write([]byte("panic: \x1b[2Jx\n\x1b]0;y\a\n")); err != nil {
		t.Fatal(err)
	}
	if panicked, last := h.words(); panicked != "panic:  [2Jx" || last != " ]0;y " {
		t.Errorf("%q, %q", panicked, last)
	}
}

func TestStderrTeeKeepsPanicAndLastLine(t *testing.T) {
	var log bytes.Buffer
	h := &stderrTee{to: &log}
	for _, part := range []string{"level=info a\npan", "ic: x\n\ngoroutine 1\n", strings.Repeat("y", 1<<20), "\n",
		"last"} {
		if _, err := h.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	if panicked, last := h.words(); panicked != "panic: x" || last != strings.Repeat("y", maxWord) ||
		log.Len() != 1<<20+len("level=info a\npanic: x\n\ngoroutine 1\n\nlast") {
		t.Errorf("%q, %.20q, %d bytes", panicked, last, log.Len())
	}

	log.Reset()
	h = &stderrTee{to: &log, wrap: true, own: map[string]string{"generation": "g"}}
	if _, err := h.Write([]byte("{\"msg\":\"its own\"}\nnone \xff\"\n[1]\n")); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != 3 || lines[0] != `{"msg":"its own"}` {
		t.Fatalf("%q", lines)
	}
	for i, want := range []string{"none \"", "[1]"} {
		var e struct{ Msg, Generation, Level, Time string }
		if err := json.Unmarshal([]byte(lines[i+1]), &e); err != nil || e.Msg != want || e.Generation != "g" ||
			e.Level != "error" || e.Time == "" {
			t.Errorf("%s: %+v, %v", lines[i+1], e, err)
		}
	}
}

// A relay may write no end of line, an invalid entry, or a second panic.
func TestStderrTeeHostileLinesAreLimited(t *testing.T) {
	var log bytes.Buffer
	h := &stderrTee{to: &log, wrap: true}
	for _, part := range []string{strings.Repeat("a", maxLine-10), strings.Repeat("b", 100), "\n", "{\"msg\":\n", "  \n",
		"panic: first\n", "panic: second\n"} {
		if n, err := h.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("%d bytes, %v", n, err)
		}
	}
	var got []string
	for line := range strings.Lines(log.String()) {
		var e struct{ Msg string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Errorf("%.50q: %v", line, err)
		}
		got = append(got, e.Msg)
	}
	want := []string{strings.Repeat("a", maxLine-10) + strings.Repeat("b", 10), "{\"msg\":", "panic: first",
		"panic: second"}
	if !slices.Equal(got, want) {
		t.Errorf("%d lines: %.100q", len(got), got)
	}
	for range 2 { // words releases the lock
		if panicked, last := h.words(); panicked != "panic: first" || last != "panic: second" {
			t.Errorf("%q, %q", panicked, last)
		}
	}
}

// docs/relay.md describes every cause.
func TestCausesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/relay.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, cause := range []string{
		causeContainer, causeRenewed, causeSupervisor, collector.CauseUnsupervised, causeKilled, causeMemory, causePanic,
		causeUseless, causeFailed, causeItself,
		causeDrained + ", " + causeStopped, launch.EndGPU, launch.EndCUDA, launch.EndKept, launch.EndPair,
	} {
		if !strings.Contains(string(page), "\n| "+cause+" | ") {
			t.Errorf("no row of %q", cause)
		}
	}
}
