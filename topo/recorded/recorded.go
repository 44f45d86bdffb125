// Package recorded holds a host to read without having one: its sysfs and
// procfs, as one text file that a reader can compare line by line.
//
// It has eight GPUs and two NICs, four GPUs to a NIC. GPUs 0, 1, 4 and 5 sit
// under a NIC's switch; 2, 3, 6 and 7 under another host bridge of that
// socket.
//
// Capture makes such a file of a running host, Unpack makes directories of the
// file. The file's first lines explain its form.
package recorded

import (
	_ "embed" // for host.txt
	"fmt"
	"os"
	"path/filepath"
)

//go:embed host.txt
var host string

// Text is the recorded host as Capture wrote it.
func Text() string { return host }

// Unpack writes the host below dir, which need not exist, and returns the roots
// of its sysfs and procfs, for topo.Options.
func Unpack(dir string) (sysfs, proc string, err error) {
	if err := unpack(dir, host); err != nil {
		return "", "", fmt.Errorf("unpacking the recorded host into %s: %w", dir, err)
	}
	return filepath.Join(dir, "sys"), filepath.Join(dir, "proc"), nil
}

// unpack writes below dir, and nowhere else, what the text of an archive
// describes. It replaces nothing that is there.
func unpack(dir, text string) error {
	a, err := parse(text)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// The root is left by no link, not even by one that was in dir before.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // nothing is written through it
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
		_ = f.Close() // the first error is the one that matters
		return err
	}
	return f.Close()
}
