package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// fenced are the blocks of docs/cdi.md that look like this.
func fenced(t *testing.T, like string) (blocks []string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/cdi.md")
	check(t, err)
	for _, m := range regexp.MustCompile("(?s)```[a-z]*\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(m[1], like) {
			blocks = append(blocks, m[1])
		}
	}
	if len(blocks) == 0 {
		t.Fatalf("docs/cdi.md has no block with %q", like)
	}
	return blocks
}

// Scripts look for the kinds of drift by the words of the documentation.
func TestTheDocumentationHasEveryKindOfDrift(t *testing.T) {
	docs, err := os.ReadFile("../../docs/cdi.md")
	check(t, err)
	code, err := os.ReadFile("../../cdi/validate.go")
	check(t, err)
	kinds := regexp.MustCompile(`(?m)^\tDrift\w+ += "([a-z-]+)"`).FindAllStringSubmatch(string(code), -1)
	if len(kinds) < 20 {
		t.Fatalf("only %d kinds were found", len(kinds))
	}
	for _, kind := range kinds {
		if !strings.Contains(string(docs), "`"+kind[1]+"`") {
			t.Errorf("docs/cdi.md does not explain %s", kind[1])
		}
	}
}

func needs(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("%s is not installed", program)
	}
}

func TestUnitsOfTheDocumentation(t *testing.T) {
	needs(t, "systemd-analyze")
	dir := t.TempDir()
	service := filepath.Join(dir, "peerlane-cdi-refresh.service")
	// It looks whether the program is there.
	text := strings.Replace(fenced(t, "[Service]")[0], "/usr/bin/peerlane", "/bin/true", 1)
	check(t, os.WriteFile(service, []byte(text), 0o644))
	timer := filepath.Join(dir, "peerlane-links.timer")
	check(t, os.WriteFile(timer, []byte(fenced(t, "[Timer]")[0]), 0o644))
	verify := func() string {
		said, err := exec.Command("systemd-analyze", "verify", "--man=no", service, timer).CombinedOutput()
		if err != nil {
			return err.Error() + ": " + string(said)
		}
		return string(said)
	}
	if said := verify(); strings.Contains(said, dir) || strings.Contains(said, "peerlane") {
		t.Errorf("systemd-analyze verify says\n%s", said)
	}
	check(t, os.WriteFile(service, []byte(text+"\n[Service]\nBefor=docker.service\n"), 0o644))
	if said := verify(); !strings.Contains(said, "Befor") {
		t.Errorf("systemd-analyze verify does not see a mistake: %q", said)
	}
}

func TestRuleOfTheDocumentation(t *testing.T) {
	needs(t, "udevadm")
	modules, err := filepath.Glob("/sys/module/[a-z]*")
	check(t, err)
	if len(modules) == 0 {
		t.Skip("the kernel shows no module")
	}
	module := modules[0]
	rule := fenced(t, "SUBSYSTEM==")[0]
	// udevadm looks for rules in /run/udev, among other places, and this test has
	// a /run of its own.
	simulate := func(rule, device string) string {
		path := filepath.Join(t.TempDir(), "90-peerlane.rules")
		check(t, os.WriteFile(path, []byte(rule), 0o644))
		c := exec.Command("sh", "-c", `mount -t tmpfs none /run && mkdir -p /run/udev/rules.d && cp "$1" /run/udev/rules.d/ && udevadm test -a add "$2" 2>&1`, "sh", path, device)
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		said, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("udevadm test: %v\n%s", err, said)
		}
		if !strings.Contains(string(said), "90-peerlane.rules") {
			t.Fatalf("udevadm does not read the rule:\n%s", said)
		}
		return string(said)
	}
	const runs = "peerlane-cdi-refresh.service"
	mistake := regexp.MustCompile(`90-peerlane\.rules:\d+ (Invalid|Unknown|Failed)`)
	said := simulate(rule, "/sys/class/net/lo")
	if m := mistake.FindString(said); m != "" || strings.Contains(said, runs) {
		t.Errorf("for a network interface udevadm says\n%s", said)
	}
	said = simulate(strings.Replace(rule, `KERNEL=="nvidia|`, `KERNEL=="`+filepath.Base(module)+`|`, 1), module)
	if mistake.MatchString(said) || !strings.Contains(said, runs) {
		t.Errorf("for a module udevadm says\n%s", said)
	}
	if said := simulate(strings.Replace(rule, "SUBSYSTEM==", "SUBSISTEM==", 1), "/sys/class/net/lo"); !mistake.MatchString(said) {
		t.Errorf("udevadm does not see a mistake:\n%s", said)
	}
}
