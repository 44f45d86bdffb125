package network

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/peerlane/peerlane/relay/network/clusterkey"
)

// keyBytes is the length of a cluster key's secret.
const keyBytes = clusterkey.Bytes

// KeyID names a key without revealing it: 8 bytes that HKDF makes of the secret, so that the same
// key has the same id on every host, and a file whose secret was changed is noticed.
type KeyID [clusterkey.IDBytes]byte

func (id KeyID) String() string { return hex.EncodeToString(id[:]) }

// Key is a secret that relays share. Nothing prints its secret: neither %v, nor %+v of an enclosing
// value, nor JSON.
type Key struct {
	ID KeyID
	// Created is to the second, UTC.
	Created time.Time
	// A function, because fmt does not call Format of an unexported field, and follows pointers.
	secret func() [keyBytes]byte
}

// NewKey makes a key of the system's random numbers.
func NewKey(now time.Time) Key {
	var secret [keyBytes]byte
	_, _ = rand.Read(secret[:]) // never fails, as its documentation says
	return keyOf(secret, now)
}

func keyOf(secret [keyBytes]byte, created time.Time) Key {
	k := Key{Created: created.UTC().Truncate(time.Second), secret: func() [keyBytes]byte { return secret }}
	copy(k.ID[:], clusterkey.ID(secret[:]))
	return k
}

// derive makes n bytes from the key, for a single purpose.
func (k Key) derive(salt []byte, label string, n int) []byte {
	secret := k.secret()
	return clusterkey.Derive(secret[:], salt, label, n)
}

// String is the key's id and date.
func (k Key) String() string {
	return fmt.Sprintf("key %s of %s", k.ID, k.Created.Format(time.DateOnly))
}

// Format prints String, whatever the verb.
func (k Key) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.String()) }

// Keys are the cluster's: the current key, and during a rotation the previous key, which is still
// valid.
type Keys struct {
	Current  Key
	Previous *Key
}

func (k Keys) String() string {
	if k.Previous == nil {
		return k.Current.String()
	}
	return fmt.Sprintf("%v, after %v", k.Current, *k.Previous)
}

// Format prints String, whatever the verb.
func (k Keys) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.String()) }

// all lists the valid keys, the current key first.
func (k Keys) all() []Key {
	if k.Previous == nil {
		return []Key{k.Current}
	}
	return []Key{k.Current, *k.Previous}
}

// Rotate activates a new key, and keeps the previous key. Rotate fails before the end of the last
// rotation: a host without the new key would lose contact.
func (k Keys) Rotate(now time.Time) (Keys, error) {
	if k.Previous != nil {
		return Keys{}, fmt.Errorf("%v: %w", k, errRotating)
	}
	return Keys{Current: NewKey(now), Previous: &k.Current}, nil
}

// Finish ends a rotation: the previous key is believed no more.
func (k Keys) Finish() (Keys, error) {
	if k.Previous == nil {
		return Keys{}, fmt.Errorf("no rotation is under way: there is %v and none before it", k)
	}
	return Keys{Current: k.Current}, nil
}

// The text of a key file.
const (
	keyFileHead    = "peerlane cluster key "
	keyFileVersion = "1"
	keyCurrent     = "current"
	keyPrevious    = "previous"
	// MaxKeyFile bounds a key file, bytes.
	MaxKeyFile = 1024
)

// Text is the key file: the only form that has the secrets.
//
//	peerlane cluster key 1
//	current 3f9a12bc44d0e871 2026-11-22T13:50:00Z BASE64OF32BYTES=
//	previous 0c77b1e05d2f9a46 2026-05-02T08:00:00Z BASE64OF32BYTES=
func (k Keys) Text() []byte {
	var b bytes.Buffer
	b.WriteString(keyFileHead + keyFileVersion + "\n")
	for i, key := range k.all() {
		secret := key.secret()
		fmt.Fprintf(
			&b,
			"%s %s %s %s\n",
			[]string{keyCurrent, keyPrevious}[i],
			key.ID,
			key.Created.Format(time.RFC3339),
			base64.StdEncoding.EncodeToString(secret[:]),
		)
	}
	return b.Bytes()
}

