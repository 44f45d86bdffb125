package recorded

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// repack reads the files that unpack wrote below dir.
func repack(t *testing.T, dir string) archive {
	t.Helper()
	a := archive{}
	err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || at == dir {
			return err
		}
		p, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		switch d.Type() {
		case fs.ModeDir:
			return a.addDirectory(p)
		case fs.ModeSymlink:
			target, err := os.Readlink(at)
			if err != nil {
				return err
			}
			return a.addLink(filepath.Dir(p), d.Name(), target)
		}
		data, err := os.ReadFile(at)
		if err != nil {
			return err
		}
		return a.addFile(filepath.Dir(p), d.Name(), data)
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestFilesKeepEveryByte(t *testing.T) {
	row := []byte("0123456789abcdef")
	zeros := make([]byte, maxBytes)
	for name, c := range map[string]struct {
		data []byte
		text string // the form of the entry in the archive
	}{
		"a line":                {[]byte("one\n"), "    x = one\n"},
		"a line between spaces": {[]byte("  one \n"), "    x =   one \n"},
		"what looks like a link": {[]byte("a -> b = c:\n"),
			"    x = a -> b = c:\n"},
		"lines": {[]byte("| a\n\n # b\n\tc\n"),
			"    x:\n        | | a\n        |\n        |  # b\n        | \tc\n"},
		"an empty line":     {[]byte("\n"), "    x:\n        |\n"},
		"nothing":           {nil, "    x:\n"},
		"no end of line":    {[]byte("one"), "    x:\n        x 0000 6f 6e 65\n        x 0003\n"},
		"a carriage return": {[]byte("\r\n"), "    x:\n        x 0000 0d 0a\n        x 0002\n"},
		"no UTF-8":          {[]byte("\xff\n"), "    x:\n        x 0000 ff 0a\n        x 0002\n"},
		"a whole row": {row[:15:15], "    x:\n        x 0000 30 31 32 33 34 35 36 37 38 39 61 62 63 64 65\n        " +
			"x 000f\n"},
		"one zero":          {zeros[:1], "    x:\n        x 0001\n"},
		"a page of zeros":   {zeros, "    x:\n        x 1000\n"},
		"a row after zeros": {append(bytes.Clone(zeros[:32]), 1, 0), "    x:\n        x 0020 01 00\n        x 0022\n"},
		"zeros after a row": {append(append([]byte{}, row...), zeros[:20]...),
			"    x:\n        x 0000 30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66\n        x 0024\n"},
		"text beyond a page": {append(bytes.Repeat([]byte("a"), 2*maxBytes), '\n'), "    x = " +
			strings.Repeat("a", 2*maxBytes) + "\n"},
	} {
		t.Run(name, func(t *testing.T) {
			a := archive{}
			// The next file shows the end of x.
			for _, file := range []string{"x", "y"} {
				if err := a.addFile("d", file, c.data); err != nil {
					t.Fatal(err)
				}
			}
			next := strings.Replace(c.text, "    x", "    y", 1)
			if diff := cmp.Diff(header+"\nd/\n"+c.text+next, a.String()); diff != "" {
				t.Error(diff)
			}
			dir := t.TempDir()
			if err := unpack(dir, a.String()); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(dir, "d", "x"))
			if err != nil || !bytes.Equal(got, c.data) {
				t.Errorf("%q, %v; want %q", got, err, c.data)
			}
		})
	}
}

func TestArchiveEntriesAreSorted(t *testing.T) {
	a := archive{}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// '.' and '-' sort before '/', but the entries of a must follow a.
	check(a.addFile("a.b", "f", []byte("1\n")))
	check(a.addFile("a/c", "f", []byte("1\n")))
	check(a.addFile("a-b", "f", []byte("1\n")))
	check(a.addFile("a", "bytes", []byte{1}))
	check(a.addFile("a", "lines", []byte("1\n2\n")))
	check(a.addLink("a", "link", "c"))
	check(a.addFile("a", "z", []byte("1\n")))
	check(a.addDirectory("a/empty"))
	want := header + `
a/
    z = 1
    link -> c
    lines:
        | 1
        | 2
    bytes:
        x 0000 01
        x 0001

a/c/
    f = 1

a/empty/

a-b/
    f = 1

a.b/
    f = 1
`
	if diff := cmp.Diff(want, a.String()); diff != "" {
		t.Error(diff)
	}
}

