package wire

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestUUIDRoundTripsAsGPU(t *testing.T) {
	const text = "GPU-00112233-4455-6677-8899-aabbccddeeff"
	u, err := ParseGPU(text)
	if err != nil || u.GPU() != text || u.String() != "00112233445566778899aabbccddeeff" {
		t.Errorf("%s, %s, %v", u.GPU(), u, err)
	}
	for name, text := range map[string]string{
		"empty":            "",
		"a digit missing":  "GPU-00112233-4455-6677-8899-aabbccddeef",
		"a byte missing":   "GPU-00112233-4455-6677-8899-aabbccddee",
		"a byte more":      "GPU-00112233-4455-6677-8899-aabbccddeeff00",
		"no digit":         "GPU-g0112233-4455-6677-8899-aabbccddeeff",
		"no digit at last": "GPU-00112233-4455-6677-8899-aabbccddeeffg0",
	} {
		if u, err := ParseGPU(text); err == nil {
			t.Errorf("%s: %s", name, u)
		}
	}
}

func TestRemoteKeyOtherMagicHasNoLayout(t *testing.T) {
	key := NewRemoteKey(UUID{1, 2}, 4096, RemoteRead)
	l, ok := key.Layout()
	want := RemoteKeyLayout{Magic: RemoteKeyMagic, Key: UUID{1, 2}, Length: 4096, Access: RemoteRead}
	if !ok || l != want {
		t.Errorf("%+v, %t; want %+v", l, ok, want)
	}
	key[0]++
	if l, ok := key.Layout(); ok {
		t.Errorf("%+v", l)
	}
}

func TestDecodeMalformedDatagramFails(t *testing.T) {
	message := Encode(&Failure{Status: uint32(StatusBusy)}, 7)
	m, sequence, err := Decode(message)
	if f, ok := m.(*Failure); err != nil || !ok || sequence != 7 || f.Status != uint32(StatusBusy) {
		t.Fatalf("%+v, %d, %v", m, sequence, err)
	}
	for name, datagram := range map[string][]byte{
		"empty":                   nil,
		"less than a header":      message[:7],
		"a header of a message":   message[:8],
		"a byte missing":          message[:len(message)-1],
		"a byte more":             append(message[:len(message):len(message)], 0),
		"a header of no type":     {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0},
		"a long one of no type":   append([]byte{0xff, 0xff, 0xff, 0xff}, message[4:]...),
		"seven bytes of a header": make([]byte, 7),
	} {
		m, sequence, err := Decode(datagram)
		if m != nil || sequence != 0 || StatusOf(err) != StatusMalformed {
			t.Errorf("%s: %+v, %d, %v", name, m, sequence, err)
		}
	}
}

// named is an error with an object.
type named string

func (n named) Error() string       { return "failed" }
func (n named) ErrorObject() string { return string(n) }

