package nixl_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The layout is that of NIXL's headers, which are the same in each release of the file. The file has
// the layout of x86-64.
func TestPluginLayoutMatchesReleases(t *testing.T) {
	out, err := exec.Command(program(t, "layout", "-fno-access-control", "-Wno-invalid-offsetof")).Output()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("testdata/interface.txt")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, line := range strings.Split(string(text), "\n") {
		if !strings.HasPrefix(line, "#") {
			want = append(want, line)
		}
	}
	if got := string(out); got != strings.Join(want, "\n") {
		t.Errorf("the plugin has\n%s\nNIXL has\n%s", got, strings.Join(want, "\n"))
	}
}
