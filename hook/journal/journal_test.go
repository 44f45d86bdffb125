package journal

import (
	"encoding/binary"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

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

func TestLongMessageFitsSyslog(t *testing.T) {
	line := receive(t, "dev/log", strings.Repeat("é\n", 100<<10))
	if len(line) > 64<<10 || !strings.HasPrefix(line, "<27>peerlane-hook[") || !utf8.ValidString(line) {
		t.Errorf("%d bytes: %.100q", len(line), line)
	}
}
