package wire

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/fault"
)

func TestGeneratedFilesMatchTheDescription(t *testing.T) {
	dir := t.TempDir()
	description, err := os.ReadFile("protocol.def")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "protocol.def"), description, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(programs.Path(t, programs.WireGenerate), dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, name := range []string{"protocol.go", "peerlane_wire.h", "peerlane_values.h"} {
		made, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		kept, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(made, kept) {
			t.Errorf("%s is not what protocol.def gives; run go generate ./relay/wire", name)
		}
	}
}

// The C compiler prints the offsets of fields; Go has to agree.
func TestCAndGoLayoutsMatch(t *testing.T) {
	compiler, err := exec.LookPath("cc")
	programs.MustHave(t, err)
	header, err := os.ReadFile("peerlane_wire.h")
	if err != nil {
		t.Fatal(err)
	}
	var program, want strings.Builder
	program.WriteString("#include \"peerlane_wire.h\"\n#include <stdio.h>\nint main(void) {\n")
	for _, l := range layouts {
		name, fields := fieldsInC(t, string(header), l.name)
		fmt.Fprintf(&program, "printf(\"%s %%zu\", sizeof(struct %s));\n", l.name, name)
		fmt.Fprintf(&want, "%s %d", l.name, l.size)
		if len(fields) != len(l.offsets) {
			t.Fatalf("%s has %d fields in C and %d in Go", l.name, len(fields), len(l.offsets))
		}
		for i, f := range fields {
			fmt.Fprintf(&program, "printf(\" %%zu\", offsetof(struct %s, %s));\n", name, f)
			fmt.Fprintf(&want, " %d", l.offsets[i])
		}
		program.WriteString("puts(\"\");\n")
		want.WriteString("\n")
	}
	program.WriteString("}\n")
	dir := t.TempDir()
	source, binary := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(source, []byte(program.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I.", "-o", binary,
		source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, err := exec.Command(binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want.String() {
		t.Errorf("C:\n%s\nGo:\n%s", got, want.String())
	}
}

// fieldsInC reads a struct's fields out of the header.
func fieldsInC(t *testing.T, header, goName string) (name string, fields []string) {
	t.Helper()
	for _, line := range strings.Split(header, "\n") {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "struct" && f[2] == "{" &&
			strings.ReplaceAll(strings.TrimPrefix(f[1], "peerlane_"), "_", "") == strings.ToLower(goName) {
			name = f[1]
			continue
		}
		if name == "" {
			continue
		}
		if strings.HasPrefix(line, "}") {
			return name, fields
		}
		f := strings.Fields(strings.TrimSuffix(strings.TrimSpace(line), ";"))
		field, _, _ := strings.Cut(f[len(f)-1], "[")
		fields = append(fields, field)
	}
	t.Fatalf("no struct for %s in peerlane_wire.h", goName)
	return "", nil
}

func TestMessagesRoundTrip(t *testing.T) {
	connect := &Connect{}
	for i := range connect.Handle {
		connect.Handle[i] = byte(i)
	}
	grant := &PeerGrant{Send: 1, Grant: 2, Part: 3, Length: 4, Offset: 5, Region: 6}
	for _, m := range []Message{connect, grant} {
		got, sequence, err := Decode(Encode(m, 77))
		if err != nil || sequence != 77 || !bytes.Equal(got.bytes(), m.bytes()) {
			t.Errorf("%T: %v, sequence %d: %+v", m, err, sequence, got)
		}
	}
}

func TestVersionsAreNegotiated(t *testing.T) {
	for _, c := range []struct {
		oldest, newest uint32
		ok             bool
	}{
		{1, 1, true}, {OldestVersion, NewestVersion, true}, {1, 99, true}, // newer ones that still speak ours
		{NewestVersion + 1, 99, false}, {0, OldestVersion - 1, false}, {9, 1, false},
	} {
		version, err := Negotiate("client", c.oldest, c.newest)
		if ok := err == nil; ok != c.ok || ok && (version < OldestVersion || version > NewestVersion) {
			t.Errorf("%d to %d: version %d, %v", c.oldest, c.newest, version, err)
		}
		if err != nil && !errors.Is(err, &Error{Status: StatusVersion}) {
			t.Errorf("%d to %d: %v", c.oldest, c.newest, err)
		}
	}
}

func TestTextOfStrangerIsSanitised(t *testing.T) {
	field := make([]byte, 16)
	SetText(field, "far too long for the field")
	if got := Text(field); got != "far too long fo" {
		t.Errorf("%q", got)
	}
	if got := Text([]byte("a\x1b[31m\nb\xff\x00c")); got != "a?[31m?b?" {
		t.Errorf("%q", got)
	}
}

func TestSetTextLongTextKeepsWholeCharactersAndTheCode(t *testing.T) {
	for _, c := range []struct {
		room       int
		text, want string
	}{
		{16, "no lane [PL1402]", "no … [PL1402]"},
		{17, "no lane [PL1402]", "no lane [PL1402]"},
		{17, "no lanes [PL1402]", "no l… [PL1402]"},
		{17, "noäöü lanes [PL1402]", "noä… [PL1402]"},
		{13, "no lanes [PL1402]", "… [PL1402]"},
		{12, "no lanes [PL1402]", "no lanes [P"},
		{8, "no läne", "no län"},
		{5, "no läne", "no l"},
		{6, "no läne", "no l"},
		{4, "\x80\x80\x80\x80\x80", "?"},
	} {
		field := make([]byte, c.room)
		SetText(field, c.text)
		if got := Text(field); got != c.want || field[c.room-1] != 0 {
			t.Errorf("%q in %d bytes: %q, want %q", c.text, c.room, got, c.want)
		}
	}
}

func TestFailureWithALongReasonMatchesItsCode(t *testing.T) {
	cause := errors.New(strings.Repeat("nö ", 1000))
	err := NewFailure(&fault.Error{Code: fault.Unreachable, Operation: "connect", Cause: cause}).Err()
	if !errors.Is(err, fault.Unreachable) || errors.Is(err, fault.NoPort) {
		t.Errorf("%q", err)
	}
}

// The object of an error follows the text. An earlier release reads the text alone, and sends none.
func TestFailureCarriesTheObjectBehindTheText(t *testing.T) {
	long := strings.Repeat("ö", 100)
	for _, c := range []struct {
		err    *Error
		object string
	}{
		{Errorf(StatusLimit, "a limit").On("relay.limits.clients"), "relay.limits.clients"},
		{Errorf(StatusInternal, "of a cause: %w", &fault.Error{Operation: "open", Object: "/dev/null"}), "/dev/null"},
		{Errorf(StatusInternal, "two: %w, %w", errors.New("a"), os.NewSyscallError("mmap", unix.ENOMEM)), "mmap"},
		{Errorf(StatusInternal, "%s", strings.Repeat(long, 10)).On(long), long[:maxObject]},
		{Errorf(StatusInternal, "a text\x00with a zero byte").On("a"), "a"},
		{Errorf(StatusInternal, "no object"), ""},
	} {
		m := NewFailure(c.err)
		var got *Error
		if !errors.As(m.Err(), &got) || got.Object != c.object || got.Status != StatusOf(c.err) {
			t.Errorf("%.40v: the object is %q, want %q", c.err, got.Object, c.object)
		}
		if text, _, _ := strings.Cut(c.err.Reason, "\x00"); !strings.HasPrefix(text, Text(m.Reason[:])) {
			t.Errorf("the text is %q, want the beginning of %.40q", Text(m.Reason[:]), text)
		}
		if last := m.Reason[len(m.Reason)-1]; last != 0 {
			t.Errorf("%.40v: the field ends with %d, and C needs a zero byte", c.err, last)
		}
	}
	of := &Error{Status: StatusLimit, Object: "relay.limits.clients"}
	if err := Errorf(StatusLimit, "a limit").On("relay.limits.memories"); errors.Is(err, of) ||
		!errors.Is(err, &Error{Status: StatusLimit}) {
		t.Errorf("%v is of %q", err, of.Object)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add(Encode(&Hello{Magic: Magic, Oldest: 1, Newest: 1}, 1))
	f.Add(Encode(&Export{Bytes: 1 << 40, Offset: 7, Length: ^uint64(0)}, 2))
	f.Add(Encode(&PeerClose{Status: 99}, 0))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		m, sequence, err := Decode(datagram)
		if err != nil {
			if !errors.Is(err, &Error{Status: StatusMalformed}) {
				t.Errorf("an error of another kind: %v", err)
			}
			return
		}
		if !bytes.Equal(Encode(m, sequence), datagram) {
			t.Errorf("%T does not come back", m)
		}
	})
}
