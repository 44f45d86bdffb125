package programs

import (
	"os"
	"syscall"
)

// Write makes a program of a text, for a test that runs beside others. What starts a
// process at that moment would give it the file, open for writing, and until it has closed
// it the kernel executes the program for nobody (ETXTBSY).
func Write(path string, text []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, text, 0o755)
}
