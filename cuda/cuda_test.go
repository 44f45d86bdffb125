package cuda

import (
	"errors"
	"path/filepath"
	"testing"
)

func TestOpenLibraryMissingFileFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libcuda.so.1")
	_, err := openLibrary(path)
	var e *LibraryError
	if !errors.As(err, &e) || e.Library != path || e.Missing != "" || e.Reason == "" {
		t.Fatalf("OpenLibrary: %#v; want a LibraryError with the loader's reason", err)
	}
	if remedy := e.remedy(); remedy != "check "+LibraryVariable {
		t.Errorf("the remedy is %q", remedy)
	}
}

func TestOpenLibraryWithoutSymbolsFails(t *testing.T) {
	_, err := openLibrary("libm.so.6")
	var e *LibraryError
	if !errors.As(err, &e) || e.Missing != "cuInit" {
		t.Fatalf("OpenLibrary(libm.so.6): %v; want a LibraryError that misses cuInit", err)
	}
}

func TestResultsHaveNamesAndClasses(t *testing.T) {
	err := error(&CallError{Call: "cuMemCreate", On: "2 MiB on device 0", Result: ErrOutOfMemory,
		Name: "CUDA_ERROR_OUT_OF_MEMORY", Text: "out of memory"})
	if !errors.Is(err, ErrOutOfMemory) || errors.Is(err, ErrNotReady) {
		t.Errorf("errors.Is does not distinguish the results")
	}
	// The text itself: operators search for the name of the result.
	if want := "cuMemCreate (2 MiB on device 0): CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	for r, want := range map[Result]bool{
		ErrInvalidValue: false, ErrNotReady: false, ErrContextIsDestroyed: false, ErrHostMemoryAlreadyRegistered: false,
		ErrIllegalAddress: true, ErrLaunchFailed: true, ErrUnknown: true,
	} {
		if r.Sticky() != want {
			t.Errorf("%v: sticky %v, want %v", r, !want, want)
		}
	}
}
