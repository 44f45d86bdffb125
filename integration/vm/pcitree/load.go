package pcitree

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// device is the module's character device.
const device = "/dev/pcitree"

// Load makes the tree appear in the running kernel, in place of the former tree. RDMA devices in
// the former tree must be removed first.
func (t *Tree) Load() error {
	if err := write(t.records()); err != nil {
		return fmt.Errorf("load a PCIe tree of %d functions: %w", len(t.functions), err)
	}
	return nil
}

// Unload removes the tree. Until then the module cannot be removed.
func Unload() error {
	if err := write((&Tree{}).records()); err != nil {
		return fmt.Errorf("remove the PCIe tree: %w", err)
	}
	return nil
}

// write writes the whole table with one call.
func write(records []byte) error {
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; this runs in the guest of integration/vm, after modprobe pcitree", err)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(records)
	switch {
	case errors.Is(err, syscall.EBUSY):
		err = fmt.Errorf("%w; remove the RDMA devices in the tree first (rdma link delete)", err)
	case err != nil:
		err = fmt.Errorf("%w; dmesg has the reason", err)
	}
	return errors.Join(err, f.Close())
}