func TestHandwrittenArchiveIsRead(t *testing.T) {
	a, err := parse("# a comment\nd/\n\n  # and another\n\tx = 1\n  y:\n    | 2\n    # between\n  z:\n    x 10 0a0b\n  " +
		"  x 20\nd/e/\nd/\n  x.y -> e\n")
	if err != nil {
		t.Fatal(err)
	}
	z := make([]byte, 32)
	z[16], z[17] = 10, 11
	want := archive{
		"d": {kind: directory}, "d/e": {kind: directory},
		"d/x":   {kind: file, data: []byte("1\n")},
		"d/y":   {kind: file, data: []byte("2\n")},
		"d/z":   {kind: file, data: z},
		"d/x.y": {kind: link, target: "e"},
	}
	if diff := cmp.Diff(want, a, cmp.AllowUnexported(entry{})); diff != "" {
		t.Error(diff)
	}
}

func TestParseRowsOfBytesHaveForm(t *testing.T) {
	const file = "d/\n    f:\n"
	last := "        x 0ff0" + strings.Repeat(" 41", 16) + "\n        x 1000\n"
	for name, tt := range map[string]struct {
		text string
		size int // -1 for a refused text
	}{
		"one byte":             {file + "        x 0000 41\n        x 0001\n", 1},
		"the last row":         {file + last, 4096},
		"beyond the last row":  {file + strings.TrimSuffix(last, "\n") + " 41\n        x 1001\n", -1},
		"a digit alone":        {file + "        x 0000 414\n        x 0001\n", -1},
		"a row of 17 bytes":    {file + "        x 0000" + strings.Repeat(" 41", 17) + "\n        x 0011\n", -1},
		"an odd offset":        {file + "        x 0001 41\n        x 0002\n", -1},
		"a row at the margin":  {file + "        x 0000 41\nx 0001\n", -1},
		"a smaller size":       {file + "        x 0000 41 42\n        x 0001\n", -1},
		"bytes after the size": {file + "        x 0000\n        x 0000 41\n        x 0001\n", -1},
		"no size":              {file + "        x 0000 41\n", -1},
		"an absolute link":     {"d/\n    f -> /e\n", -1},
		"a link upwards":       {"d/\n    f -> ../e\n", 0},
		"a link above":         {"d/\n    f -> ../../e\n", -1},
	} {
		a, err := parse(tt.text)
		if tt.size < 0 {
			if err == nil {
				t.Errorf("%s: no error", name)
			}
			continue
		}
		if err != nil || len(a["d/f"].data) != tt.size {
			t.Errorf("%s: %d bytes, %v; want %d", name, len(a["d/f"].data), err, tt.size)
		}
	}
}