// Errors of a key file. None has a secret.
var (
	errRotating    = errors.New("a rotation is under way; finish it first, when every host has that file")
	errNoKeyFile   = fmt.Errorf("it does not begin with %q: it is no cluster key", keyFileHead+keyFileVersion)
	errKeyFilePart = errors.New("its last line has no end: it was copied in part; copy it again")
	errSameKey     = errors.New("its current and its previous key are the same one")
	errKeyChanged  = errors.New("it is not written as peerlane key writes it: blanks or digits were changed")
	errSecretForm  = fmt.Errorf("the secret is not the base64 of %d bytes", keyBytes)
)

// keySizeError is the error of a file above the limit.
type keySizeError struct{ bytes int }

func (e *keySizeError) Error() string {
	return fmt.Sprintf("it has %d bytes, and a cluster key's file at most %d", e.bytes, MaxKeyFile)
}

// keyFormError is the error of a file of another version.
type keyFormError struct{ version string }

func (e *keyFormError) Error() string {
	return fmt.Sprintf("its form is %.20q, and this version of Peerlane reads %q", e.version, keyFileVersion)
}

// keyLinesError is the error of a file with another number of keys.
type keyLinesError struct{ lines int }

func (e *keyLinesError) Error() string {
	return fmt.Sprintf("it has %d lines of keys; one, or two during a rotation, are possible", e.lines)
}

// keyLineError is the error of a line of a file, from 1.
type keyLineError struct {
	line int
	err  error
}

func (e *keyLineError) Error() string { return fmt.Sprintf("line %d: %v", e.line, e.err) }

func (e *keyLineError) Unwrap() error { return e.err }

// keyWordsError is the cause of a line without the words of a key.
type keyWordsError struct{ name string } // keyCurrent or keyPrevious

func (e *keyWordsError) Error() string {
	return fmt.Sprintf("%q, an id, a date and a secret are expected, with a blank between each two", e.name)
}

// keyDateError is the cause of a line with another form of a date.
type keyDateError struct{ date string }

func (e *keyDateError) Error() string {
	return fmt.Sprintf("%.30q is no date such as 2026-11-22T13:50:00Z", e.date)
}

// keySecretError is the cause of a line with the secret of another key.
type keySecretError struct{ id string }

func (e *keySecretError) Error() string {
	return fmt.Sprintf("the secret is not that of key %.16q: one of them was changed", e.id)
}

// ParseKeys reads exactly the output of Text. Errors quote no secret.
func ParseKeys(text []byte) (Keys, error) {
	var k Keys
	if len(text) > MaxKeyFile {
		return k, &keySizeError{len(text)}
	}
	first, rest, ended := strings.Cut(string(text), "\n")
	version, ok := strings.CutPrefix(first, keyFileHead)
	switch {
	case !ok:
		return k, errNoKeyFile
	case version != keyFileVersion:
		return k, &keyFormError{version}
	case !ended || !strings.HasSuffix(rest, "\n"):
		return k, errKeyFilePart
	}
	lines := strings.Split(strings.TrimSuffix(rest, "\n"), "\n")
	if len(lines) > 2 {
		return k, &keyLinesError{len(lines)}
	}
	for i, line := range lines {
		key, err := parseKey(line, []string{keyCurrent, keyPrevious}[i])
		if err != nil {
			return Keys{}, &keyLineError{i + 2, err}
		}
		if i == 0 {
			k.Current = key
		} else {
			k.Previous = &key
		}
	}
	if k.Previous != nil && k.Previous.ID == k.Current.ID {
		return Keys{}, errSameKey
	}
	if !bytes.Equal(k.Text(), text) {
		return Keys{}, errKeyChanged
	}
	return k, nil
}

func parseKey(line, name string) (Key, error) {
	fields := strings.Split(line, " ")
	if len(fields) != 4 || fields[0] != name {
		return Key{}, &keyWordsError{name}
	}
	created, err := time.Parse(time.RFC3339, fields[2])
	if err != nil || created.Location() != time.UTC {
		return Key{}, &keyDateError{fields[2]}
	}
	decoded, err := base64.StdEncoding.Strict().DecodeString(fields[3])
	if err != nil || len(decoded) != keyBytes {
		return Key{}, errSecretForm
	}
	key := keyOf([keyBytes]byte(decoded), created)
	if key.ID.String() != fields[1] {
		return Key{}, &keySecretError{fields[1]}
	}
	return key, nil
}
