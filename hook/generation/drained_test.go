package generation

import (
	"errors"
	"io/fs"
	"os"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config/paths"
)

func TestDrainedMarkEndsWithResumeAndBoot(t *testing.T) {
	l := paths.New(t.TempDir())
	if d, err := AllDrained(l); d != nil || err != nil {
		t.Errorf("%+v, %v before a drain", d, err)
	}
	if err := ResumeAll(l); err != nil {
		t.Errorf("without a mark: %v", err)
	}
	if err := DrainAll(l); err != nil {
		t.Fatal(err)
	}
	first, err := AllDrained(l)
	if err != nil || first == nil {
		t.Fatalf("%+v, %v", first, err)
	}
	if err := DrainAll(l); err != nil {
		t.Fatal(err)
	}
	if again, err := AllDrained(l); err != nil || again == nil || !again.Since.Equal(first.Since) {
		t.Errorf("%+v after a second drain, %v; want %+v", again, err, first)
	}
	if err := WriteJSON(drainedFile(l), Drained{time.Now(), "another boot"}); err != nil {
		t.Fatal(err)
	}
	if d, err := AllDrained(l); d != nil || err != nil {
		t.Errorf("%+v, %v of another boot", d, err)
	}
	if err := ResumeAll(l); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(drainedFile(l)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the mark stays: %v", err)
	}
}
