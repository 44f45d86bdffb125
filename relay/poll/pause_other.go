//go:build !amd64 && !arm64

package poll

func pause() {}
