package reader

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// files gives access to the files of this machine, or of a capture. Code that reads sysfs or
// procfs uses files, so that ReadCapture and Sysfs follow the same rules.
type files interface {
	// ReadFile reads a whole file of at most maxFile bytes. The returned bytes are valid
	// until the next call.
	ReadFile(path string) ([]byte, error)
	// Open opens a file for partial reads.
	Open(path string) (openFile, error)
	ReadDir(path string) ([]fs.DirEntry, error)
	ReadLink(path string) (string, error)
	// Resolve returns the path after following every link.
	Resolve(path string) (string, error)
}

type openFile interface {
	io.ReaderAt
	io.Closer
}

// Limits against trees that are not the kernel's. Attributes of the kernel have at most a page,
// and /proc/cpuinfo has less than 2 KiB per processor, for up to 8,192 processors.
const (
	maxFile    = 16 << 20 // bytes
	maxEntries = 1 << 17  // of a directory
)

// machine reads the files of this machine.
type machine struct{}

func (machine) ReadLink(path string) (string, error) { return os.Readlink(path) }

func (machine) Resolve(path string) (string, error) {
	if at, ok := resolved(path); ok {
		return at, nil
	}
	at, err := filepath.EvalSymlinks(path)
	if named := (*fs.PathError)(nil); err != nil && !errors.As(err, &named) {
		cause := syscall.ELOOP // EvalSymlinks has no type for it
		_ = errors.As(err, &cause)
		err = &fs.PathError{Op: "lstat", Path: path, Err: cause}
	}
	return at, err
}

// resolved resolves a path with three system calls: filepath.EvalSymlinks needs a system call per
// directory of the path. If ok is false, the caller must use filepath.EvalSymlinks.
func resolved(path string) (at string, ok bool) {
	fd, err := again(func() (int, error) { return syscall.Open(path, openPath|syscall.O_CLOEXEC, 0) })
	if err != nil {
		return "", false
	}
	defer func() { _ = syscall.Close(fd) }()
	at, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	return at, err == nil && filepath.IsAbs(at) && !strings.HasSuffix(at, " (deleted)")
}

func (machine) ReadDir(path string) ([]fs.DirEntry, error) { return readDir(path, maxEntries) }

