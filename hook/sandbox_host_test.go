package hook_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/hook/sandbox"
)

// Paths below a readable path can be links, for example in CUDA: to a directory beside, through
// /etc/alternatives, or to a directory that no argument names.
func TestSandboxFollowsLinksOfReadablePaths(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root for its own root directory")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"tree/targets/lib", "alternatives", "elsewhere", "writable"} {
		if err := errors.Join(os.MkdirAll(at(name), 0o755),
			os.WriteFile(at(name+"/file"), []byte("text"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{
		"tree/lib64": "targets/lib", "tree/alternative": at("alternatives/lib"), "alternatives/lib": at("tree/targets/lib"),
		"tree/elsewhere": at("elsewhere"), "tree/writable": at("writable"),
	} {
		if err := os.Symlink(to, at(name)); err != nil {
			t.Fatal(err)
		}
	}
	const none = "/proc/self/ns/uts" // open_tree fails for the path
	for _, paths := range [][]string{{"lib64"}, {"alternative"}, {"elsewhere"}, {"lib64", "alternative", "elsewhere"}} {
		arguments := []string{
			"confine",
			"--processes",
			"--show",
			"--read",
			at("tree"),
			"--read",
			at("alternatives"),
			"--read",
			none,
			"--write",
			at("tree/writable"),
		}
		script := "echo text >>" + at("tree/writable/file") + " || exit 3"
		for _, path := range paths {
			arguments = append(arguments, "--read", at("tree/"+path))
			script += "; cat " + at("tree/"+path+"/file") + " >/dev/null || exit 4"
		}
		cmd := exec.Command(filepath.Join(bin, "peerlane-hook"), append(arguments, "--", "/bin/sh", "-c", script)...)
		var output strings.Builder
		cmd.Stderr = &output
		failed := cmd.Run()
		var r sandbox.Report
		if err := json.NewDecoder(strings.NewReader(output.String())).Decode(&r); err != nil || failed != nil {
			t.Errorf("%q: %v, %v: %s", paths, failed, err, &output)
			continue
		}
		if !r.Root || (r.Landlock > 0) != landlocks() {
			t.Errorf("%q: %+v", paths, r)
		}
		if !slices.ContainsFunc(r.Missing, func(m string) bool { return strings.HasPrefix(m, none+": ") }) {
			t.Errorf("%q: the missing paths lack the path that cannot be mounted: %q", paths, r.Missing)
		}
		if slices.ContainsFunc(r.Missing, func(m string) bool { return strings.HasPrefix(m, dir) }) {
			t.Errorf("%q: missing %q", paths, r.Missing)
		}
	}
	if !slices.Contains(sandbox.Standard().Read, "/etc/alternatives") {
		t.Error("links of /usr through /etc/alternatives lead nowhere in a sandbox")
	}
}

// A sandboxed program without network sees no socket, interface or control group of the host. A
// program with network keeps the network namespace of the host.
func TestRelaySandboxWithoutNetworkHidesHost(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: without, there is no namespace of its own")
	}
	name := fmt.Sprintf("@peerlane-test-%d", os.Getpid())
	abstract, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	const script = `
readlink /proc/self/ns/net
cat /proc/net/unix
for path in /sys/fs/cgroup /sys/class/net /sys/class/block /sys/devices/virtual/net /sys/kernel/slab; do
	ls -d "$path/." 2>&1
done
ls /sys/bus/pci/devices >/dev/null`
	for _, c := range []struct {
		arguments []string
		own       bool
	}{
		{nil, true}, {[]string{"--host-network"}, false}, {[]string{"--tcp", "20000-20001"}, false},
	} {
		arguments := append(
			append([]string{"confine", "--processes", "--show"}, c.arguments...),
			"--",
			"/bin/sh",
			"-c",
			script,
		)
		cmd := exec.Command(filepath.Join(bin, "peerlane-hook"), arguments...)
		var output strings.Builder
		cmd.Stderr = &output
		out, err := cmd.Output()
		if err != nil {
			t.Errorf("%q: %v: %s", c.arguments, err, &output)
		}
		text := string(out)
		var r sandbox.Report
		if err := json.NewDecoder(strings.NewReader(output.String())).Decode(&r); err != nil || r.Network != c.own {
			t.Errorf("%q: %v, the report is %+v", c.arguments, err, r)
		}
		if own := !strings.HasPrefix(text, host+"\n"); own != c.own {
			t.Errorf("%q: the network namespace is %.60q, the host's %q", c.arguments, text, host)
		}
		if sees := strings.Contains(text, name); sees == c.own {
			t.Errorf("%q: /proc/net/unix has the host's socket: %t", c.arguments, sees)
		}
		for _, path := range []string{"/sys/fs/cgroup", "/sys/class/net", "/sys/class/block", "/sys/devices/virtual/net",
			"/sys/kernel/slab"} {
			if strings.Contains(text, "\n"+path+"/.\n") {
				t.Errorf("%q: the program sees %s", c.arguments, path)
			}
		}
	}
}
