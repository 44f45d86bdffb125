// Package wire has the layouts of messages and of shared memory: control messages between a client
// and its relay, peer messages between relays, and the rings.
//
// protocol.def describes all layouts once; the Go form (protocol.go) and the C
// form (peerlane_wire.h, and peerlane_values.h for programs) are made from it.
package wire

//go:generate go run ./generate .

import (
	"bytes"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"unicode/utf8"
	"unsafe"

	"github.com/peerlane/peerlane/internal/fault"
)

// Headers are the C form.
//
//go:embed peerlane_wire.h peerlane_values.h
var Headers embed.FS

// Status is the outcome of a request or an operation.
type Status uint32

func (s Status) String() string {
	if text, ok := statusText[s]; ok {
		return text
	}
	return fmt.Sprintf("status %d, which this version does not know", uint32(s))
}

// Error is a Status other than StatusOK with a message. errors.Is compares the status, and an object
// that the target has: errors.Is(err, &wire.Error{Status: ..., Object: ...}).
type Error struct {
	Status Status
	Reason string
	Object string // container, GPU, key of config.toml or failed call; empty if unknown
	cause  error  // wraps the errors of %w of Errorf; nil without %w
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return e.Status.String()
	}
	return e.Reason
}

// Is reports whether target is an Error of the same status, and of the same object if target has an
// object; or a [fault.Code] that the reason prints: the other process sends the reason's text and not
// the error itself.
func (e *Error) Is(target error) bool {
	switch t := target.(type) {
	case *Error:
		return t.Status == e.Status && (t.Object == "" || t.Object == ObjectOf(e))
	case fault.Code:
		return t.In(e.Reason)
	}
	return false
}

// Unwrap returns the error that wraps the errors of %w of [Errorf], or nil.
func (e *Error) Unwrap() error { return e.cause }

// Errorf makes an Error. Errorf wraps the errors of %w, as fmt.Errorf does; another process gets
// only the status and the text.
func Errorf(s Status, format string, arguments ...any) *Error {
	err := fmt.Errorf(format, arguments...)
	e := &Error{Status: s, Reason: err.Error()}
	switch err.(type) {
	case interface{ Unwrap() error }, interface{ Unwrap() []error }:
		e.cause = err
	}
	return e
}

// On sets the object of e.
func (e *Error) On(object string) *Error {
	e.Object = object
	return e
}

// ObjectOf returns the object of the first error in the chain of err that has an object: an Error, a
// [fault.Error], a failed system call, or another error with a method ErrorObject.
func ObjectOf(err error) string {
	var object string
	switch e := err.(type) {
	case nil:
		return ""
	case *Error:
		object = e.Object
	case *fault.Error:
		object = e.Object
	case *os.SyscallError:
		object = e.Syscall
	case interface{ ErrorObject() string }:
		object = e.ErrorObject()
	}
	if object != "" {
		return object
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return ObjectOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if object := ObjectOf(err); object != "" {
				return object
			}
		}
	}
	return ""
}

// StatusOf finds the status in err: StatusOK for nil, StatusInternal for an
// error of another kind.
func StatusOf(err error) Status {
	var e *Error
	switch {
	case err == nil:
		return StatusOK
	case errors.As(err, &e):
		return e.Status
	}
	return StatusInternal
}

// UUID is a GPU's, or any other 128 bits.
type UUID [16]byte

// ParseGPU reads "GPU-8-4-4-4-12".
func ParseGPU(s string) (UUID, error) {
	var u UUID
	digits := strings.ReplaceAll(strings.TrimPrefix(s, "GPU-"), "-", "")
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(u) {
		return u, fmt.Errorf("%q is not a GPU's UUID (GPU-8-4-4-4-12 hexadecimal digits)", s)
	}
	copy(u[:], b)
	return u, nil
}