func TestUnpackFaultyArchiveNamesLine(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want error
	}{
		"an entry without its place": {"    class = 0x030200\n", errFirst},
		"text without a file":        {"sys/\n    | text\n", errTextAlone},
		"bytes without a file":       {"sys/\n    x 0000 01\n", errBytesAlone},
		"an unindented file":         {"sys/class = 1\n", errNoDirectory},
		"a word alone":               {"sys/\n    class\n", errEntry},
		"the same link twice":        {"sys/\n    a -> b\n    a -> b\n", errTwice},
		"the same file twice":        {"sys/\n    a = 1\n    a:\n", errTwice},
		"a file over a directory":    {"sys/a/\nsys/\n    a = 1\n", errTwice},
		"a directory over a file":    {"sys/\n    a = 1\nsys/a/\n", errNotDirectory},
		"a name of two":              {"sys/\n    a/b = 1\n", errName},
		"not a valid name":           {"sys/\n    :\n", errName},
		"a name with a NUL":          {"sys/\n    a\x00 = 1\n", errName},
		"text after bytes":           {"sys/\n    a:\n        x 0000 01\n        | text\n", errHasBytes},
		"bytes after text":           {"sys/\n    a:\n        | text\n        x 0000 01\n", errLateBytes},
		"bytes after their size":     {"sys/\n    a:\n        x 0010\n        x 0010 01\n", errLateBytes},
		"bytes without their size":   {"sys/\n    a:\n        x 0000 01\n    b = 1\n", errNoSize},
		"a last file without size":   {"sys/\n    a:\n        x 0000 01", errNoSize},
		"bytes that go back":         {"sys/\n    a:\n        x 0010 01\n        x 0000 01\n", errOffset},
		"a size within the bytes":    {"sys/\n    a:\n        x 0010 01\n        x 0010\n", errOffset},
		"a huge offset":              {"sys/\n    a:\n        x ffffffffffffffff 01\n", errOffset},
		"a huge size":                {"sys/\n    a:\n        x 1001\n", errOffset},
		"bytes beyond the longest":   {"sys/\n    a:\n        x 1000 01\n", errRow},
		"a row between rows":         {"sys/\n    a:\n        x 0008 01\n", errRow},
		"a row of seventeen":         {"sys/\n    a:\n        x 0000 " + strings.Repeat("01", 17) + "\n", errRow},
		"capital digits":             {"sys/\n    a:\n        x 0000 0A\n", errEntry},
		"half a byte":                {"sys/\n    a:\n        x 0000 0\n", errRow},
	} {
		err := unpack(t.TempDir(), c.text)
		if at, ok := errors.AsType[*lineError](err); !ok || at.line < 1 || !errors.Is(at.err, c.want) {
			t.Errorf("%s: %v; want the line, and %v", name, err, c.want)
		}
	}
}

// around returns the name of a directory for unpack, next to a foreign file and a foreign
// directory. check fails if an entry outside the named directory changes.
func around(t testing.TB) (dir string, check func()) {
	t.Helper()
	above, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(above, "elsewhere"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(above, "file"), []byte("untouched"), 0o644); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(above, "host"), func() {
		t.Helper()
		names := ""
		entries, err := os.ReadDir(above)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.Name() != "host" {
				names += e.Name() + " "
			}
		}
		text, err := os.ReadFile(filepath.Join(above, "file"))
		if names != "elsewhere file " || string(text) != "untouched" || err != nil {
			t.Errorf("beside the directory there is now %s, and in the file %q, %v", names, text, err)
		}
		if inside, err := os.ReadDir(filepath.Join(above, "elsewhere")); err != nil || len(inside) > 0 {
			t.Errorf("elsewhere there is now %v, %v", inside, err)
		}
	}
}

