package main

import (
	"strings"
	"testing"
)

// Tests of a fixture module really fail, some tests only once.
func TestReportRetriesFailedTests(t *testing.T) {
	// once is true in the first run of a module.
	const once = `package a
import ("errors"; "fmt"; "io/fs"; "os"; "testing")
func once(name string) bool {
	if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) { return false }
	return os.WriteFile(name, nil, 0o644) == nil
}
var _ = fmt.Sprint
`
	for _, test := range []struct {
		name, tests string
		good        bool
		want        []string
		never       string
	}{
		{
			name: "passes then",
			tests: `func TestLate(t *testing.T) { t.Run("deep", func(t *testing.T) { if once("late") { t.Error("too late") } }) }
func TestOther(t *testing.T) {}`,
			good: true,
			want: []string{"too late", "again probe: TestLate",
				"flaky       probe.TestLate: it failed, as above, and passed when it was tried again", "3 passed, 0 failed, 0 " +
					"skipped"},
		},
		{
			name:  "fails again",
			tests: `func TestWrong(t *testing.T) { t.Error("wrong") }`,
			want:  []string{"again probe: TestWrong", "failed      probe", "0 passed, 1 failed"},
			never: "flaky",
		},
		{
			name:  "is skipped then", // in the fixture module, not in this package
			tests: `func TestSkips(t *testing.T) { if once("s") { t.Error("wrong") } else { t.Skip("no more") } }`,
			want:  []string{"again probe: TestSkips", "failed      probe"},
			never: "flaky",
		},
		{
			name: "a panic",
			tests: `func TestPanics(t *testing.T) { if once("p") { panic("no way") } }
func TestZ(t *testing.T) {}`,
			want:  []string{"panic: no way", "failed      probe"},
			never: "again",
		},
		{
			name:  "a race",
			tests: `func TestRaces(t *testing.T) { if once("r") { fmt.Println("WARNING: DATA RACE"); t.Fail() } }`,
			want:  []string{"failed      probe"},
			never: "again",
		},
		{
			name:  "a process that ends without a failed test",
			tests: `func TestMain(m *testing.M) { m.Run(); if once("m") { os.Exit(1) } }; func TestGood(t *testing.T) {}`,
			want:  []string{"failed      probe"},
			never: "again",
		},
		{
			name: "too much to be chance",
			tests: `func TestA(t *testing.T) { if once("a") { t.Fail() } }
func TestB(t *testing.T) { if once("b") { t.Fail() } }
func TestC(t *testing.T) { if once("c") { t.Fail() } }
func TestD(t *testing.T) { if once("d") { t.Fail() } }
func TestE(t *testing.T) { if once("e") { t.Fail() } }`,
			want:  []string{"failed      probe", "0 passed, 5 failed"},
			never: "again",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			events := madeModule(t, dir, map[string]string{"a_test.go": once + test.tests})
			var out strings.Builder
			s, err := read([]string{placeHost}, strings.NewReader(events), &out, false)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.tryAgain(`cd '`+dir+`' && go test -json -vet=off -count=1 -run "$TESTS" "$PACKAGE"`, &out); err != nil {
				t.Fatal(err)
			}
			s.print(&out)
			if s.good() != test.good {
				t.Errorf("good = %v, want %v", s.good(), test.good)
			}
			for _, want := range test.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("the report lacks %q:\n%s", want, out.String())
				}
			}
			if test.never != "" && strings.Contains(out.String(), test.never) {
				t.Errorf("the report says %q:\n%s", test.never, out.String())
			}
		})
	}
}
