package topo

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// files are the files that a host is read from: those of this machine, or those
// of a capture. Everything that reads sysfs or procfs goes through it, so that a
// capture is read by the same rules as the host that it came from.
type files interface {
	ReadFile(path string) ([]byte, error)
	ReadDir(path string) ([]fs.DirEntry, error)
	ReadLink(path string) (string, error)
	// Resolve is the path that a path leads to when all links are followed.
	Resolve(path string) (string, error)
}

// machine is the files of this machine.
type machine struct{}

func (machine) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }
func (machine) ReadLink(path string) (string, error)       { return os.Readlink(path) }
func (machine) Resolve(path string) (string, error)        { return filepath.EvalSymlinks(path) }

// ReadFile is os.ReadFile in three system calls rather than ten: those of the
// poller and of the size tell nothing of attributes, and a large host has tens
// of thousands.
func (machine) ReadFile(path string) ([]byte, error) {
	failed := func(op string, err error) ([]byte, error) {
		return nil, &fs.PathError{Op: op, Path: path, Err: err}
	}
	fd, err := again(func() (int, error) { return syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0) })
	if err != nil {
		return failed("open", err)
	}
	defer func() { _ = syscall.Close(fd) }() // opened for reading: closing loses nothing
	var buffer [512]byte                     // more than any attribute but a few has
	var text []byte
	for {
		n, err := again(func() (int, error) { return syscall.Read(fd, buffer[:]) })
		if err != nil {
			return failed("read", err)
		}
		if n <= 0 {
			return text, nil
		}
		text = append(text, buffer[:n]...)
	}
}

// again repeats a system call that a signal interrupted, as package os does.
func again(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != syscall.EINTR {
			return n, err
		}
	}
}

// held is files in memory, by their absolute paths. It fails as a machine does,
// with the same errors.
type held map[string]heldFile

// heldFile is a directory where it has names, a symbolic link where it has a
// target, and a file otherwise.
type heldFile struct {
	data   []byte
	target string
	names  map[string]bool
}

// maxLinks is how many links the kernel follows in one path (MAXSYMLINKS).
const maxLinks = 40

// find walks to a path, through links on the way, and through the last one
// where it is to follow that.
func (h held) find(op, name string, follow bool) (string, heldFile, error) {
	failed := func(err error) (string, heldFile, error) {
		return "", heldFile{}, &fs.PathError{Op: op, Path: name, Err: err}
	}
	at, links := "/", 0
	here := h["/"]
	for rest := path.Clean(name)[1:]; rest != ""; {
		element, below, _ := strings.Cut(rest, "/")
		if element == ".." {
			at, rest = path.Dir(at), below
			here = h[at]
			continue
		}
		if here.names == nil {
			return failed(syscall.ENOTDIR)
		}
		next := path.Join(at, element)
		found, there := h[next]
		if !there {
			return failed(syscall.ENOENT)
		}
		if found.target != "" && (below != "" || follow) {
			if links++; links > maxLinks {
				return failed(syscall.ELOOP)
			}
			rest = strings.TrimSuffix(found.target+"/"+below, "/")
			continue
		}
		at, here, rest = next, found, below
	}
	return at, here, nil
}

func (h held) ReadFile(name string) ([]byte, error) {
	_, f, err := h.find("open", name, true)
	if err == nil && f.names != nil {
		err = &fs.PathError{Op: "read", Path: name, Err: syscall.EISDIR}
	}
	return f.data, err
}

func (h held) ReadLink(name string) (string, error) {
	_, f, err := h.find("readlink", name, false)
	if err == nil && f.target == "" {
		err = &fs.PathError{Op: "readlink", Path: name, Err: syscall.EINVAL}
	}
	return f.target, err
}

func (h held) Resolve(name string) (string, error) {
	at, _, err := h.find("lstat", name, true)
	return at, err
}

func (h held) ReadDir(name string) ([]fs.DirEntry, error) {
	at, f, err := h.find("open", name, true)
	if err != nil {
		return nil, err
	}
	if f.names == nil {
		return nil, &fs.PathError{Op: "readdirent", Path: name, Err: syscall.ENOTDIR}
	}
	entries := make([]fs.DirEntry, 0, len(f.names))
	for _, name := range slices.Sorted(maps.Keys(f.names)) {
		entries = append(entries, fs.FileInfoToDirEntry(heldInfo{name, h[path.Join(at, name)]}))
	}
	return entries, nil
}

// heldInfo is what a directory's listing tells of an entry.
type heldInfo struct {
	name string
	file heldFile
}

func (i heldInfo) Name() string       { return i.name }
func (i heldInfo) Size() int64        { return int64(len(i.file.data)) }
func (i heldInfo) ModTime() time.Time { return time.Time{} }
func (i heldInfo) IsDir() bool        { return i.file.names != nil }
func (i heldInfo) Sys() any           { return nil }

func (i heldInfo) Mode() fs.FileMode {
	switch {
	case i.file.names != nil:
		return fs.ModeDir | 0o755
	case i.file.target != "":
		return fs.ModeSymlink | 0o777
	}
	return 0o644
}
