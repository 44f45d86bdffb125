package generation

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

func TestLogTailIsTheEnd(t *testing.T) {
	l := layout(t)
	g := made(t, l, firstID, time.Now())
	if got := g.LogTail(l); got != "the log is empty" {
		t.Errorf("%q", got)
	}
	if err := g.NoteInLog(l, "first\n"); err != nil {
		t.Fatal(err)
	}
	if err := g.NoteInLog(l, "second\n"); err != nil {
		t.Fatal(err)
	}
	if got := g.LogTail(l); got != "first\nsecond" {
		t.Errorf("%q", got)
	}
	if err := g.NoteInLog(l, strings.Repeat("a", 100)+strings.Repeat("b", 1023)+"c"); err != nil {
		t.Fatal(err)
	}
	if got, want := g.LogTail(l), strings.Repeat("b", 1023)+"c"; got != want {
		t.Errorf("%d bytes from %q", len(got), got[:10])
	}
	if n := testutil.Descriptors(t, filepath.Join(l.GenerationDir(firstID), LogName)); n != 0 {
		t.Errorf("%d descriptors of the log are open", n)
	}
	g.ID = secondID
	if got := g.LogTail(l); !strings.Contains(got, "no such file") {
		t.Errorf("of a generation that is gone: %q", got)
	}
	if err := g.NoteInLog(l, "line"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
