package conformance

import (
	"os"
	"strings"
	"testing"
)

// The document has a row for each case, and the results in which kinds of devices differ.
func TestDocumentListsCasesAndDifferences(t *testing.T) {
	text, err := os.ReadFile("../../../docs/network/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if cells := strings.Split(strings.Trim(line, "|\n "), " | "); len(cells) == 5 {
			rows[cells[0]] = cells[1:]
		}
	}
	for _, c := range cases() {
		if rows[c.name] == nil {
			t.Errorf("no row for case %q", c.name)
		}
	}
	if len(rows) != len(cases())+1 {
		t.Errorf("%d rows for %d cases", len(rows)-1, len(cases()))
	}
	for i, kind := range []Kind{SoftwareRoCE, RXE, SoftwareIWARP, SIW} {
		f := Expect(kind)
		for row, want := range map[string]string{
			"case": string(kind), "memory": "DMA-BUF: " + f.dmabuf.String(),
			"local protection error": f.localProtection.String(),
		} {
			if cells := rows[row]; len(cells) != 4 || cells[i] != want {
				t.Errorf("%s has %q for %s, want %q", row, cells, kind, want)
			}
		}
	}
}
