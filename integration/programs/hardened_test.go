package programs_test

import (
	"debug/buildinfo"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/integration/programs"
)

// hardening is the hardening that a file's headers must show, in addition to the common
// hardening.
type hardening struct {
	// static reports a binary that loads no library and has no relocations.
	static bool
	// lazy reports that functions are resolved at the first call.
	lazy bool
	// c reports C code that writes to buffers, and so calls the functions that check buffers. A
	// binary of the go command has too little C code for the check.
	c bool
}

// hardened are the files that make builds.
var hardened = map[string]hardening{
	programs.Hook:    {static: true},
	programs.Runtime: {static: true},
	programs.Relay:   {},
	// go-nvml leaves NVML's functions undefined until it has opened the library: with immediate
	// binding the program would not start on a host without a driver.
	programs.Peerlane:         {lazy: true},
	"libpeerlane-cuda-sim.so": {c: true},
	"libpeerlane.so.0":        {c: true},
	"libnccl-net-peerlane.so": {c: true},

	"nixl/libplugin_PEERLANE.so": {c: true},
}

// lacks returns the missing hardening of a file.
func lacks(f *elf.File, want hardening) (missing []string) {
	require := func(right bool, format string, arguments ...any) {
		if !right {
			missing = append(missing, fmt.Sprintf(format, arguments...))
		}
	}
	segment := func(kind elf.ProgType) *elf.Prog {
		for _, p := range f.Progs {
			if p.Type == kind {
				return p
			}
		}
		return nil
	}
	stack := segment(elf.PT_GNU_STACK)
	require(stack != nil && stack.Flags&elf.PF_X == 0, "a stack that is not executable (-Wl,-z,noexecstack)")
	for _, p := range f.Progs {
		require(p.Type != elf.PT_LOAD || p.Flags&(elf.PF_W|elf.PF_X) != elf.PF_W|elf.PF_X,
			"memory that is either written or executed, at %#x", p.Vaddr)
	}
	if want.static {
		require(segment(elf.PT_INTERP) == nil && segment(elf.PT_DYNAMIC) == nil, "static linking (CGO_ENABLED=0)")
		return missing
	}
	require(f.Type == elf.ET_DYN, "an address that is not fixed (-buildmode=pie)")
	require(segment(elf.PT_GNU_RELRO) != nil, "tables that are read-only after loading (-Wl,-z,relro)")
	number := func(tag elf.DynTag) (all uint64, found bool) {
		values, err := f.DynValue(tag)
		for _, v := range values {
			all |= v
		}
		return all, err == nil && len(values) > 0
	}
	flags, _ := number(elf.DT_FLAGS)
	flags1, _ := number(elf.DT_FLAGS_1)
	_, bound := number(elf.DT_BIND_NOW)
	bound = bound || elf.DynFlag(flags)&elf.DF_BIND_NOW != 0 || elf.DynFlag1(flags1)&elf.DF_1_NOW != 0
	require(bound || want.lazy, "functions that are bound at once (-Wl,-z,now)")
	_, relocated := number(elf.DT_TEXTREL)
	require(!relocated && elf.DynFlag(flags)&elf.DF_TEXTREL == 0, "code that the loader need not write to (-fPIC)")
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		_, set := number(tag)
		require(!set, "no directories of its own to look for libraries in (%v)", tag)
	}
	if want.c {
		imported, err := f.ImportedSymbols()
		imports := func(match func(name string) bool) bool {
			return err == nil && slices.ContainsFunc(imported, func(s elf.ImportedSymbol) bool { return match(s.Name) })
		}
		require(imports(func(name string) bool { return name == "__stack_chk_fail" }),
			"a guarded stack (-fstack-protector-strong)")
		require(imports(func(name string) bool { return name != "__stack_chk_fail" && strings.HasSuffix(name, "_chk") }),
			"checked buffers (-D_FORTIFY_SOURCE=2)")
	}
	return missing
}

func TestBinariesAreHardened(t *testing.T) {
	for name, want := range hardened {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join("../../bin", name)
			f, err := elf.Open(path)
			if errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("%w; run make build", err)
			}
			programs.MustHave(t, err)
			defer f.Close()
			for _, what := range lacks(f, want) {
				t.Errorf("%s missing", what)
			}
			if want.c {
				return
			}
			info, err := buildinfo.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			settings := map[string]string{}
			for _, s := range info.Settings {
				settings[s.Key] = s.Value
			}
			if settings["-trimpath"] != "true" {
				t.Error("it shows paths of the machine that built it: -trimpath")
			}
		})
	}
}

// A file without hardening has every finding.
func TestBinaryMissingHardeningIsNamed(t *testing.T) {
	compiler, err := exec.LookPath("gcc")
	programs.MustHave(t, err)
	dir := t.TempDir()
	source := filepath.Join(dir, "bad.c")
	text := "#include <string.h>\nint f(const char *s) { char b[64]; strcpy(b, s); return b[strlen(b) / 2]; }\nint " +
		"main(int argc, char **argv) { return f(argv[argc - 1]); }\n"
	if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		flags string
		want  hardening
		lacks []string // prefixes of the lines
	}{
		{"-fno-stack-protector -U_FORTIFY_SOURCE -no-pie -Wl,-z,norelro,-z,lazy,-z,execstack,-rpath,/tmp", hardening{c: true},
			[]string{"a stack that", "an address", "tables", "functions", "no directories", "a guarded stack",
				"checked buffers"}},
		{"-fno-stack-protector -U_FORTIFY_SOURCE -no-pie -Wl,-z,relro,-z,lazy,-z,noexecstack", hardening{static: true},
			[]string{"static"}},
		{"-fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 -fPIE -pie -Wl,-z,relro,-z,lazy,-z,noexecstack",
			hardening{c: true}, []string{"functions"}},
		{"-fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 -fPIE -pie -Wl,-z,relro,-z,lazy,-z,noexecstack",
			hardening{c: true, lazy: true}, nil},
		{"-fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 -fPIE -pie -Wl,-z,relro,-z,now,-z,noexecstack",
			hardening{c: true}, nil},
	} {
		path := filepath.Join(dir, "bad")
		if out, err := exec.Command(compiler, append(strings.Fields("-O2 "+test.flags), "-o", path,
			source)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		f, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		missing := lacks(f, test.want)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(missing, test.lacks, strings.HasPrefix) {
			t.Errorf("%s: %s", test.flags, cmp.Diff(test.lacks, missing))
		}
	}
}
