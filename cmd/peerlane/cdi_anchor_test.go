package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
)

// generate, refresh and the command in the error of the hook mount a missing anchor.
func TestCDICommandsMountAnchor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	h := newCDIHost(t)
	l := paths.New(h.root)
	h.generate()
	for _, command := range [][]string{
		{"cdi", "anchor"}, {"cdi", "anchor", "-o", "json"},
		h.args("refresh"), h.args("refresh"),
		h.args("generate", "--spec-dir", h.specDir, "--hook", h.hook),
	} {
		if _, err := l.UnmountAnchor(); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(l.Anchor(), "a/b"), 0o755); err != nil { // left by an earlier release
			t.Fatal(err)
		}
		peerlane(t, append(command, "--root", h.root)...)
		if err := l.CheckAnchor(); err != nil {
			t.Errorf("after peerlane %q: %v", command, err)
		}
	}
	if words := "peerlane --root " + h.root + " cdi anchor"; l.AnchorCommand() != words ||
		paths.New("/").AnchorCommand() != "peerlane cdi anchor" {
		t.Errorf("the command is %q", l.AnchorCommand())
	}
}

func TestCDIRemoveUnmountsAnchor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	h := newCDIHost(t)
	l := paths.New(h.root)
	h.generate()
	for _, dry := range []bool{true, false} {
		args := []string{"cdi", "remove", "--root", h.root}
		if dry {
			args = append(args, "--dry-run")
		}
		out := peerlane(t, args...)
		if mounted := l.CheckAnchor() == nil; mounted != dry {
			t.Errorf("dry run %v: the anchor is mounted: %v", dry, mounted)
		}
		if reported := strings.Contains(out, "unmounted "+l.Anchor()); reported == dry {
			t.Errorf("dry run %v: %s", dry, out)
		}
	}
	if err := errors.Join(os.Remove(l.Anchor()), os.RemoveAll(h.root)); err != nil {
		t.Error(err)
	}
}
