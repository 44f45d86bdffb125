package supervisor

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
)

// maxLog bounds a generation's log, bytes; what was there before it was full is
// beside it, once.
const maxLog = 8 << 20

// boundedLog writes to standard error: what the supervisor says, and what its relay
// says in a pipe. The relay has no descriptor of the file, which it could make as
// long as the disk is.
type boundedLog struct {
	mutex  sync.Mutex
	before string // the file for what is moved out
}

func newBoundedLog(l paths.Layout, id string) *boundedLog {
	return &boundedLog{before: filepath.Join(l.GenerationDir(id), generation.LogName+".1")}
}

// Write always succeeds: whoever writes cannot do anything about a full disk.
func (b *boundedLog) Write(text []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if err := b.makeRoom(int64(len(text))); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "bounding this log: %v\n", err)
	}
	_, _ = os.Stderr.Write(text)
	return len(text), nil
}

// makeRoom empties a log that is full. Who has it open appends.
func (b *boundedLog) makeRoom(more int64) error {
	info, err := os.Stderr.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size()+more <= maxLog {
		return err
	}
	before, err := os.OpenFile(b.before, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err == nil {
		_, err = io.Copy(before, io.NewSectionReader(os.Stderr, 0, info.Size()))
		err = errors.Join(err, before.Close())
	}
	if errors.Is(err, fs.ErrNotExist) { // somebody has deleted the state
		err = nil
	}
	return errors.Join(err, os.Stderr.Truncate(0))
}