// readDir lists a directory that has so many entries at most, in order.
func readDir(path string, limit int) ([]fs.DirEntry, error) {
	// os.ReadDir would wait for the writer of a pipe.
	dir, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }() // opened for reading: closing loses nothing
	entries, err := dir.ReadDir(limit + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(entries) > limit {
		return nil, &fs.PathError{Op: "readdirent", Path: path, Err: &countError{items: "entries", max: limit,
			countless: true}}
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, nil
}

func (machine) Open(path string) (openFile, error) {
	d, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// attributes is a machine for reading many files of a directory in succession, such as the
// attributes of a device. attributes opens the second file and later files relative to the open
// directory, not to the root. close closes the directories.
type attributes struct {
	machine
	root    string       // of sysfs: a short read ends a file of sysfs
	dir     keptOpen     // of the last file
	devices keptOpen     // the directory that dir is in
	buffer  [1 << 9]byte // more than any attribute but a few has
}

// keptOpen opens a directory at the second request.
type keptOpen struct {
	path string
	fd   int // 0 if not open
}

// at returns the open directory; 0 if closed.
func (k *keptOpen) at(path string, open func() (int, error)) int {
	switch {
	case path != k.path:
		k.close()
		k.path = path
	case k.fd == 0:
		if fd, err := open(); err == nil {
			k.fd = fd
		} // on failure, the caller's open of the file returns the error
	}
	return k.fd
}

func (k *keptOpen) close() {
	if k.fd > 0 {
		_ = syscall.Close(k.fd)
	}
	*k = keptOpen{}
}

func (a *attributes) close() {
	a.dir.close()
	a.devices.close()
}

// from returns the open directory and the relative name for opening a file.
func (a *attributes) from(path string) (dir int, name string) {
	last := strings.LastIndexByte(path, '/')
	if last <= 0 {
		return atRoot, path
	}
	above := strings.LastIndexByte(path[:last], '/')
	if above <= 0 {
		return atRoot, path
	}
	openAt := func(dir int, name string) (int, error) {
		return again(func() (int, error) {
			return syscall.Openat(dir, name, openPath|syscall.O_CLOEXEC|syscall.O_DIRECTORY, 0)
		})
	}
	devices := a.devices.at(path[:above], func() (int, error) { return openAt(atRoot, path[:above]) })
	fd := a.dir.at(path[:last], func() (int, error) {
		if devices > 0 {
			return openAt(devices, path[above+1:last])
		}
		return openAt(atRoot, path[:last])
	})
	switch {
	case fd > 0:
		return fd, path[last+1:]
	case devices > 0:
		return devices, path[above+1:]
	}
	return atRoot, path
}

func (a *attributes) ReadFile(path string) ([]byte, error) {
	dir, name := a.from(path)
	if !strings.HasPrefix(path, a.root) {
		d, err := openRegularAt(dir, name, path)
		if err != nil {
			return nil, err
		}
		defer func() { _ = d.Close() }()
		return d.readAll()
	}
	// An attribute of the kernel has at most a page, and a single read usually returns the whole
	// attribute. ReadFile checks the type of the file only if the read returns no byte or fills
	// the buffer: in a tree that is not the kernel's, a pipe can be empty, and a device can be
	// endless. ReadFile waits for neither.
	fd, err := again(func() (int, error) { return syscall.Openat(dir, name, attributeFlags, 0) })
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	n, err := again(func() (int, error) { return syscall.Read(fd, a.buffer[:]) })
	if _ = syscall.Close(fd); err == nil && n > 0 && n < len(a.buffer) {
		return a.buffer[:n], nil
	}
	d, err := openRegularAt(dir, name, path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	return d.readAll()
}

func (a *attributes) Open(path string) (openFile, error) {
	dir, name := a.from(path)
	d, err := openRegularAt(dir, name, path)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// ReadFile is os.ReadFile with four system calls in place of ten. Attributes need neither the
// poller nor a read at the end of the file, and a large host has tens of thousands of attributes.
func (machine) ReadFile(path string) ([]byte, error) {
	d, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	return d.readAll()
}

// descriptor is a regular file that is open for reading.
type descriptor struct {
	fd   int
	path string
	size int64 // size in the inode: usually a page for an attribute
}

// openRegular opens a regular file without waiting, and refuses other files: a tree that is not
// the kernel's can have pipes and devices.
func openRegular(path string) (descriptor, error) { return openRegularAt(atRoot, path, path) }

const (
	attributeFlags = syscall.O_RDONLY | syscall.O_CLOEXEC | syscall.O_NONBLOCK | syscall.O_NOCTTY

	openPath = 0x200000 // O_PATH: the open cannot wait
	atRoot   = -100     // AT_FDCWD: the path is absolute
)

// openRegularAt opens a file of a directory; path is for errors.
func openRegularAt(dir int, name, path string) (descriptor, error) {
	d := descriptor{path: path}
	var err error
	if d.fd, err = again(func() (int, error) {
		return syscall.Openat(dir, name, attributeFlags, 0)
	}); err != nil {
		return d, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	var info syscall.Stat_t
	if err = syscall.Fstat(d.fd, &info); err == nil {
		switch info.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			d.size = info.Size
			return d, nil
		case syscall.S_IFDIR:
			err = syscall.EISDIR
		default:
			err = errNotRegular
		}
	}
	_ = d.Close()
	return d, &fs.PathError{Op: "read", Path: path, Err: err}
}

// Close loses nothing: the file was opened for reading.
func (d descriptor) Close() error { return syscall.Close(d.fd) }

func (d descriptor) readAll() ([]byte, error) {
	var buffer [512]byte // more than any attribute but a few has
	var text []byte
	for {
		n, err := again(func() (int, error) { return syscall.Read(d.fd, buffer[:]) })
		if err != nil {
			return nil, &fs.PathError{Op: "read", Path: d.path, Err: err}
		}
		if text = append(text, buffer[:max(n, 0)]...); len(text) > maxFile {
			return nil, &fs.PathError{Op: "read", Path: d.path, Err: &countError{items: "bytes", max: maxFile, countless: true}}
		}
		if n <= 0 || d.short(n, len(buffer)) {
			return text, nil
		}
	}
}

// short reports whether a read of fewer bytes than wanted ends the file. Files of procfs have size
// 0, and end only at a read of 0 bytes.
func (d descriptor) short(n, wanted int) bool { return n < wanted && d.size > 0 }

func (d descriptor) ReadAt(p []byte, at int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := again(func() (int, error) { return syscall.Pread(d.fd, p[done:], at+int64(done)) })
		if err != nil {
			return done, &fs.PathError{Op: "read", Path: d.path, Err: err}
		}
		wanted := len(p) - done
		done += max(n, 0)
		if n <= 0 || d.short(n, wanted) {
			return done, io.EOF
		}
	}
	return done, nil
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

// held holds files in memory, by absolute path. held fails with the errors of machine.
type held map[string]heldFile

// heldFile is a directory if names is set, a symbolic link if target is set, and a file otherwise.
type heldFile struct {
	data   []byte
	target string
	names  map[string]bool
}

// maxLinks is the number of links that the kernel follows in a path (MAXSYMLINKS).
const maxLinks = 40

// find walks to a path through links. find follows a link at the end of the path only if follow is
// set.
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
		found, ok := h[next]
		if !ok {
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

func (h held) Open(name string) (openFile, error) {
	data, err := h.ReadFile(name)
	return heldOpen{bytes.NewReader(data)}, err
}

// heldOpen is an open file in memory.
type heldOpen struct{ *bytes.Reader }

func (heldOpen) Close() error { return nil }

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

// heldInfo is an entry of a directory listing.
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
