package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// aGeneration writes the files of a generation without a supervisor.
func aGeneration(t *testing.T, root, id, container string) {
	t.Helper()
	dir := filepath.Join(root, "var/lib/peerlane/generations", id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(generation.Generation{
		ID: id, Container: generation.Container{ID: container}, Init: process.Process{PID: 1, Start: 1,
			Boot: "another"}, Created: time.Now(),
		Config: launch.Config{Lanes: []launch.Lane{{GPU: launch.GPU{Index: 3}}}},
	})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "generation.json"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestRelayInvalidCommandLineIsRefused(t *testing.T) {
	root := t.TempDir()
	aGeneration(t, root, strings.Repeat("a", 31)+"1", "trainer")
	aGeneration(t, root, strings.Repeat("a", 31)+"2", "reader")
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"inspect"}, 2, "takes the names of containers or generations"},
		{[]string{"stop"}, 2, "takes the names of containers or generations"},
		{[]string{"drain"}, 2, "or --all"},
		{[]string{"drain", "trainer", "--all"}, 2, "or --all"},
		{[]string{"resume"}, 2, "or --all"},
		{[]string{"inspect", "another"}, 1, `find container or generation "another": no relay`},
		{[]string{"inspect", "aaaa"}, 1, "is a prefix of the ids of 2 containers or generations"},
		{[]string{"drain", "another", "--timeout", "1s"}, 1, `find container or generation "another": no relay`},
	} {
		var out, errOut bytes.Buffer
		args := append(append([]string{"relay"}, test.args...), "--root", root)
		if code := run(args, &out, &errOut); code != test.code || !strings.Contains(errOut.String(), test.want) {
			t.Errorf("%v: exit status %d, %s; want %d, %s", args, code, errOut.String(), test.code, test.want)
		}
	}
	if out := peerlane(t, "relay", "inspect", "trainer", "--root", root); !strings.Contains(out, "which has ended") ||
		!strings.Contains(out, "no report") {
		t.Errorf("inspect printed %s", out)
	}
	list := decode[[]control.Inspection](t, "relay", "inspect", strings.Repeat("a", 31)+"2", "--root", root, "-o", "json")
	if len(list) != 1 || list[0].Container.ID != "reader" || list[0].NoReport == "" {
		t.Errorf("inspect -o json gives %+v", list)
	}
	for begun, want := range map[string]string{"": "trainer\tleft", "aaaa": strings.Repeat("a", 31) + "1\ttrainer"} {
		if out := peerlane(t, "__complete", "relay", "drain", "--root", root, begun); !strings.Contains(out, want) {
			t.Errorf("completing %q gives %q, want %q", begun, out, want)
		}
	}
}

// The list shows a drained host until resume.
func TestListShowsDrainedHostUntilResume(t *testing.T) {
	root := t.TempDir()
	peerlane(t, "relay", "drain", "--all", "--root", root)
	if out := peerlane(t, "relay", "list", "--root", root); !strings.Contains(out,
		"All relays of this host are drained since ") {
		t.Errorf("list printed %q", out)
	}
	peerlane(t, "relay", "resume", "--all", "--root", root)
	if out := peerlane(t, "relay", "list", "--root", root); out != "No container has a relay.\n" {
		t.Errorf("list printed %q", out)
	}
	got := decode[struct {
		Relays  []awaitedRelay
		Holders []control.Holder
	}](t, "relay", "drain", "--all", "--root", root, "-o", "json")
	if got.Relays == nil || got.Holders == nil {
		t.Errorf("drain -o json gives %+v", got)
	}
	resumed := decode[awaited](t, "relay", "resume", "--all", "--root", root, "-o", "json")
	if resumed.Relays == nil || len(resumed.Relays) > 0 {
		t.Errorf("resume -o json gives %+v", resumed)
	}
}

// driver is a fake NVML.
type driver struct {
	processes []topo.GPUProcess
	err       error
}

func (d driver) Processes() ([]topo.GPUProcess, error) { return d.processes, d.err }