// GPU writes u as a GPU's UUID.
func (u UUID) GPU() string {
	h := hex.EncodeToString(u[:])
	return "GPU-" + strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

func (u UUID) String() string { return hex.EncodeToString(u[:]) }

// Handle is the address and the secret of a listener; a sender must have it. It fits NCCL's limit
// of 128 bytes.
type Handle [128]byte

// Layout interprets the handle's bytes; the caller checks Magic.
func (h *Handle) Layout() HandleLayout { return *(*HandleLayout)(unsafe.Pointer(h)) }

// Handle is the layout as opaque bytes.
func (l HandleLayout) Handle() Handle { return *(*Handle)(unsafe.Pointer(&l)) }

// RemoteKey is the key of a region, which every read and write of the region needs.
type RemoteKey [64]byte

// NewRemoteKey is the key of an offer of so many bytes, for an access of Remote*.
func NewRemoteKey(key UUID, length uint64, access uint32) RemoteKey {
	l := RemoteKeyLayout{Magic: RemoteKeyMagic, Key: key, Length: length, Access: access}
	return *(*RemoteKey)(unsafe.Pointer(&l))
}

// Layout interprets the key's bytes. ok is false for bytes without the layout.
func (k RemoteKey) Layout() (l RemoteKeyLayout, ok bool) {
	l = *(*RemoteKeyLayout)(unsafe.Pointer(&k))
	return l, l.Magic == RemoteKeyMagic
}

// Header begins every message. Replies carry the sequence of their request;
// sequence 0 is an event.
type Header struct {
	Type     uint32
	Sequence uint32
}

func (h *Header) header() *Header { return h }

// Message is one of the messages of protocol.def.
type Message interface {
	header() *Header
	bytes() []byte
	messageType() uint32
}

// MaxMessage is enough for any message, in bytes.
const MaxMessage = 1024

// MaxDescriptors is the most file descriptors that come with one message.
const MaxDescriptors = 4

// Encode gives the datagram of m.
func Encode(m Message, sequence uint32) []byte {
	*m.header() = Header{Type: m.messageType(), Sequence: sequence}
	return bytes.Clone(m.bytes())
}

// Decode reads one datagram. The length must be exactly the length of the type.
func Decode(datagram []byte) (Message, uint32, error) {
	if len(datagram) < 8 {
		return nil, 0, Errorf(StatusMalformed, "a message of %d bytes: a header alone has 8", len(datagram))
	}
	kind := binary.LittleEndian.Uint32(datagram)
	m := newMessage(kind)
	if m == nil {
		return nil, 0, Errorf(
			StatusMalformed,
			"a message of type %d, which this version (%d) does not know",
			kind,
			NewestVersion,
		)
	}
	if want := m.bytes(); len(want) != len(datagram) {
		return nil, 0, Errorf(StatusMalformed, "a %T of %d bytes: it must have %d", m, len(datagram), len(want))
	}
	copy(m.bytes(), datagram)
	return m, m.header().Sequence, nil
}

// Text reads a zero-padded field. Control characters of a stranger do not
// reach a terminal or a log.
func Text(field []byte) string {
	if end := bytes.IndexByte(field, 0); end >= 0 {
		field = field[:end]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(string(field), "?"))
}

// SetText fills a zero-padded field. It cuts a text that does not fit at the end of a character.
// Of an error with a code of package fault the code remains, behind "…": the other process
// selects the error by that.
func SetText(field []byte, s string) {
	clear(field)
	room := len(field) - 1
	if len(s) <= room {
		copy(field, s)
		return
	}
	var end string
	if code := fault.Suffix(s); code != "" && len("…"+code) <= room {
		end = "…" + code // the code of s does not fit, so prefix cuts it
	}
	n := copy(field, prefix(s, room-len(end)))
	copy(field[n:], end)
}

// prefix returns at most n bytes of s, without a part of a character at their end.
func prefix(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for cut := n; cut >= max(0, n-utf8.UTFMax+1); cut-- {
		if utf8.RuneStart(s[cut]) {
			return s[:cut]
		}
	}
	return s[:n] // it is not UTF-8
}

// maxObject bounds the object of an error in a message, in bytes.
const maxObject = 80

// SetReason fills the field of a message with the text of err, and behind the zero byte that ends the
// text with the object of err. Earlier releases read the text and ignore the rest.
func SetReason(field []byte, err error) {
	text, _, _ := strings.Cut(err.Error(), "\x00")
	object := prefix(ObjectOf(err), maxObject)
	clear(field)
	SetText(field[:len(field)-len(object)-1], text)
	if object != "" {
		copy(field[bytes.IndexByte(field, 0)+1:], object)
	}
}

// Reason returns the error of a message with a status and a field of SetReason.
func Reason(status Status, field []byte) *Error {
	e := &Error{Status: status, Reason: Text(field)}
	if end := bytes.IndexByte(field, 0); end >= 0 {
		e.Object = Text(field[end+1:])
	}
	return e
}

// NewFailure is the reply that carries err.
func NewFailure(err error) *Failure {
	m := &Failure{Status: uint32(StatusOf(err))}
	SetReason(m.Reason[:], err)
	return m
}

// Err is the error that the failure carries.
func (m *Failure) Err() error { return Reason(Status(m.Status), m.Reason[:]) }

// Negotiate picks the newest version that both sides speak.
func Negotiate(side string, oldest, newest uint32) (uint32, error) {
	version := min(newest, NewestVersion)
	if oldest > newest || version < max(oldest, OldestVersion) {
		return 0, Errorf(
			StatusVersion,
			"the %s speaks versions %d to %d of Peerlane's protocol, this relay %d to %d; install the same release of "+
				"Peerlane in the image and on the host",
			side,
			oldest,
			newest,
			OldestVersion,
			NewestVersion,
		)
	}
	return version, nil
}
