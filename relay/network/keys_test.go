package network

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

var someDay = time.Date(2026, 11, 22, 13, 50, 0, 0, time.UTC)

// rotated is keys in the middle of a rotation.
func rotated(t testing.TB, k Keys) Keys {
	t.Helper()
	next, err := k.Rotate(someDay.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func finished(t testing.TB, k Keys) Keys {
	t.Helper()
	next, err := k.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func TestKeyFileIsRead(t *testing.T) {
	one := Keys{Current: NewKey(someDay)}
	two := rotated(t, one)
	line := `[0-9a-f]{16} 2026-11-22T1[34]:50:00Z [A-Za-z0-9+/]{43}=\n`
	for _, c := range []struct {
		keys Keys
		form string
	}{{one, `^peerlane cluster key 1\ncurrent ` + line + `$`}, {two, `^peerlane cluster key 1\ncurrent ` + line + `previous ` + line + `$`}} {
		text := c.keys.Text()
		if !regexp.MustCompile(c.form).Match(text) || len(text) > MaxKeyFile {
			t.Errorf("%d bytes, not as documented:\n%s", len(text), text)
		}
		again, err := ParseKeys(text)
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if !bytes.Equal(again.Text(), text) || again.Current.ID != c.keys.Current.ID {
			t.Errorf("%v was written, and %v is read", c.keys, again)
		}
	}
	if two.Previous.ID != one.Current.ID || two.Current.ID == one.Current.ID {
		t.Errorf("%v after a rotation is %v", one, two)
	}
	if _, err := two.Rotate(someDay); !errors.Is(err, errRotating) {
		t.Errorf("another rotation: %v", err)
	}
	if last := finished(t, two); last.Previous != nil || last.Current.ID != two.Current.ID {
		t.Errorf("%v is finished as %v", two, last)
	}
	if _, err := one.Finish(); err == nil {
		t.Error("a rotation that was not begun is finished")
	}
	if NewKey(someDay).ID == one.Current.ID {
		t.Error("two keys are one")
	}
}

func TestInvalidKeyFilesAreRefused(t *testing.T) {
	good := string(rotated(t, Keys{Current: NewKey(someDay)}).Text())
	lines := strings.SplitAfter(good, "\n")
	head, current, previous := lines[0], lines[1], lines[2]
	other := Keys{Current: NewKey(someDay)}
	others := other.Current.secret()
	secret := base64.StdEncoding.EncodeToString(others[:])
	word := func(line string, n int, with string) string {
		words := strings.Split(strings.TrimSuffix(line, "\n"), " ")
		words[n] = with
		return strings.Join(words, " ") + "\n"
	}
	id := other.Current.ID.String()
	at := func(line int, err error) error { return &keyLineError{line, err} }
	for _, c := range []struct {
		name, text string
		want       error
	}{
		{"empty", "", errNoKeyFile},
		{"another file", "-----BEGIN CERTIFICATE-----\n", errNoKeyFile},
		{"of a later version", "peerlane cluster key 2\n" + current, &keyFormError{"2"}},
		{"the head alone", head, errKeyFilePart},
		{"no end", head + strings.TrimSuffix(current, "\n"), errKeyFilePart},
		{"half a key", head + current[:40] + "\n", at(2, &keyWordsError{"current"})},
		{"previous alone", head + previous, at(2, &keyWordsError{"current"})},
		{"in another order", head + previous + current, at(2, &keyWordsError{"current"})},
		{"two in use", head + current + current, at(3, &keyWordsError{"previous"})},
		{"the same twice", head + current + strings.Replace(current, "current", "previous", 1), errSameKey},
		{"three", good + previous, &keyLinesError{3}},
		{"an empty line", head + "\n" + current, at(2, &keyWordsError{"current"})},
		{"CRLF", strings.ReplaceAll(good, "\n", "\r\n"), &keyFormError{"1\r"}},
		{"two blanks", head + strings.Replace(current, " ", "  ", 1), at(2, &keyWordsError{"current"})},
		{"no date", head + word(current, 2, "yesterday"), at(2, &keyDateError{"yesterday"})},
		{"a local date", head + word(current, 2, "2026-11-22T13:50:00+01:00"),
			at(2, &keyDateError{"2026-11-22T13:50:00+01:00"})},
		{"half seconds", head + word(current, 2, "2026-11-22T13:50:00.5Z"), errKeyChanged},
		{"short", head + word(current, 3, base64.StdEncoding.EncodeToString(make([]byte, 31))), at(2, errSecretForm)},
		{"another secret", head + word(current, 3, secret), at(2, &keySecretError{strings.Fields(current)[1]})},
		{"capitals", head + word(current, 1, strings.ToUpper(id)), at(2, &keySecretError{strings.ToUpper(id)})},
		{"endless", good + strings.Repeat("\n", MaxKeyFile), &keySizeError{len(good) + MaxKeyFile}},
	} {
		_, err := ParseKeys([]byte(c.text))
		if !testutil.HasError(err, c.want) {
			t.Errorf("%s: %v; want %v", c.name, err, c.want)
			continue
		}
		// The text itself: users and logs have it.
		for _, line := range []string{current, previous} {
			if s := strings.Fields(line)[3]; strings.Contains(err.Error(), s[:12]) {
				t.Errorf("%s: the error has the secret: %v", c.name, err)
			}
		}
	}
}

func TestSecretsAreNotPrinted(t *testing.T) {
	keys := rotated(t, Keys{Current: NewKey(someDay)})
	type nested struct {
		Open   Keys
		hidden Keys
		list   []Key
	}
	all := keys.Current.secret()
	session, secret := &Session{secret: func() [32]byte { return all }, Peer: "x"}, all[:]
	type streams struct{ of Session } // whom fmt does not ask
	forms := []string{                // of four bytes in the middle of it
		hex.EncodeToString(secret[8:12]), strings.ToUpper(hex.EncodeToString(secret[8:12])), string(secret[8:12]),
		strings.Trim(fmt.Sprint(secret[8:12]), "[]"), base64.StdEncoding.EncodeToString(secret)[12:18],
		strings.Trim(fmt.Sprintf("%#v", secret[8:12]), "[]byte{}"), strings.Trim(fmt.Sprintf("%x", secret[8:12]), "[]"),
	}
	for _, value := range []any{keys, &keys, keys.Current, keys.Previous, nested{keys, keys, keys.all()},
		&nested{hidden: keys}, map[string]any{"k": keys}, *session, session, streams{*session}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%o"} {
			text := fmt.Sprintf(verb, value)
			for _, form := range forms {
				if strings.Contains(text, form) {
					t.Errorf("%s of %T prints its secret: %q", verb, value, text)
				}
			}
		}
		if text, err := json.Marshal(value); err == nil {
			for _, form := range forms {
				if bytes.Contains(text, []byte(form)) {
					t.Errorf("%T as JSON has its secret: %s", value, text)
				}
			}
		}
	}
}

// ParseKeys refuses a file, or the file is the text of the keys.
func FuzzKeys(f *testing.F) {
	one := Keys{Current: keyOf([keyBytes]byte{1}, someDay)}
	text := one.Text()
	f.Add(text)
	f.Add(Keys{Current: keyOf([keyBytes]byte{2}, someDay), Previous: &one.Current}.Text())
	f.Add(text[:len(text)-1])
	f.Add(bytes.ReplaceAll(text, []byte(" "), []byte("\t")))
	f.Fuzz(func(t *testing.T, text []byte) {
		keys, err := ParseKeys(text)
		if err == nil && !bytes.Equal(keys.Text(), text) {
			t.Errorf("read of %q, written as %q", text, keys.Text())
		}
	})
}
