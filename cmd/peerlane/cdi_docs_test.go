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

// packaged returns the content of a file of the packages.
func packaged(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../packaging", path))
	check(t, err)
	return string(text)
}

// Scripts match the kinds of drift that the documentation lists.
func TestDriftKindsAreDocumented(t *testing.T) {
	docs, err := os.ReadFile("../../docs/cdi.md")
	check(t, err)
	code, err := os.ReadFile("../../cdi/validate.go")
	check(t, err)
	kinds := regexp.MustCompile(`(?m)^\tdrift\w+ += "([a-z-]+)"`).FindAllStringSubmatch(string(code), -1)
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

func TestPackagedUnitsAreVerified(t *testing.T) {
	needs(t, "systemd-analyze")
	dir := t.TempDir()
	const refresh = "peerlane-cdi-refresh.service"
	var files []string
	texts := map[string]string{}
	for _, name := range []string{refresh, "peerlane-anchor.service", "peerlane-cdi-refresh.path",
		"peerlane-cdi-retry.service", "peerlane-links.timer",
		"peerlane-exporter.service", "peerlane-exporter-collector.socket", "peerlane-exporter-collector@.service"} {
		// systemd-analyze requires that the executable exists.
		texts[name] = strings.Replace(packaged(t, "systemd/"+name), "/usr/bin/peerlane", "/bin/true", 1)
		files = append(files, filepath.Join(dir, name))
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(texts[name]), 0o644))
	}
	verify := func() string {
		output, err := exec.Command("systemd-analyze", append([]string{"verify", "--man=no"}, files...)...).CombinedOutput()
		if err != nil {
			return err.Error() + ": " + string(output)
		}
		return string(output)
	}
	if output := verify(); strings.Contains(output, dir) || strings.Contains(output, "peerlane") {
		t.Errorf("systemd-analyze verify says\n%s", output)
	}
	check(t, os.WriteFile(filepath.Join(dir, refresh), []byte(texts[refresh]+"\n[Service]\nBefor=docker.service\n"),
		0o644))
	if output := verify(); !strings.Contains(output, "Befor") {
		t.Errorf("systemd-analyze verify does not see a mistake: %q", output)
	}
}

func TestPackagedRuleStartsRefresh(t *testing.T) {
	needs(t, "udevadm")
	modules, err := filepath.Glob("/sys/module/[a-z]*")
	check(t, err)
	if len(modules) == 0 {
		t.Skip("the kernel shows no module")
	}
	module := modules[0]
	rule := packaged(t, "udev/90-peerlane.rules")
	// udevadm also reads the rules in /run/udev, so this test mounts its own /run.
	simulate := func(rule, device string) string {
		path := filepath.Join(t.TempDir(), "90-peerlane.rules")
		check(t, os.WriteFile(path, []byte(rule), 0o644))
		c := exec.Command("sh", "-c", `mount -t tmpfs none /run && mkdir -p /run/udev/rules.d && cp "$1" /run/udev/rules.d/ && udevadm test -a add "$2" 2>&1`, "sh", path, device)
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		output, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("udevadm test: %v\n%s", err, output)
		}
		if !strings.Contains(string(output), "90-peerlane.rules") {
			t.Fatalf("udevadm does not read the rule:\n%s", output)
		}
		return string(output)
	}
	const runs = "peerlane-cdi-refresh.service"
	mistake := regexp.MustCompile(`90-peerlane\.rules:\d+ (Invalid|Unknown|Failed)`)
	output := simulate(rule, "/sys/class/net/lo")
	if m := mistake.FindString(output); m != "" || strings.Contains(output, runs) {
		t.Errorf("for a network interface udevadm says\n%s", output)
	}
	output = simulate(strings.Replace(rule, `KERNEL=="nvidia|`, `KERNEL=="`+filepath.Base(module)+`|`, 1), module)
	if mistake.MatchString(output) || !strings.Contains(output, runs) {
		t.Errorf("for a module udevadm says\n%s", output)
	}
	if output := simulate(strings.Replace(rule, "SUBSYSTEM==", "SUBSISTEM==", 1),
		"/sys/class/net/lo"); !mistake.MatchString(output) {
		t.Errorf("udevadm does not see a mistake:\n%s", output)
	}
}
