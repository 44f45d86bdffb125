//go:build packages

package packages

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// systemd installs a systemctl in the tree that records the arguments, and whether a specification
// and a library exist at the call. Units are enabled unless /disabled exists.
func (r *tree) systemd() {
	r.Helper()
	check(r, os.MkdirAll(filepath.Join(r.root, "run/systemd/system"), 0o755))
	check(r, os.WriteFile(filepath.Join(r.root, "usr/bin/systemctl"), []byte(`#!/bin/sh
here=
[ ! -e /etc/cdi/peerlane.dev-lane.json ] || here="$here specification"
[ ! -e /usr/lib/peerlane/libpeerlane.so.0 ] || here="$here library"
echo "$*:$here" >>/asked
case "$*" in
*is-enabled*) [ ! -e /disabled ] ;;
esac
`), 0o755))
}

// asked returns the lines since the last call that contain a word.
func (r *tree) asked(word string) (lines []string) {
	r.Helper()
	path := filepath.Join(r.root, "asked")
	text, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		r.Fatal(err)
	}
	check(r, os.RemoveAll(path))
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, word) {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	return lines
}

const refresh = "--no-block restart peerlane-cdi-refresh.service:"

// Specifications follow the libraries unless the administrator disabled this. Units that write
// specifications stop before the removal of the specifications.
func TestRefreshFollowsThePackages(t *testing.T) {
	for _, format := range []struct {
		name    string
		install func(*tree, string)
		remove  func(*tree, string)
	}{
		{"deb", func(r *tree, name string) {
			r.run("dpkg --force-unsafe-io --install /packages/" + name + "_*_amd64.deb")
		}, func(r *tree, name string) { r.run("dpkg --force-unsafe-io --remove " + name) }},
		{"rpm", func(r *tree, name string) {
			r.rpm("-i", "--nodeps", rpm(r, dist, name, "amd64"))
		}, func(r *tree, name string) { r.rpm("-e", name) }},
	} {
		t.Run(format.name, func(t *testing.T) {
			r := plant(t, "bookworm", true)
			r.systemd()
			disabled := filepath.Join(r.root, "disabled")
			format.install(r, "peerlane")
			expect := func(what, want string) {
				t.Helper()
				if got := strings.Join(r.asked("restart"), "\n"); got != want {
					t.Errorf("after the %s systemctl was asked %q, not %q", what, got, want)
				}
			}
			expect("installation of peerlane", refresh)
			format.install(r, "libpeerlane")
			expect("installation of libpeerlane", refresh+" library")
			format.remove(r, "libpeerlane")
			expect("removal of libpeerlane", refresh)
			check(t, os.WriteFile(disabled, nil, 0o644))
			format.install(r, "libpeerlane")
			expect("installation beside a unit that is disabled", "")
			format.remove(r, "libpeerlane")
			expect("removal beside a unit that is disabled", "")
			check(t, os.Remove(disabled))

			format.install(r, "libpeerlane")
			r.generate()
			r.asked("")
			format.remove(r, "peerlane")
			stops := r.asked("stop ")
			if len(stops) != 2 || !strings.Contains(stops[0], "peerlane-cdi-refresh.service") ||
				!strings.Contains(stops[0], "peerlane-cdi-refresh.path") ||
				!strings.Contains(stops[0], "peerlane-links.timer") || !strings.Contains(stops[1], "peerlane-cdi-retry.service") {
				t.Errorf("a removal stops %q: the trigger of a retry must stop first", stops)
			}
			for _, stop := range stops {
				if !strings.HasSuffix(stop, ": specification library") {
					t.Errorf("specifications are removed before %q", stop)
				}
			}
			if r.exists("etc/cdi/peerlane.dev-lane.json") {
				t.Error("the removal leaves a specification")
			}
		})
	}
}

// Udev and retries start no refresh that the administrator disabled.
func TestRefreshStaysDisabled(t *testing.T) {
	r := plant(t, "bookworm", true)
	r.systemd()
	files := unpacked(t, "peerlane", "amd64")
	for path, pattern := range map[string]string{
		"usr/lib/udev/rules.d/90-peerlane.rules":            `(?m)^RUN\+="(.*)"$`,
		"usr/lib/systemd/system/peerlane-cdi-retry.service": `(?m)^ExecStart=(.*systemctl.*)$`,
	} {
		text, err := os.ReadFile(filepath.Join(files, path))
		check(t, err)
		lines := regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1)
		if len(lines) != 1 {
			t.Fatalf("%s runs %q", path, lines)
		}
		line := lines[0][1]
		r.run(line)
		if got := r.asked("restart"); len(got) != 1 || got[0] != refresh {
			t.Errorf("%s asks for %q", path, got)
		}
		r.run("touch /disabled; " + line + "; rm /disabled")
		if got := r.asked("restart"); len(got) != 0 {
			t.Errorf("%s asks for %q where the refresh is disabled", path, got)
		}
	}
}

// A timer that the administrator enabled survives a removal and an installation, and a purge
// removes it.
func TestEnabledTimerSurvivesReinstallation(t *testing.T) {
	r := plant(t, "bookworm", true)
	install := "dpkg --force-unsafe-io --install /packages/peerlane_*_amd64.deb"
	const mask, wants = "/etc/systemd/system/peerlane-links.timer",
		"/etc/systemd/system/timers.target.wants/peerlane-links.timer"
	r.run(install)
	r.run("mkdir -p /etc/systemd/system/timers.target.wants; ln -s /usr/lib/systemd/system/peerlane-links.timer " + wants)
	r.run("dpkg --force-unsafe-io --remove peerlane")
	if !r.exists(mask) {
		t.Error("the removal does not mask the timer")
	}
	r.run(install)
	if r.exists(mask) {
		t.Error("the timer stays masked after a second installation")
	}
	if !r.exists(wants) {
		t.Error("a removal and an installation disable the timer")
	}
	r.run("dpkg --force-unsafe-io --purge peerlane")
	if r.exists(mask) || r.exists(wants) {
		t.Error("the purge leaves links to the timer")
	}
}

// Removing the module, and no other operation, relabels the files.
func TestPolicyRemovalRelabels(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"selinuxenabled", "semodule", "restorecon"} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho ${0##*/} \"$@\" >>"+dir+"/did\n"), 0o755))
	}
	t.Setenv("PATH", dir)
	for script, arguments := range map[string][2]string{"selinux-deb-postrm": {"remove", "upgrade"},
		"selinux-rpm-postun": {"0", "1"}} {
		for i, argument := range arguments {
			run(t, "/bin/sh", filepath.Join(source, "packaging/scripts", script), argument)
			did, _ := os.ReadFile(dir + "/did")
			os.Remove(dir + "/did")
			removed, relabelled := strings.Index(string(did), "semodule --remove peerlane\n"), strings.Index(string(did),
				"restorecon -R ")
			if removal := i == 0; removal && (removed < 0 || relabelled < removed ||
				!strings.Contains(string(did), " /var/lib/peerlane")) || !removal && removed+relabelled != -2 {
				t.Errorf("%s %s does %q", script, argument, did)
			}
		}
	}
}
