package main

import (
	"bytes"
	"encoding/base64"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/network"
)

// secretsOf returns the secrets in a key file.
func secretsOf(t *testing.T, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`[A-Za-z0-9+/]{43}=`).FindAllString(string(text), -1)
	if len(found) == 0 {
		t.Fatalf("no secret in %s", path)
	}
	return found
}

func refused(t *testing.T, code int, want string, args ...string) {
	t.Helper()
	var out, errOut bytes.Buffer
	if got := run(args, &out, &errOut); got != code || !strings.Contains(errOut.String(), want) || out.Len() > 0 {
		t.Errorf("peerlane %s: exit status %d, %q, %q; want %d, %q", strings.Join(args, " "), got, out.String(),
			errOut.String(), code, want)
	}
}

func TestClusterKeyCanBeRotated(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "etc/peerlane/cluster.key")
	at := []string{"--root", root}
	key := func(words ...string) []string { return append(append([]string{"key"}, words...), at...) }

	refused(t, exitFailure, string(fault.NoClusterKey), key("show")...)
	refused(t, exitFailure, "[PL1605]", key("rotate")...)
	refused(t, exitFailure, "[PL1605]", key("rotate", "--finish")...)

	printed := peerlane(t, key("generate")...)
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Fatalf("%v, %v", info.Mode(), err)
	}
	first := decode[keyReport](t, key("show", "-o", "json")...)
	if len(first.Keys) != 1 || first.Keys[0].Use != "current" || first.File != path ||
		!strings.Contains(printed, first.Keys[0].ID) {
		t.Errorf("%+v is shown, and %s was printed", first, printed)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, exitFailure, "exists, with key "+first.Keys[0].ID, key("generate")...)
	refused(t, exitFailure, "no rotation is under way", key("rotate", "--finish")...)
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("a refused change modified the file: %v", err)
	}

	second := decode[keyReport](t, key("rotate", "-o", "json")...)
	if len(second.Keys) != 2 || second.Keys[1].Use != "previous" || second.Keys[1].ID != first.Keys[0].ID ||
		second.Keys[0].ID == first.Keys[0].ID {
		t.Errorf("%+v was rotated to %+v", first, second)
	}
	refused(t, exitFailure, "a rotation is under way", key("rotate")...)
	printed = peerlane(t, key("show")...)
	for _, want := range []string{`(?m)^KEY +USE +CREATED$`, `(?m)^` + second.Keys[0].ID + ` +current +20`,
		`(?m)^` + first.Keys[0].ID + ` +previous +20`} {
		if !regexp.MustCompile(want).MatchString(printed) {
			t.Errorf("no %s in\n%s", want, printed)
		}
	}
	printed += peerlane(t, key("show", "-o", "json")...)
	for _, secret := range secretsOf(t, path) {
		if raw, err := base64.StdEncoding.DecodeString(secret); err != nil || strings.Contains(printed, secret[:16]) ||
			strings.Contains(printed, string(raw[:8])) {
			t.Errorf("%v, or a secret in\n%s", err, printed)
		}
	}
	if last := decode[keyReport](t, key("rotate", "--finish", "-o", "json")...); len(last.Keys) != 1 ||
		last.Keys[0] != second.Keys[0] {
		t.Errorf("%+v is finished as %+v", second, last)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 2 {
		t.Errorf("files beside the key, and locked files: %v, %v", left, err)
	}
}

// Locks that other users can take do not block a change of the key.
func TestClusterKeyLockByOthersIsIgnored(t *testing.T) {
	root := t.TempDir()
	peerlane(t, "key", "generate", "--root", root)
	dir := filepath.Join(root, "etc/peerlane")
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	paths := []string{dir}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			paths = append(paths, filepath.Join(dir, f.Name()))
		}
	}
	for _, path := range paths {
		opened, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer opened.Close()
		if err := unix.Flock(int(opened.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
	}
	rotated := make(chan int, 1)
	go func() {
		var out, errOut bytes.Buffer
		rotated <- run([]string{"key", "rotate", "--root", root}, &out, &errOut)
	}()
	select {
	case code := <-rotated:
		if code != 0 {
			t.Errorf("exit status %d", code)
		}
	case <-testutil.After(time.Minute):
		t.Error("the command waits for the lock of another user")
	}
}

// A key file that other users can read, or that is damaged, is neither used nor replaced.
func TestClusterKeyUntrustedFileIsRefused(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "etc/peerlane/cluster.key")
	peerlane(t, "key", "generate", "--root", root)
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"show"}, {"rotate"}, {"generate"}} {
		refused(t, exitFailure, "users other than its owner can read or write "+path+" (mode 0644)",
			append(append([]string{"key"}, command...), "--root", root)...)
	}
	text, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, text[:len(text)-8], 0o600)
	}
	if err == nil {
		err = os.Chmod(path, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"show", "rotate", "generate"} {
		refused(t, exitFailure, "copied in part", "key", command, "--root", root)
	}
}

func TestClusterKeyPathFollowsConfiguration(t *testing.T) {
	root, elsewhere := t.TempDir(), filepath.Join(t.TempDir(), "mine.key")
	if err := os.Chmod(filepath.Dir(elsewhere), 0o755); err != nil { // with any umask
		t.Fatal(err)
	}
	config := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("[network]\nkey = \""+elsewhere+"\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := decode[keyReport](t, "key", "generate", "--root", root, "-o", "json"); r.File != elsewhere {
		t.Errorf("key is in %s", r.File)
	}
	secretsOf(t, elsewhere)
	refused(t, exitUsage, "takes no arguments", "key", "show", "x")
	refused(t, exitUsage, "did you mean rotate?", "key", "rotat")
}

// One of several concurrent commands creates the key, and readers always find a complete file.
func TestConcurrentKeyCommandsCreateOneKey(t *testing.T) {
	root := t.TempDir()
	var all sync.WaitGroup
	codes := make(chan int, 8)
	for range cap(codes) {
		all.Go(func() {
			var out, errOut bytes.Buffer
			codes <- run([]string{"key", "generate", "--root", root}, &out, &errOut)
		})
	}
	all.Wait()
	made := 0
	for range cap(codes) {
		if <-codes == 0 {
			made++
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "etc/peerlane/cluster.key"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := network.ParseKeys(text); err != nil || made != 1 {
		t.Errorf("%d made a key, %v", made, err)
	}
}
