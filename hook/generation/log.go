package generation

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
)

// Tail returns the end of a log.
func Tail(log *os.File) string {
	text := make([]byte, 1<<10)
	size, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	n, err := log.ReadAt(text, max(0, size-int64(len(text))))
	if err != nil && err != io.EOF {
		return err.Error()
	}
	if n == 0 {
		return "the log is empty"
	}
	return strings.TrimSpace(string(text[:n]))
}

// NoteInLog appends a line to the generation's log.
func (g *Generation) NoteInLog(l paths.Layout, line string) error {
	log, err := OpenLog(l, g.ID)
	if err != nil {
		return err
	}
	_, err = log.WriteString(line)
	return errors.Join(err, log.Close())
}

// OpenLog opens or creates a generation's log.
func OpenLog(l paths.Layout, id string) (*os.File, error) {
	return os.OpenFile(
		filepath.Join(l.GenerationDir(id), LogName),
		os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW,
		0o600,
	)
}

// LogTail returns the end of the generation's log, or the text of the error if the log cannot be
// opened.
func (g *Generation) LogTail(l paths.Layout) string {
	log, err := OpenLog(l, g.ID)
	if err != nil {
		return err.Error()
	}
	defer log.Close()
	return Tail(log)
}
