package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// captured writes a capture of the recorded host. It returns the file, and the flags that read the
// host directly.
func captured(t *testing.T) (file string, flags []string) {
	t.Helper()
	_, flags = recordedHost(t)
	file = filepath.Join(t.TempDir(), "host.tar.gz")
	text := peerlane(t, append([]string{"topo", "capture"}, flags...)...)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file, flags
}

func TestCaptureReplacesHost(t *testing.T) {
	file, flags := captured(t)
	for _, command := range []string{"topo", "plan"} {
		on := peerlane(t, append([]string{command, "--root", t.TempDir()}, flags...)...)
		off := peerlane(t, command, "--root", t.TempDir(), "--input", file)
		head, want, _ := strings.Cut(on, "\n")
		headOff, got, _ := strings.Cut(off, "\n")
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("peerlane %s: host (-) and capture (+):\n%s", command, diff)
		}
		if strings.TrimSuffix(head, flags[1]) != strings.TrimSuffix(headOff, file+" (capture)") ||
			!strings.Contains(headOff, file) {
			t.Errorf("the capture begins %q, the host %q", headOff, head)
		}
		hostJSON := decode[map[string]any](t, append([]string{command, "--root", t.TempDir(), "-o", "json"}, flags...)...)
		fileJSON := decode[map[string]any](t, command, "--root", t.TempDir(), "-o", "json", "--input", file)
		if diff := cmp.Diff(map[string]any{"kind": "capture", "file": file}, fileJSON["source"]); diff != "" {
			t.Errorf("source (-want +got):\n%s", diff)
		}
		delete(hostJSON, "source")
		delete(fileJSON, "source")
		if diff := cmp.Diff(hostJSON, fileJSON); diff != "" {
			t.Errorf("peerlane %s -o json: host (-) and capture (+):\n%s", command, diff)
		}
	}
}

func TestCaptureUnwritableFileIsError(t *testing.T) {
	_, flags := recordedHost(t)
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err) // every Linux has /dev/full: full(4)
	}
	defer func() { _ = full.Close() }()
	var errOut bytes.Buffer
	if code := run(append([]string{"topo", "capture"}, flags...), full, &errOut); code != exitFailure ||
		!strings.Contains(errOut.String(), "no space left") {
		t.Errorf("exit status %d, %s", code, errOut.String())
	}
}

func TestCaptureTornFileIsNamed(t *testing.T) {
	file, _ := captured(t)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text[:len(text)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"topo", "--input", file}, &out, &errOut); code != exitFailure || out.Len() > 0 ||
		!strings.Contains(errOut.String(), file) || !strings.Contains(errOut.String(), "unexpected EOF") {
		t.Errorf("exit status %d, %s%s", code, out.String(), errOut.String())
	}
}
