package programs

import (
	"os"
	"syscall"
)

// Write writes the text of a program, for a test that runs in parallel with other tests. A process
// that starts meanwhile would inherit the file, open for writing, and the kernel executes no file
// that is open for writing (ETXTBSY).
func Write(path string, text []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, text, 0o755)
}
