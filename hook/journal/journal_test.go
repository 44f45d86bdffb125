package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/testutil"
)

// receive returns the datagram that Write sends to the socket at path below the root.
func receive(t *testing.T, path, message string) string {
	t.Helper()
	root := testutil.ShortDir(t)
	conn := testutil.ListenDatagrams(t, filepath.Join(root, path))
	if err := Write(paths.New(root), SeverityError, "c", "g", message); err != nil {
		t.Fatal(err)
	}
	return testutil.ReadDatagram(t, conn)
}

// journald drops an entry with an incomplete field.
func TestLongMessageKeepsTheEntryComplete(t *testing.T) {
	for name, message := range map[string]string{
		"one line":   "é" + strings.Repeat("aé", 100<<10),
		"many lines": strings.Repeat("é\n", 100<<10),
	} {
		fields := map[string]string{}
		for rest := receive(t, "run/systemd/journal/socket", message); rest != ""; {
			line, after, ok := strings.Cut(rest, "\n")
			if !ok {
				t.Fatalf("%s: the last field is incomplete: %.100q", name, rest)
			}
			field, value, short := strings.Cut(line, "=")
			if !short {
				if len(after) < 8 {
					t.Fatalf("%s: %s has no size", name, field)
				}
				size := binary.LittleEndian.Uint64([]byte(after))
				if after = after[8:]; size >= uint64(len(after)) || after[size] != '\n' {
					t.Fatalf("%s: %s has size %d, in %d bytes", name, field, size, len(after))
				}
				value, after = after[:size], after[size+1:]
			}
			fields[field], rest = value, after
		}
		text := fields["MESSAGE"]
		if !strings.HasPrefix(`container "c": `+message, text) || len(text) < maxMessage-utf8.UTFMax ||
			len(text) > maxMessage || !utf8.ValidString(text) {
			t.Errorf("%s: the message has %d bytes and ends with %q", name, len(text), text[max(0, len(text)-10):])
		}
		for field, want := range map[string]string{
			"PRIORITY": "3", "SYSLOG_IDENTIFIER": identifier, "PEERLANE_CONTAINER": "c", "PEERLANE_GENERATION": "g",
		} {
			if fields[field] != want {
				t.Errorf("%s: %s is %q, want %q", name, field, fields[field], want)
			}
		}
	}
}

// A host without a journal has syslog, and a host without both no log.
func TestWriteUsesFirstLogThatListens(t *testing.T) {
	const native, line = "run/systemd/journal/socket", "dev/log"
	abandoned := func(root, path string) { testutil.ListenDatagrams(t, filepath.Join(root, path)).Close() }
	blocked := func(root, path string) { // a file in place of the directory
		dir := filepath.Dir(filepath.Join(root, path))
		if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o755), os.WriteFile(dir, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name         string
		native, line func(root, path string) // nil for none
		syslog       bool                    // syslog gets the message
		want         error
	}{
		{"no log", nil, nil, false, nil},
		{"syslog", nil, nil, true, nil},
		{"an ended journal", abandoned, nil, true, nil},
		{"ended logs", abandoned, abandoned, false, nil},
		{"a journal without access", blocked, nil, false, unix.ENOTDIR},
		{"syslog without access", nil, blocked, false, unix.ENOTDIR},
		{"an ended journal, syslog without access", abandoned, blocked, false, unix.ENOTDIR},
	} {
		root := testutil.ShortDir(t)
		if c.native != nil {
			c.native(root, native)
		}
		if c.line != nil {
			c.line(root, line)
		}
		read := func() string { return "" }
		if c.syslog {
			conn := testutil.ListenDatagrams(t, filepath.Join(root, line))
			read = func() string { return testutil.ReadDatagram(t, conn) }
		}
		before := descriptors(t)
		err := Write(paths.New(root), SeverityWarning, "c", "g", "two\nlines")
		if after := descriptors(t); after != before {
			t.Errorf("%s: %d descriptors are open, and %d before", c.name, after, before)
		}
		want := ""
		if c.syslog {
			want = fmt.Sprintf(`<28>peerlane-hook[%d]: container "c": two; lines`, os.Getpid())
		}
		if got := read(); got != want || !testutil.HasError(err, c.want) {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
	}
}

// descriptors returns the number of this process's descriptors.
func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestMessageNamesContainerOnce(t *testing.T) {
	for _, c := range []struct{ name, container, message, want string }{
		{"no container", "", "text", "text"},
		{"a container", "c", "text", `container "c": text`},
		{"a message about it", "c", `end of container "c"`, `end of container "c"`},
		{"a message about another", "c", `container "cc"`, `container "c": container "cc"`},
	} {
		if got := prefixed(c.container, c.message); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestShortenedKeepsMessageOfLimit(t *testing.T) {
	for _, c := range []struct{ bytes, want int }{{maxMessage, 60 << 10}, {maxMessage + 1, 60 << 10}} {
		if got := shortened(strings.Repeat("a", c.bytes)); len(got) != c.want {
			t.Errorf("%d bytes: %d, want %d", c.bytes, len(got), c.want)
		}
	}
}

func TestLongMessageFitsSyslog(t *testing.T) {
	line := receive(t, "dev/log", strings.Repeat("é\n", 100<<10))
	if len(line) > 64<<10 || !strings.HasPrefix(line, "<27>peerlane-hook[") || !utf8.ValidString(line) {
		t.Errorf("%d bytes: %.100q", len(line), line)
	}
}
