//go:build !amd64

package device

const hasFence = false

func fence() {}
