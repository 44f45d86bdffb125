package doctor

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write docs/doctor.md")

// document is docs/doctor.md.
func document() string {
	var b strings.Builder
	b.WriteString("<!-- Written by `go test ./cmd/peerlane/doctor -update` from the checks themselves. -->\n\n" + `# What peerlane doctor looks at

` + "`peerlane doctor`" + ` looks at a host for what makes lanes fail or slow without a word. It
changes nothing, and each check has a bounded time. Run it as root, for not all can be
seen by all users; what cannot be seen is said.

| result | means | exit status, where it is the worst |
|---|---|---|
| n/a | the check has nothing to look at on this host, such as ports of a host without NICs | 0 |
| ok | what was looked at is as it should be | 0 |
| could not tell | it could not be seen, and the finding says why | 5 |
| warning | something is slow, or fails under some condition | 6 |
| failure | something keeps a lane from working, or gives data or the host away | 7 |

1 says that it could not look at all, 2 that the command line was wrong.

` + "`--for gpu3`" + ` leaves what touches the lane of GPU 3. ` + "`-o json`" + ` is described by
[doctor.schema.json](doctor.schema.json): ` + "`lanes`" + ` are the GPUs, by index, whose lanes a
finding touches, or null for all of the host. ` + "`--selftest`" + ` is an active test: it copies
between the GPUs that lanes stage on, as ` + "`peerlane self-test`" + ` does. ` + "`--rdma`" + ` is another
one, on this host alone: two queue pairs of each lane's NIC are connected with each
other, by the GID and partition key that relays use, which it tells, and write and read
host memory and, by DMA-BUF and by nvidia-peermem, the memory of the GPUs that the lane
stages on, or its own; each byte is compared, and rates under half of what ` + "`peerlane topo`" + ` estimates are told.

` + "`--connect HOST`" + ` looks at what needs another host, in the last section below; on that host
` + "`peerlane doctor --serve`" + ` answers meanwhile. It answers who proves the cluster key by the
relays' own handshake, and nobody else; what it tells after that, names, MTUs, rates and ids of keys, is
encrypted only where the cluster has certificates. It listens at the last port of
` + "`network.ports`" + `, so firewalls that let relays through let it through, and is no daemon: it
ends with its terminal.

A check is an entry of a table in ` + "`cmd/peerlane/doctor`" + `, one file a subject. Each has a
made host with its fault, on which it must find that and nothing else may find anything.
`)
	subject := ""
	for _, c := range append(All(), Others()...) {
		if c.Subject != subject {
			subject = c.Subject
			fmt.Fprintf(&b, "\n## %s%s\n", strings.ToUpper(subject[:1]), subject[1:])
		}
		fmt.Fprintf(&b, "\n### %s\n\n", c.Name)
		for _, line := range [][2]string{{"Looks at", c.LooksAt}, {"Why it matters", c.Why}, {"Remedy", c.Remedy}} {
			fmt.Fprintf(&b, "- **%s**: %s.\n", line[0], strings.ReplaceAll(strings.ReplaceAll(line[1], "<", "&lt;"), "*", `\*`))
		}
	}
	return b.String()
}

func TestDoctorDocumentIsCurrent(t *testing.T) {
	const path = "../../../docs/doctor.md"
	want := document()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s (-want +got; go test -update writes it):\n%s", path, diff)
	}
}

func TestDoctorChecksHaveAllFields(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range append(All(), Others()...) {
		if seen[c.Name] {
			t.Errorf("two checks are called %s", c.Name)
		}
		seen[c.Name] = true
		if c.Name == "" || c.Subject == "" || c.LooksAt == "" || c.Why == "" || c.Remedy == "" || c.Run == nil {
			t.Errorf("the check %q leaves something out", c.Name)
		}
	}
}