func TestHolderTableNamesProcesses(t *testing.T) {
	const gone = 1 << 30 // above the maximum process id of the kernel
	for name, test := range map[string]struct {
		driver driver
		// want is part of the row in the table; empty for no row.
		want  string
		warns string
	}{
		"NVML names one": {driver{processes: []topo.GPUProcess{{GPU: 3, PID: gone, Memory: 512 << 20},
			{GPU: 5, PID: gone, Graphics: true}}},
			`1073741824 +- +- +GPU 3 to compute with 512 MiB, GPU 5 to graphics +-`, ""},
		"NVML names one, and fails for a GPU": {driver{[]topo.GPUProcess{{GPU: 3, PID: gone}},
			errors.New("GPU 0: lost\nGPU 1: lost")},
			`1073741824 +- +- +GPU 3 to compute +-`, "NVML does not name all processes that use GPUs, and /proc alone says " +
				"who has one open: GPU 0: lost; GPU 1: lost"},
		"no NVML": {driver{err: fmt.Errorf("%w: not installed", topo.ErrNoNVML)}, "", ""},
	} {
		var out, errOut bytes.Buffer
		a := &app{out: terminal.New(&out), log: logrus.New(), layout: paths.New(t.TempDir())}
		a.log.SetOutput(&errOut)
		holders, err := a.holders(test.driver)
		if err != nil {
			t.Fatal(err)
		}
		table := a.holderTable(holders).Render().String()
		if row := strings.Contains(table, "1073741824"); row != (test.want != "") ||
			!regexp.MustCompile(test.want).MatchString(table) {
			t.Errorf("%s: no row %q in\n%s", name, test.want, table)
		}
		if warned := errOut.String(); (warned != "") != (test.warns != "") || !strings.Contains(warned, test.warns) {
			t.Errorf("%s: warned of %q, want %q", name, warned, test.warns)
		}
	}
}

// inspect shows the page type of slots for other hosts, and the data streams that use
// MSG_ZEROCOPY.
func TestInspectShowsZerocopy(t *testing.T) {
	const pages, zerocopy = "transparent huge pages (MADV_HUGEPAGE)", "off (the kernel copied 32 sends in a row)"
	const unused = "of a relay whose data goes over verbs"
	rows := ""
	printReport(func(what, value string) { rows += what + ": " + value + "\n" }, &launch.Report{
		Staging: []launch.Staging{{
			Host: true, Lane: "0000:17:00.0", Transport: launch.TransportTCP, Bytes: 1 << 20, Wanted: 1 << 20,
			Slots: 2, SlotBytes: 1 << 18, Streams: 2, Pages: pages,
		}},
		Network: &launch.NetworkReport{Listening: "10.0.0.1:1", Peers: []launch.NetworkPeer{
			{Transport: launch.TransportTCP, Zerocopy: zerocopy}, {Transport: launch.TransportVerbs, Zerocopy: unused},
		}},
	}, launch.Config{})
	for _, want := range []string{
		"2 slots of 256 KiB each way by 2 streams, in " + pages + "\n", "  MSG_ZEROCOPY: " + zerocopy + "\n",
	} {
		if !strings.Contains(rows, want) {
			t.Errorf("no %q in\n%s", want, rows)
		}
	}
	if strings.Contains(rows, unused) {
		t.Errorf("MSG_ZEROCOPY in\n%s", rows)
	}
}

// A relay may be compromised, so its text is untrusted.
func TestRelayTextIsSanitised(t *testing.T) {
	const escape = "\x1b]0;evil\x07\u009b2Jtext\nforged"
	root := t.TempDir()
	id := strings.Repeat("b", 32)
	aGeneration(t, root, id, escape)
	dir := filepath.Join(root, "var/lib/peerlane/generations", id)
	status, err := json.Marshal(generation.Status{State: generation.StateDown, Error: escape})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "status.json"), status, 0o600); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(dir, "supervisor")) // the supervisor is alive
	if err == nil {
		defer lock.Close()
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	l := paths.Layout{Root: root}
	infos, err := generation.List(l)
	if err != nil || len(infos) != 1 || !infos[0].Supervised {
		t.Fatalf("%+v, %v", infos, err)
	}

	var out bytes.Buffer
	a := &app{out: terminal.New(&out), log: logrus.New(), layout: l}
	i := control.Inspection{Info: infos[0], NoReport: escape, Cgroup: escape,
		Sandbox: control.Confinement{Missing: []string{escape}}, LogTail: []string{escape}}
	a.printInspection(i)
	i.Report = &launch.Report{Contexts: []string{escape}, Staging: []launch.Staging{{GPU: escape, Note: escape}}}
	a.printInspection(i)
	fmt.Fprintln(&out, a.relayTable(infos, formTable).Render().String())
	for _, state := range []string{generation.StateReady, generation.StateDown} {
		_, err := a.await(infos, state, 0, formTable)
		fmt.Fprintln(&out, err)
	}
	var errOut bytes.Buffer
	run([]string{"relay", "resume", "--root", root, escape}, &out, &errOut)
	run([]string{"topo", "--from", escape}, &out, &errOut)
	for _, text := range []string{out.String(), errOut.String()} {
		if !strings.Contains(text, "evil") {
			t.Errorf("the output lacks the hostile name:\n%s", text)
		}
		for line := range strings.Lines(text) {
			line = strings.TrimSuffix(line, "\n")
			if strings.HasPrefix(line, "forged") || strings.ContainsFunc(line, unicode.IsControl) {
				t.Errorf("the terminal gets %q", line)
			}
		}
	}
}
