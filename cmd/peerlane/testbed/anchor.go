package testbed

import "github.com/peerlane/peerlane/config/paths"

// T is the part of testing.TB that this package uses.
type T interface {
	Helper()
	Cleanup(func())
	Error(...any)
	Fatal(...any)
}

// MountAnchor mounts the anchor of a layout until the end of a test, like `peerlane cdi generate`.
// In a user namespace the anchor stays a directory.
func MountAnchor(t T, l paths.Layout) {
	t.Helper()
	if !paths.MountsAnchor() {
		return
	}
	UnmountAnchor(t, l)
	if err := l.MountAnchor(); err != nil {
		t.Fatal(err)
	}
}

// UnmountAnchor unmounts the anchor at the end of a test, because a mount point cannot be removed.
func UnmountAnchor(t T, l paths.Layout) {
	t.Helper()
	t.Cleanup(func() {
		if _, err := l.UnmountAnchor(); err != nil {
			t.Error(err)
		}
	})
}
