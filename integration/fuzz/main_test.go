package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const deadline = `fuzz: elapsed: 0s, gathering baseline coverage: 0/4 completed
fuzz: elapsed: 9s, execs: 38841 (4767/sec), new interesting: 121 (total: 125)
fuzz: elapsed: 10s, execs: 42947 (3800/sec), new interesting: 122 (total: 126)
--- FAIL: FuzzIt (10.08s)
    context deadline exceeded
FAIL
exit status 1
FAIL	example.com/it	10.112s
`

// Output in the form of go test, with lines of the target beside the fuzzer's lines.
const found = `fuzz: elapsed: 1s, execs: 841 (767/sec), new interesting: 3 (total: 5)
--- FAIL: FuzzIt (1.08s)
    --- FAIL: FuzzIt (0.00s)
        it_test.go:9: context deadline exceeded

    Failing input written to testdata/fuzz/FuzzIt/52b07ac1c8cbdd6c
    To re-run:
    go test -run=FuzzIt/52b07ac1c8cbdd6c
FAIL
exit status 1
FAIL	example.com/it	1.112s
`

func TestFuzzDeadlineIsNoFailure(t *testing.T) {
	it := target{pkg: "example.com/it", name: "FuzzIt"}
	for _, c := range []struct {
		name, out string
		want      bool
	}{
		{"the fuzzer's time was over", deadline, true},
		{"an input failed", found, false},
		{"another target", strings.ReplaceAll(deadline, "FuzzIt", "FuzzItToo"), false},
		{"an input failed at the end of the time", found + deadline, false},
		{"a panic", "panic: no\n" + deadline, false},
		{"a word more", strings.Replace(deadline, "deadline exceeded", "deadline exceeded: receive", 1), false},
		{"the target says so itself", strings.Replace(deadline, "    context", "    it_test.go:9: context", 1), false},
		{"no reason", strings.Replace(deadline, "    context deadline exceeded\n", "", 1), false},
		{"it does not build", "# example.com/it\nit.go:3:1: syntax error\nFAIL\texample.com/it [build failed]\nFAIL\n",
			false},
		{"nothing", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := it.endedByItsDeadline(c.out); got != c.want {
				t.Errorf("%v", got)
			}
		})
	}
}

func TestFuzzTargetIsRetriedFewTimes(t *testing.T) {
	it := target{pkg: "example.com/it", name: "FuzzIt"}
	type run struct {
		out string
		err error
	}
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		name string
		runs []run
		good bool
		want []string
	}{
		{"at once", []run{{deadline[:strings.Index(deadline, "---")], nil}}, true,
			[]string{"ok    example.com/it FuzzIt: 10s, execs: 42947, new interesting: 122\n"}},
		{"the second time", []run{{deadline, failed}, {"", nil}}, true,
			[]string{"again example.com/it FuzzIt: ", "ok    example.com/it FuzzIt: no figures\n"}},
		{"never", []run{{deadline, failed}, {deadline, failed}, {deadline, failed}}, false,
			[]string{"FAIL  example.com/it FuzzIt: exit status 1\n" + deadline}},
		{"an input", []run{{found, failed}}, false, []string{"Failing input written"}},
		{"an input the second time", []run{{deadline, failed}, {found, failed}}, false,
			[]string{"again", "Failing input written"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ran := 0
			report, good := it.fuzzBy(func() (string, error) {
				ran++
				return c.runs[ran-1].out, c.runs[ran-1].err
			})
			if good != c.good || ran != len(c.runs) {
				t.Errorf("good %v after %d runs", good, ran)
			}
			for _, s := range c.want {
				if !strings.Contains(report, s) {
					t.Errorf("%q is not in\n%s", s, report)
				}
			}
		})
	}
}

func TestTargetsAreFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "it_test.go")
	if err := os.WriteFile(path,
		[]byte("package it\n// func FuzzNo\nfunc FuzzOne(f *testing.F) {}\nfunc (t) FuzzNo() {}\nfunc TestFuzzNo() "+
			"{}\nfunc FuzzTwo(f *testing.F) {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	names, err := targetsOf(path)
	if err != nil || !slices.Equal(names, []string{"FuzzOne", "FuzzTwo"}) {
		t.Errorf("%q, %v", names, err)
	}
	if err := os.WriteFile(path, []byte("package"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := targetsOf(path); err == nil {
		t.Error("a torn file has no targets")
	}
	all, err := find("go", []string{"../../relay/..."})
	if err != nil || !slices.Contains(all, target{"github.com/peerlane/peerlane/relay/wire", "FuzzDecode"}) {
		t.Errorf("%v, %v", all, err)
	}
}

func TestEachTargetIsCounted(t *testing.T) {
	var out strings.Builder
	targets := []target{{name: "A"}, {name: "B"}, {name: "C"}}
	failed := each(targets, 2, &out, func(t target) (string, bool) { return t.name + "\n", t.name == "A" })
	if failed != 2 || len(out.String()) != 6 {
		t.Errorf("%d failed:\n%s", failed, out.String())
	}
}
