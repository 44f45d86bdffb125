//go:build amd64 || arm64

package poll

// pause leaves the core to the sibling thread for some tens of nanoseconds.
func pause()