func TestErrorStatusAndObjectAreFound(t *testing.T) {
	object := Errorf(StatusBusy, "busy").On("relay 1")
	for _, c := range []struct {
		name   string
		err    error
		status Status
		object string
	}{
		{"no error", nil, StatusOK, ""},
		{"an error of another kind", errors.New("other"), StatusInternal, ""},
		{"an error with an object", object, StatusBusy, "relay 1"},
		{"a wrapped error", fmt.Errorf("open: %w", object), StatusBusy, "relay 1"},
		{"joined errors", errors.Join(errors.New("other"), object), StatusBusy, "relay 1"},
		{"a system call", os.NewSyscallError("mmap", unix.ENOMEM), StatusInternal, "mmap"},
		{"an error with a method", fmt.Errorf("open: %w", named("GPU 3")), StatusInternal, "GPU 3"},
		{"an error whose cause has an object", Errorf(StatusLimit, "open: %w", named("GPU 3")), StatusLimit, "GPU 3"},
	} {
		if got := StatusOf(c.err); got != c.status {
			t.Errorf("%s: %v, want %v", c.name, got, c.status)
		}
		if got := ObjectOf(c.err); got != c.object {
			t.Errorf("%s: object %q, want %q", c.name, got, c.object)
		}
	}
	for _, c := range []struct {
		name   string
		target error
		want   bool
	}{
		{"the status", &Error{Status: StatusBusy}, true},
		{"status and object", &Error{Status: StatusBusy, Object: "relay 1"}, true},
		{"another object", &Error{Status: StatusBusy, Object: "relay 2"}, false},
		{"another status", &Error{Status: StatusLimit, Object: "relay 1"}, false},
		{"another kind", unix.EBUSY, false},
	} {
		if got := errors.Is(object, c.target); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
	known, unknown := StatusBusy.String(), Status(9999).String()
	if known == "" || strings.Contains(known, "does not know") || !strings.Contains(unknown, "9999") {
		t.Errorf("%q, %q", known, unknown)
	}
}

func TestReasonFieldHoldsTextAndObject(t *testing.T) {
	for _, c := range []struct {
		name         string
		size         int
		text, object string
		want         Error
	}{
		{"both fit", 32, "failed", "GPU 3", Error{Reason: "failed", Object: "GPU 3"}},
		{"no object", 32, "failed", "", Error{Reason: "failed"}},
		{"text is cut", 16, "0123456789abcdef", "GPU 3", Error{Reason: "012345678", Object: "GPU 3"}},
		{"text fits exactly", 16, "012345678", "GPU 3", Error{Reason: "012345678", Object: "GPU 3"}},
		{"object is cut", 256, "failed", strings.Repeat("o", 81),
			Error{Reason: "failed", Object: strings.Repeat("o", 80)}},
		{"text with a zero byte", 32, "fail\x00ed", "", Error{Reason: "fail"}},
		{"characters of control", 32, "a\x1f\x7f\x80b", "", Error{Reason: "a???b"}},
	} {
		field := make([]byte, c.size)
		for i := range field {
			field[i] = 'x'
		}
		SetReason(field, &Error{Status: StatusBusy, Reason: c.text, Object: c.object})
		got := Reason(StatusBusy, field)
		if got.Reason != c.want.Reason || got.Object != c.want.Object || got.Status != StatusBusy {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	if got := Reason(StatusBusy, []byte("full")); got.Reason != "full" || got.Object != "" {
		t.Errorf("a field without an end: %+v", got)
	}
}

func TestPrefixEndsAtCharacter(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"abc", 4, "abc"}, {"abc", 3, "abc"}, {"abc", 2, "ab"}, {"abc", 0, ""},
		{"aé", 2, "a"}, {"aé", 3, "aé"}, {"é", 1, ""}, {"a€b", 3, "a"}, {"a€b", 4, "a€"},
		{"𝄞b", 3, ""}, {"a𝄞b", 4, "a"},
		{"\x80\x80\x80\x80\x80\x80", 5, "\x80\x80\x80\x80\x80"},
	} {
		if got := prefix(c.text, c.n); got != c.want {
			t.Errorf("%q to %d: %q, want %q", c.text, c.n, got, c.want)
		}
	}
}

func TestNegotiateChoosesNewestCommonVersion(t *testing.T) {
	for _, c := range []struct {
		name           string
		oldest, newest uint32
		want           uint32 // 0 for an error
	}{
		{"the same", OldestVersion, NewestVersion, NewestVersion},
		{"a newer peer", OldestVersion, NewestVersion + 1, NewestVersion},
		{"only the newest", NewestVersion, NewestVersion, NewestVersion},
		{"only the oldest", OldestVersion, OldestVersion, OldestVersion},
		{"too new", NewestVersion + 1, NewestVersion + 2, 0},
		{"too old", OldestVersion - 1, OldestVersion - 1, 0},
		{"no version", NewestVersion, NewestVersion - 1, 0},
	} {
		got, err := Negotiate("client", c.oldest, c.newest)
		if got != c.want || (err != nil) != (c.want == 0) || err != nil && StatusOf(err) != StatusVersion {
			t.Errorf("%s: %d, %v; want %d", c.name, got, err, c.want)
		}
	}
}
