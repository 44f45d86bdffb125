//go:build amd64 || arm64

package poll

// pause leaves the processor's core to its other thread for some tens of nanoseconds.
func pause()