func TestHostileArchiveStaysInDirectory(t *testing.T) {
	for name, text := range map[string]string{
		"a directory above":             "../elsewhere/\n    a = 1\n",
		"a directory through above":     "sys/../../elsewhere/\n    a = 1\n",
		"a directory from the root":     "/tmp/\n    a = 1\n",
		"no directory at all":           "/\n    file = 1\n",
		"a directory with two slashes":  "sys//\n    a = 1\n",
		"a file above":                  "sys/\n    ../../file = 1\n",
		"a file named above":            "sys/\n    .. = 1\n",
		"a file of several lines above": "sys/\n    ../../file:\n        | 1\n",
		"bytes above":                   "sys/\n    ../../file:\n        x 0000 01\n        x 0001\n",
		"a link above":                  "sys/\n    ../../file -> a\n",
		"a link out":                    "sys/\n    a -> ../../elsewhere\n",
		"a link to the root":            "sys/\n    a -> /\n",
		"a link far out":                "sys/\n    a -> " + strings.Repeat("../", 64) + "etc/passwd\n",
		"a link out after a way in":     "sys/\n    a -> b/../../../elsewhere\n",
		// The link a is the root of the archive: the way up is shorter than the path suggests.
		"a link out through a link":    "sys/b/\n    a -> ../..\n    c -> a/../elsewhere\n",
		"a link to nothing":            "sys/\n    a -> \n",
		"a link with a NUL":            "sys/\n    a -> b\x00c\n",
		"a directory through a link":   "sys/\n    a -> ../proc\nsys/a/\n    b = 1\n",
		"a directory below a link":     "sys/\n    a -> ../proc\nsys/a/b/\n",
		"a file through a link":        "sys/\n    a -> ../b\n    a = 1\n",
		"a file below a link, by name": "sys/\n    a -> ../proc\n    a/b = 1\n",
	} {
		t.Run(name, func(t *testing.T) {
			dir, check := around(t)
			err := unpack(dir, text)
			if at, ok := errors.AsType[*lineError](err); !ok || at.line < 1 {
				t.Errorf("%v; want an error with its line", err)
			}
			// unpack writes no part of a faulty archive.
			if _, err := os.Lstat(dir); err == nil {
				t.Error("it is unpacked in part")
			}
			check()
		})
	}
}

func TestUnpackWritesThroughNoLinkThatWasThereBefore(t *testing.T) {
	for name, c := range map[string]struct{ path, target, text string }{
		"a directory": {"sys", "../elsewhere", "sys/\n    a = 1\n"},
		"a file":      {"a", "../file", "sys/\n    a -> ../a\na/\n    b = 1\n"},
		"a file's":    {"sys/a", "../../file", "sys/\n    a = 1\n"},
		"a new file":  {"sys/a", "../../new", "sys/\n    a = 1\n"},
		"a link's":    {"sys/a", "../../new", "sys/\n    a -> b\n"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, check := around(t)
			at := filepath.Join(dir, c.path)
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(c.target, at); err != nil {
				t.Fatal(err)
			}
			if err := unpack(dir, c.text); err == nil {
				t.Error("no error")
			}
			check()
		})
	}
}

func TestUnpackReplacesNothing(t *testing.T) {
	dir := t.TempDir()
	if err := unpack(dir, "sys/\n    a = 1\n"); err != nil {
		t.Fatal(err)
	}
	if err := unpack(dir, "sys/\n    a = 2\n"); err == nil {
		t.Error("a file is replaced")
	}
	if text, err := os.ReadFile(filepath.Join(dir, "sys", "a")); string(text) != "1\n" {
		t.Errorf("the file reads %q, %v", text, err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(host)
	f.Add("sys/\n    a = 1\n    b -> ../proc\n    c:\n        | 1\n        |\n    d:\n        x 0010 01 02\n        x " +
		"1000\nproc/\n")
	f.Add("sys/b/\n    a -> ../..\n    c -> a/sys\nsys/b/a/\n    d = 1\n")
	f.Add("../elsewhere/\n    x -> /\n")
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := parse(text); err != nil {
			return // parse fails before unpack writes
		}
		dir, check := around(t)
		defer check()
		if err := unpack(dir, text); err != nil {
			return
		}
		a := repack(t, dir)
		for p, e := range a {
			if e.kind != link {
				continue
			}
			// A link may lead nowhere or round in a circle, but not out.
			target, err := filepath.EvalSymlinks(filepath.Join(dir, p))
			if err == nil && target != dir && !strings.HasPrefix(target, dir+"/") {
				t.Errorf("%s leads out, to %s", p, target)
			}
		}
		again, err := parse(a.String())
		if err != nil {
			t.Fatalf("its own text cannot be read: %v\n%s", err, a)
		}
		if diff := cmp.Diff(a.String(), again.String()); diff != "" {
			t.Error(diff)
		}
	})
}
