// Package recorded holds a recorded host for tests: sysfs and procfs as a text file that a
// reader can compare line by line.
//
// The host has eight GPUs and two NICs, four GPUs for each NIC. GPUs 0, 1, 4 and 5 are below a
// NIC's switch; GPUs 2, 3, 6 and 7 are below another host bridge of the socket.
//
// Capture makes the file from a running host, Unpack makes directories from the file. The first
// lines of the file explain its form.
package recorded

import (
	_ "embed" // for host.txt
	"fmt"
	"os"
	"path/filepath"
)

// host is the recorded host, in the form of Capture.
//
//go:embed host.txt
var host string

// Unpack writes the host below dir, and returns the roots of sysfs and procfs for topo.Options.
// Unpack creates a missing dir.
func Unpack(dir string) (sysfs, proc string, err error) {
	if err := unpack(dir, host); err != nil {
		return "", "", fmt.Errorf("unpack the recorded host into %s: %w", dir, err)
	}
	return filepath.Join(dir, "sys"), filepath.Join(dir, "proc"), nil
}

// unpack writes the files of an archive only below dir, and replaces no existing file.
func unpack(dir, text string) error {
	a, err := parse(text)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// os.Root follows no link out of the root, not even a link that already exists in dir.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // closing a directory loses no data
	for _, p := range a.paths() {
		switch e := a[p]; e.kind {
		case directory:
			err = root.MkdirAll(p, 0o755)
		case link:
			err = root.Symlink(e.target, p)
		case file:
			err = write(root, p, e.data)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func write(root *os.Root, p string, data []byte) error {
	f, err := root.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		_ = f.Close() // the first error matters
		return err
	}
	return f.Close()
}
