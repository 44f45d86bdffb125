package main

import (
	"debug/elf"
	"os"
	"testing"

	"github.com/peerlane/peerlane/integration/programs"
)

// The hook runs on the host before every container: it must load no library that an image could
// replace, and start fast.
func TestBinaryIsStaticAndSmall(t *testing.T) {
	path := programs.Path(t, programs.Hook)
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("the hook is linked dynamically: segment %v", p.Type)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	const limit = 8_000_000
	if info.Size() >= limit {
		t.Errorf("the hook has %d bytes, want less than %d", info.Size(), limit)
	}
	t.Logf("%d bytes", info.Size())
}
