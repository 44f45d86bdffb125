package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo/planner"
)

// docker is a Docker daemon of a test, with separate files.
type docker struct {
	bed     *bed
	address string
}

// testImage is the image of the test binary.
const testImage = "peerlane-test:1"

// newDocker starts a daemon with these runtimes.
func newDocker(b *bed, runtimes map[string][]string) *docker {
	b.Helper()
	type entry struct {
		Path string   `json:"path"`
		Args []string `json:"runtimeArgs"`
	}
	var settings struct {
		Runtimes map[string]entry `json:"runtimes"`
	}
	settings.Runtimes = map[string]entry{}
	for name, command := range runtimes {
		settings.Runtimes[name] = entry{command[0], command[1:]}
	}
	text, err := json.Marshal(settings)
	if err != nil {
		b.Fatal(err)
	}
	dir := filepath.Join(b.Root, "docker")
	file := filepath.Join(dir, "daemon.json")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(file, text, 0o644)); err != nil {
		b.Fatal(err)
	}
	d := &docker{b, "unix://" + dir + "/docker.sock"}
	var log bytes.Buffer
	daemon := exec.Command("dockerd", "--config-file", file, "--data-root", dir+"/data", "--exec-root", dir+"/exec",
		"--host", d.address, "--pidfile", dir+"/docker.pid", "--iptables=false", "--ip6tables=false", "--bridge=none")
	daemon.Stdout, daemon.Stderr = &log, &log
	if err := daemon.Start(); err != nil {
		b.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	b.Cleanup(func() {
		if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
			b.Error(err)
		}
		select {
		case <-ended:
		case <-testutil.After(time.Minute):
			b.Error(errors.Join(errors.New("dockerd does not end"), daemon.Process.Kill(), <-ended))
		}
		if b.Failed() {
			b.Logf("dockerd's last words: %s", log.Bytes()[max(0, log.Len()-4000):])
		}
	})
	for end := testutil.Begin(); ; time.Sleep(100 * time.Millisecond) {
		out, err := d.command(context.Background(), "info").CombinedOutput()
		if err == nil {
			return d
		}
		if end.Over() {
			b.Fatalf("dockerd does not answer: %v: %s", err, out)
		}
	}
}

func (d *docker) command(ctx context.Context, arguments ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, "docker", arguments...)
	c.Env = append(os.Environ(), "DOCKER_HOST="+d.address, "DOCKER_CONFIG="+d.bed.Root)
	return c
}

// must runs a Docker command and requires success.
func (d *docker) must(arguments ...string) string {
	d.bed.Helper()
	out, err := d.command(context.Background(), arguments...).CombinedOutput()
	if err != nil {
		d.bed.Fatalf("docker %s: %v: %s", strings.Join(arguments, " "), err, out)
	}
	return string(out)
}

// run runs a role by `docker run` with options.
func (d *docker) run(name string, options []string, role ...string) *container {
	d.bed.Helper()
	arguments := append([]string{"run", "--name", name, "--interactive", "--network=none"}, options...)
	arguments = append(append(arguments, testImage, "/usr/bin/test", "role"), role...)
	return d.bed.follow(name, d.command(context.Background(), arguments...), func(ctx context.Context) error {
		out, err := d.command(ctx, "rm", "--force", name).CombinedOutput()
		if err != nil {
			return fmt.Errorf("docker rm %s: %w: %s", name, err, out)
		}
		return nil
	})
}

// Docker without CDI support, with the configuration and the commands of the documentation.
func TestDockerWithoutCDIRunsContainers(t *testing.T) {
	version, err := exec.Command("dockerd", "--version").Output()
	if err != nil || !strings.Contains(string(version), " 20.10.") {
		t.Skipf("needs Docker 20.10, the package docker.io of Debian 12: dockerd is %q (%v)", version, err)
	}
	if _, err := exec.LookPath("docker"); err != nil {
		t.Skipf("needs Docker's command: %v", err)
	}
	b := withoutCDI(t, "runc", []string{"peerlane.dev/lane=*", "nvidia.com/gpu=*"})
	devices := func(lane planner.Lane) string { return strings.Join(testbed.Devices(b.gpu(lane)), ",") }
	d := newDocker(b, map[string][]string{
		"peerlane": b.runtime.Before,
		"peerlane-lane": append(b.runtime.Before[:len(b.runtime.Before):len(b.runtime.Before)],
			"--peerlane-device="+devices(b.lanes[1])),
	})
	d.must("import", "--change", "ENV GORACE=atexit_sleep_ms=0", b.imageArchive(), testImage)
	b.nics()
	within := func(t *testing.T) *docker {
		part := *b
		part.T = t
		return &docker{&part, d.address}
	}

	t.Run("bytes", func(t *testing.T) {
		d := within(t)
		a := d.run("asks", []string{"--runtime=peerlane", "--env=PEERLANE_DEVICES=" + devices(b.lanes[0])}, "stream")
		z := d.run("given", []string{"--runtime=peerlane-lane"}, "stream")
		handleA, handleZ := a.next("listening").Handle, z.next("listening").Handle
		a.send(event{Handle: handleZ})
		z.send(event{Handle: handleA})
		a.next("moving")
		z.next("moving")
	})
	t.Run("restart", func(t *testing.T) {
		d := within(t)
		const name = "again"
		d.must("create", "--name", name, "--network=none", "--runtime=peerlane-lane", testImage, "/usr/bin/test", "role",
			"hello")
		for range 2 {
			if out := d.must("start", "--attach", name); !strings.Contains(out, `"hello"`) {
				t.Errorf("output %s", out)
			}
		}
		d.must("rm", name)
	})
	t.Run("refused", func(t *testing.T) {
		d := within(t)
		out, err := d.command(context.Background(), "run", "--rm", "--network=none", "--runtime=peerlane",
			"--env=PEERLANE_DEVICES=peerlane.dev/gpu=all", testImage, "/usr/bin/test").CombinedOutput()
		if err == nil ||
			!strings.Contains(string(out),
				"PEERLANE_DEVICES asks for the device peerlane.dev/gpu=all: runtime.devices "+
					"in "+b.Layout.ConfigFile()+" does not permit it") {
			t.Errorf("%v: %s", err, out)
		}
	})
	t.Run("nothing asked for", func(t *testing.T) {
		d := within(t)
		c := d.run("plain", []string{"--runtime=peerlane"}, "hello")
		d.bed.mustFail(c, "no relay at /run/peerlane/relay.sock")
	})
}
