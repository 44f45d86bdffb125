package main

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func TestMergeKeepsLinesWhole(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	a := strings.Repeat("a"+long+"\n", 20)
	b := strings.Repeat("b"+long+"\n", 19) + "b without an end"
	text, err := io.ReadAll(merge([]io.Reader{iotest.HalfReader(strings.NewReader(a)), strings.NewReader(b)}))
	if err != nil {
		t.Fatal(err)
	}
	got := slices.Sorted(strings.Lines(string(text)))
	want := slices.Sorted(strings.Lines(a + b + "\n"))
	if !slices.Equal(got, want) {
		t.Errorf("of %d lines %d came, or others", len(want), len(got))
	}
}

func TestMergeReportsTheErrorOfAnInput(t *testing.T) {
	cause := errors.New("broken")
	text, err := io.ReadAll(merge([]io.Reader{strings.NewReader("one\n"), iotest.ErrReader(cause)}))
	if !errors.Is(err, cause) {
		t.Errorf("the error is %v after %q, want %v", err, text, cause)
	}
}
