package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
)

// The reading side trusts no text: a compromised relay can write to the pipe before it executes.
func TestReadReportOfEachText(t *testing.T) {
	const report = `{"landlock": 4}`
	const most = 64 << 10
	for _, c := range []struct {
		name, text string
		landlock   int
		cause      string // of the failure
		err        error
	}{
		{"a report", report + "\n", 4, "", nil},
		{"a report without an end of line", report, 4, "", nil},
		{"an empty report", "{}\n", 0, "", nil},
		{"nothing", "", 0, "", ErrSilent},
		{"an error", "failed\nfor a reason", 0, "failed\nfor a reason", nil},
		{"an error after the report", report + "\nfailed", 0, "failed", nil},
		{"an empty line and an error", "\nfailed", 0, "\nfailed", nil},
		{"an empty line", "\n", 0, "\n", nil},
		{"a list", "[]\n", 0, "[]\n", nil},
		{"as long as possible", report + strings.Repeat(" ", most-len(report)), 4, "", nil},
		{"too long", report + strings.Repeat(" ", most-len(report)) + "}", 4, "", nil}, // the rest is not read
	} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = w.WriteString(c.text) // the reader may close first
			w.Close()
		}()
		got, err := ReadReport(r)
		r.Close()
		switch {
		case c.err != nil:
			if got != nil || !errors.Is(err, c.err) {
				t.Errorf("%s: %+v, %v", c.name, got, err)
			}
		case c.cause != "":
			f, ok := errors.AsType[*fault.Error](err)
			if got != nil || !ok || f.Code != fault.NoSandbox || f.Cause != setupError(c.cause) {
				t.Errorf("%s: %+v, %v", c.name, got, err)
			}
		case err != nil || got.Landlock != c.landlock:
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := ReadReport(f); !errors.Is(err, os.ErrNoDeadline) {
		t.Errorf("a file: %+v, %v", r, err)
	}
	f.Close()
}

func TestVerbsNodesHaveNameOfDevice(t *testing.T) {
	before := Uverbs
	defer func() { Uverbs = before }()
	Uverbs = t.TempDir()
	for path, text := range map[string]string{
		"abi_version": "6\n", "uverbs0/ibdev": "mlx5_0\n", "uverbs1/ibdev": "mlx5_1\n", "uverbs2/ibdev": "mlx5_0\n",
		"uverbs3/other": "mlx5_0\n", "uverbs4/ibdev": "\n",
	} {
		full := filepath.Join(Uverbs, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	const dir = "/dev/infiniband/"
	for nic, want := range map[string][]string{
		"mlx5_0": {dir + "uverbs0", dir + "uverbs2", dir + "rdma_cm"}, "mlx5_1": {dir + "uverbs1", dir + "rdma_cm"},
		"mlx5": nil, "": {dir + "uverbs4", dir + "rdma_cm"},
	} {
		if got := VerbsNodes(nic); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", nic, got, want)
		}
	}
	Uverbs = filepath.Join(Uverbs, "none")
	if got := VerbsNodes("mlx5_0"); got != nil {
		t.Errorf("without RDMA: %v", got)
	}
}
