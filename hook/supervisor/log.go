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

// maxLog is the maximum size of a generation's log in bytes. The content of a full log replaces
// the previous log.
const maxLog = 8 << 20

// boundedLog writes to standard error: the messages of the supervisor, and the output of the
// relay, which comes through a pipe. With a descriptor of the file, a relay could fill the disk.
type boundedLog struct {
	mutex sync.Mutex
	// before is the path of the previous log.
	before string
}

func newBoundedLog(l paths.Layout, id string) *boundedLog {
	return &boundedLog{before: filepath.Join(l.GenerationDir(id), generation.LogName+".1")}
}

// Write always succeeds, because no caller can handle a full disk.
func (b *boundedLog) Write(text []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if err := b.makeRoom(int64(len(text))); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "truncating this log: %v\n", err)
	}
	_, _ = os.Stderr.Write(text)
	return len(text), nil
}

// makeRoom copies a full log over the previous log and truncates it. Processes with an open
// descriptor append.
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
	if errors.Is(err, fs.ErrNotExist) { // an administrator has deleted the state
		err = nil
	}
	return errors.Join(err, os.Stderr.Truncate(0))
}
