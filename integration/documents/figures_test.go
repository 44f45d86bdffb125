package documents

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// number matches a figure of a table, without its unit.
var number = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// README and comparison.md repeat figures of docs/nccl.md: no variable, NET/Socket, best NET/Socket
// and NVLink.
func TestRepeatedFiguresEqualThoseOfTheNCCLPage(t *testing.T) {
	const nccl, readme, comparison = "../../docs/nccl.md", "../../README.md", "../../docs/comparison.md"
	for _, c := range []struct {
		page, row, label string
		// order has the places of no variable, NET/Socket, best NET/Socket and NVLink among the numbers.
		order [4]int
	}{
		{readme, "|  | 256 MiB |", "two H100, 2026-11-26 |", [4]int{0, 1, 2, 3}},
		{readme, "|  | 1 MiB |", "| the same, 1 MiB |", [4]int{0, 1, 2, 3}},
		{readme, "|  | 64 KiB |", "| the same, 64 KiB |", [4]int{0, 1, 2, 3}},
		{readme, "|  | 8 B, queued on the GPU |", "| the same, 8 bytes queued on the GPU |", [4]int{0, 1, 2, 3}},
		{readme, "| all_to_all | 256 MiB |", "| all_to_all, 256 MiB |", [4]int{0, 1, 2, 3}},
		{comparison, "|  | 256 MiB |", "no variable set, GB/s |", [4]int{0, 2, 3, 1}},
		{comparison, "|  | 1 MiB |", "| all_reduce, 1 MiB |", [4]int{0, 2, 3, 1}},
		{comparison, "|  | 8 B, queued on the GPU |", "| all_reduce, 8 bytes queued |", [4]int{0, 2, 3, 1}},
	} {
		want := number.FindAllString(rowOf(t, nccl, c.row), -1)
		got := number.FindAllString(rowOf(t, c.page, c.label), -1)
		if len(got) < 4 || len(want) < 4 {
			t.Errorf("%s, %s: %d and %d figures", c.page, c.label, len(got), len(want))
			continue
		}
		for i, place := range c.order {
			if got[place] != want[i] {
				t.Errorf("%s, %s: figure %d is %s, and docs/nccl.md has %s", c.page, c.label, place+1, got[place], want[i])
			}
		}
	}
}

// rowOf returns the row of a table without the label.
func rowOf(t *testing.T, page, label string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if _, rest, found := strings.Cut(line, label); found && strings.HasPrefix(line, "|") {
			return rest
		}
	}
	t.Fatalf("%s has no row %q", page, label)
	return ""
}
