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

// document returns the text of docs/doctor.md.
func document() string {
	var b strings.Builder
	b.WriteString("<!-- Written by `go test ./cmd/peerlane/doctor -update` from the checks themselves. -->\n\n" + `# Checks of peerlane doctor

` + "`peerlane doctor`" + ` looks for causes of failing and slow lanes. It changes nothing, and each check has
a time limit. Run it as root; without root it reports missing facts as unknown.

| result | meaning | exit status if it is the worst |
|---|---|---|
| n/a | nothing to check on this host | 0 |
| ok | no fault | 0 |
| could not tell | not visible; the finding has the reason | 5 |
| warning | slow, or fails under some condition | 6 |
| failure | a lane does not work, or data or the host is exposed | 7 |

1: the doctor could not run. 2: wrong command line.

- ` + "`--for gpu3`" + ` shows findings about the lane of GPU 3. The schema of ` + "`-o json`" + ` is
  [doctor.schema.json](doctor.schema.json): ` + "`lanes`" + ` are indexes of GPUs, or null for the host.
- ` + "`--selftest`" + ` copies between the GPUs that lanes stage on, as ` + "`peerlane self-test`" + ` does.
- ` + "`--rdma`" + ` tests [GPUs with NICs](relay.md#gpus-with-nics), then each lane's NIC with host memory and
  GPU memory by DMA-BUF and nvidia-peermem, and reports rates under half of the estimate of ` + "`peerlane topo`" + `.
- ` + "`--connect HOST`" + ` checks two hosts (last section) while ` + "`peerlane doctor --serve`" + ` runs on the
  other, on the last port of ` + "`network.ports`" + `, until its terminal ends. It answers only holders of
  the cluster key; names, MTUs, rates and key ids are encrypted only with certificates.
`)
	subject := ""
	for _, c := range append(All(), Others()...) {
		if c.subject != subject {
			subject = c.subject
			fmt.Fprintf(&b, "\n## %s%s\n\n| check | source | consequence | remedy |\n|---|---|---|---|\n",
				strings.ToUpper(subject[:1]), subject[1:])
		}
		escaped := strings.NewReplacer("<", "&lt;", "*", `\*`, "|", `\|`)
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", c.Name, escaped.Replace(c.source), escaped.Replace(c.why),
			escaped.Replace(c.remedy))
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
		t.Errorf("%s (-want +got; rewrite with go test -update):\n%s", path, diff)
	}
}

func TestDoctorChecksHaveAllFields(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range append(All(), Others()...) {
		if seen[c.Name] {
			t.Errorf("two checks are called %s", c.Name)
		}
		seen[c.Name] = true
		if c.Name == "" || c.subject == "" || c.source == "" || c.why == "" || c.remedy == "" || c.run == nil {
			t.Errorf("the check %q leaves something out", c.Name)
		}
	}
}
