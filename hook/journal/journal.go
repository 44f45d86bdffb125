package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/unixsocket"
)

// Severities of a message, as in syslog(3).
const (
	SeverityError   = 3 // LOG_ERR
	SeverityWarning = 4 // LOG_WARNING
	SeverityInfo    = 6 // LOG_INFO
)

// identifier is the program's name in the host's log.
const identifier = "peerlane-hook"

// Write writes a message about a container, whose id may be empty, to the host's journal, or to
// syslog on a host without a journal: some runtimes drop a hook's output, and a relay's log is
// removed with the container. The sockets are below the layout's root, so that tests have their
// own log. A host without both logs is no error.
func Write(l paths.Layout, severity int, container, generation, message string) error {
	return WriteCause(l, severity, container, generation, message, "")
}

// WriteCause is Write with the cause of a relay's end as a field.
func WriteCause(l paths.Layout, severity int, container, generation, message, cause string) error {
	native := filepath.Join(l.Root, "run/systemd/journal/socket")
	err := datagram(native, journalEntry(severity, container, generation, message, cause))
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) {
		return err
	}
	err = datagram(filepath.Join(l.Root, "dev/log"), syslogLine(severity, container, message))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil
	}
	return err
}

// journalEntry returns an entry in systemd's native protocol
// (https://systemd.io/JOURNAL_NATIVE_PROTOCOL).
func journalEntry(severity int, container, generation, message, cause string) []byte {
	var b bytes.Buffer
	for _, field := range []struct{ name, value string }{
		{"MESSAGE", shortened(prefixed(container, message))},
		{"PRIORITY", fmt.Sprint(severity)},
		{"SYSLOG_IDENTIFIER", identifier},
		{"PEERLANE_CONTAINER", container},
		{"PEERLANE_GENERATION", generation},
		{"PEERLANE_CAUSE", cause}, // the cause of a relay's end
	} {
		switch {
		case field.value == "":
		case strings.ContainsRune(field.value, '\n'):
			b.WriteString(field.name + "\n")
			b.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(field.value))))
			b.WriteString(field.value + "\n")
		default:
			b.WriteString(field.name + "=" + field.value + "\n")
		}
	}
	return b.Bytes()
}

// syslogLine returns a line of syslog(3) for /dev/log, without the time, which the receiver adds.
func syslogLine(severity int, container, message string) []byte {
	const daemon = 3 << 3 // LOG_DAEMON
	return fmt.Appendf(nil, "<%d>%s[%d]: %s", daemon|severity, identifier, os.Getpid(),
		shortened(strings.ReplaceAll(prefixed(container, message), "\n", "; ")))
}

// maxMessage is the maximum of a message in bytes. The last output of a relay may exceed a
// datagram; the rest of 64 KiB is for the other fields.
const maxMessage = 60 << 10

// shortened returns the first maxMessage bytes of a message, without an incomplete character.
func shortened(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	return strings.ToValidUTF8(message[:maxMessage], "")
}

func prefixed(container, message string) string {
	if container == "" || strings.Contains(message, fmt.Sprintf("container %q", container)) {
		return message
	}
	return fmt.Sprintf("container %q: %s", container, message)
}

// datagram sends a datagram to a socket. It does not wait for a slow reader.
func datagram(path string, text []byte) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	return unixsocket.Through(path, func(short string) error {
		err := unix.Sendto(fd, text, unix.MSG_NOSIGNAL, &unix.SockaddrUnix{Name: short})
		if err != nil {
			return fmt.Errorf("write to %s: %w", path, err)
		}
		return nil
	})
}
