package main

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// docs/errors.md has a row for each status of the protocol, with its number, and in
// each a test that there is.
func TestErrorsNameAllStatuses(t *testing.T) {
	exist := testNames(t)
	read := func(path string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	type row struct{ number, test string }
	rows := map[string]row{}
	for _, m := range regexp.MustCompile(`(?m)^\| (\w+) \| (\d+) \|.*\| (\w+) \|$`).FindAllStringSubmatch(read("docs/errors.md"), -1) {
		rows[m[1]] = row{m[2], m[3]}
	}
	statuses := regexp.MustCompile(`(?m)^status (\w+) +(\d+)`).FindAllStringSubmatch(read("relay/wire/protocol.def"), -1)
	if len(statuses) < 20 {
		t.Fatalf("the protocol has %d statuses", len(statuses))
	}
	for _, m := range statuses {
		r := rows[m[1]]
		if r.number != m[2] || !exist[r.test] {
			t.Errorf("status %s, %s: the page says number %q and test %q, which has to be one", m[1], m[2], r.number, r.test)
		}
		delete(rows, m[1])
	}
	for name := range rows {
		t.Errorf("the page has status %s, and the protocol does not", name)
	}
}
