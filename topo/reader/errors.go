package reader

import (
	"errors"
	"fmt"
)

// Causes of a capture that is refused.
var (
	errNotGzip      = errors.New("it is not compressed by gzip, or truncated")
	errNotHost      = errors.New("its content is not a host")
	errLongPath     = fmt.Errorf("its path or target is longer than %d bytes", maxCapturePath)
	errOutside      = errors.New(`paths of a capture must be below sys/ or proc/, without "." or ".." elements`)
	errTwice        = errors.New("it occurs twice")
	errNotDirectory = errors.New("is not a directory")
	errTooMuch      = fmt.Errorf("it exceeds the limits of a capture: %d files, links and directories, %d bytes",
		maxCaptureMembers, maxCaptureContent)
)

// memberError is the error of a member of a capture.
type memberError struct {
	number int    // from 1
	name   string // empty if unknown
	err    error
}

func (e *memberError) Error() string {
	if e.name == "" {
		return fmt.Sprintf("member %d: %v", e.number, e.err)
	}
	return fmt.Sprintf("member %d, %q: %v", e.number, e.name[:min(len(e.name), 200)], e.err)
}

func (e *memberError) Unwrap() error { return e.err }

// otherTarError is the cause of a tar.gz that is not a capture.
type otherTarError struct{ first string } // name of its first member

func (e *otherTarError) Error() string {
	return fmt.Sprintf("it is %q, not %s: this is another tar.gz", e.first, captureHead)
}

// formatError is the cause of a capture of another format.
type formatError struct{ format int }

func (e *formatError) Error() string {
	return fmt.Sprintf("it has format %d, and this version of peerlane reads format %d", e.format, captureFormat)
}

// answerError is the cause of an impossible answer of NVML.
type answerError struct {
	gpu   int // place in the answer
	value string
}

func (e *answerError) Error() string {
	return fmt.Sprintf("GPU %d of NVML's answer: impossible %s", e.gpu, e.value)
}

// linkError is the cause of a link out of a capture.
type linkError struct{ target string }

func (e *linkError) Error() string {
	return fmt.Sprintf("its link to %q leads out of the capture", e.target)
}

// typeError is the cause of a member that is not a file, a directory or a symbolic link.
type typeError struct{ flag byte } // of package tar

func (e *typeError) Error() string {
	return fmt.Sprintf("it has type %q; a capture may only have files, directories and symbolic links", e.flag)
}

// streamError is the cause of an endless stream.
type streamError struct{ what string } // such as "unpacked"

func (e *streamError) Error() string {
	return fmt.Sprintf("it exceeds the limit of %s bytes of a capture", e.what)
}

// errNotRegular is the cause of a pipe or a device in place of a file.
var errNotRegular = errors.New("it is not a regular file")

// errNoPCI is the cause of a refused file of hwloc without PCI devices.
var errNoPCI = errors.New("it has no PCI devices, so GPUs and NICs are unknown; lstopo --of xml --whole-io " +
	"writes them, if hwloc was built with PCI support")

// nameError is the cause of NICs without different names.
type nameError struct {
	name      string // empty: the device at first has none
	first     string // place of the device
	duplicate string // place of the second device
}

func (e *nameError) Error() string {
	if e.name == "" {
		return fmt.Sprintf("the RDMA device at %s has no name", e.first)
	}
	return fmt.Sprintf("the NICs at %s and %s have the same name %s", e.first, e.duplicate, e.name)
}

// Causes of refused text.
var (
	errUTF16     = errors.New("it is text in UTF-16; save it in UTF-8")
	errNoElement = errors.New("it has no element")
	errNoHeader  = errors.New("it has no line with the names of the GPUs")
	errSameGPU   = errors.New("have the same number")
)

// countError is the cause of more items than a host can have.
type countError struct {
	items     string // such as "GPUs"
	count     int
	max       int
	countless bool // the reader did not count above max
}

func (e *countError) Error() string {
	if e.countless {
		return fmt.Sprintf("it has more than %d %s", e.max, e.items)
	}
	return fmt.Sprintf("there are %d %s, more than %d", e.count, e.items, e.max)
}
