package documents

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSlurmJobScriptStartsAContainerForEachGPU runs the job script of docs/slurm.md with recorders
// of arguments in place of podman and peerlane.
func TestSlurmJobScriptStartsAContainerForEachGPU(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/slurm.md"))
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)\n```sh\n(.*?)\n```\n").FindAllStringSubmatch(string(text), -1)
	if len(blocks) != 1 || !strings.HasPrefix(blocks[0][1], "#!/bin/bash\n#SBATCH ") {
		t.Fatalf("docs/slurm.md has %d scripts, want one", len(blocks))
	}
	for _, tt := range []struct {
		gpus, fails string // fails: the rank with the failing container
		status      int
	}{{"2,5", "", 0}, {"7", "", 0}, {"0,3", "-0 ", 9}, {"0,3", "-1 ", 9}} {
		dir := t.TempDir()
		script := filepath.Join(dir, "job")
		for name, program := range map[string]string{
			"job":      blocks[0][1],
			"peerlane": "#!/bin/sh\necho \"$*\" >" + dir + "/peerlane.log\n",
			"podman": "#!/bin/sh\necho \"$*\" >" + dir + "/$$.podman.log\ncase \"$*\" in " +
				"*--name\\ job42'" + tt.fails + "'*) test -z '" + tt.fails + "' || exit 9;; esac\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(program), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(bash, script)
		cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "SLURM_JOB_ID=42", "SLURM_JOB_GPUS=" + tt.gpus,
			"XDG_RUNTIME_DIR=" + dir + "/run"}
		out, err := cmd.CombinedOutput()
		if status := cmd.ProcessState.ExitCode(); status != tt.status {
			t.Errorf("GPUs %s: exit status %d, %v: %s", tt.gpus, status, err, out)
		}
		log, err := os.ReadFile(filepath.Join(dir, "peerlane.log"))
		if want := "--root " + dir + "/run/peerlane cdi generate --hook /usr/libexec/peerlane/peerlane-hook " +
			"--spec-dir " + dir + "/run/peerlane/etc/cdi\n"; string(log) != want {
			t.Errorf("GPUs %s: peerlane %q, want %q, %v", tt.gpus, log, want, err)
		}
		logs, err := filepath.Glob(filepath.Join(dir, "*.podman.log"))
		gpus := strings.Split(tt.gpus, ",")
		if err != nil || len(logs) != len(gpus) {
			t.Errorf("GPUs %s: %d containers, %v", tt.gpus, len(logs), err)
		}
		var all strings.Builder
		for _, log := range logs {
			line, err := os.ReadFile(log)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(line)
		}
		for _, gpu := range gpus {
			if want := "--runtime /usr/bin/peerlane-runtime --runtime-flag " +
				"peerlane-device=nvidia.com/gpu=" + gpu + ",peerlane.dev/lane=" + gpu + " run "; strings.Count(all.String(),
				want) != 1 {
				t.Errorf("GPUs %s: no container with %q in %s", tt.gpus, want, all.String())
			}
		}
	}
}
