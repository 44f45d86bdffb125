package device

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A mapping without memory behind it faults as BAR1 of a GPU that was reset does.
func TestStoreAndLoadOfLostMemoryReturnErrors(t *testing.T) {
	fd, err := unix.MemfdCreate("peerlane-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	size := os.Getpagesize()
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	data, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(data) }()
	for _, readBack := range []bool{false, true} {
		if err := store(data, []byte("sixteen bytes---"), readBack); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	if err := store(data, []byte("sixteen bytes---"), false); err == nil {
		t.Error("a store into lost memory ends without an error")
	}
	if loaded, err := Load(Place{stores: data}, make([]byte, 1)); err == nil {
		t.Errorf("a load from lost memory ends without an error: %v", loaded)
	}
	runtime.KeepAlive(data)
}
