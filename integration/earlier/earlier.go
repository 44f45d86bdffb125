// Package earlier builds Peerlane's programs of an earlier commit. Tests of upgrades run containers
// of these programs while the programs of this commit replace them.
//
// The sources of the commit are in an archive, because a clone of CI may be shallow, and an export
// has no history. The archive is the output of
//
//	git archive a099472 PATHS | gzip -9n
//
// with the arguments in paths. TestArchiveHasFilesOfCommit compares the archive with the commit.
package earlier

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/libpeerlane"
)

// commit is the commit of the programs.
const commit = "a099472271238b1a091b5e715635b5f6a1c80c40"

// NewestVersion is the newest version of the protocol of the commit's programs.
const NewestVersion = 3

// paths are the arguments of git archive.
var paths = []string{
	"go.mod", "go.sum", "cdi", "cmd/manual", "cmd/peerlane-hook", "cmd/peerlane-relay", "cmd/version", "cuda", "hook",
	"integration/bundle", "integration/measure", "integration/testbed", "relay", "topo",
	":(exclude)*_test.go", ":(exclude)*/testdata/*", ":(exclude)relay/nccl/*", ":(exclude)cuda/conformance/*",
	":(exclude)topo/picture/*",
}

// Names of the programs and of the library in Build's directory. Host and Program are compiled from
// sources in this package, with the packages and the library of the commit.
const (
	hook    = "peerlane-hook"
	relay   = "peerlane-relay"
	Host    = "host"
	Program = "client"
	Library = libpeerlane.Name
)

var (
	//go:embed testdata/a099472.tar.gz
	archive []byte
	//go:embed testdata/host.go
	host []byte
	//go:embed testdata/client.c
	client []byte
)

// Build returns the directory of the programs, and builds the programs at the first call on a
// machine.
func Build() (dir string, err error) {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(runtime.Version()), archive, host, client} {
		fmt.Fprintf(h, "%d\n%s", len(part), part)
	}
	dir, err = programs.Cache(fmt.Sprintf("%x", h.Sum(nil)[:16]), commit[:7], build)
	if err != nil {
		return "", fmt.Errorf("build the programs of commit %.7s: %w", commit, err)
	}
	return dir, nil
}

func build(to string) error {
	tree, err := os.MkdirTemp("", "earlier-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tree)
	unpack := exec.Command("tar", "-xz", "-C", tree)
	unpack.Stdin = bytes.NewReader(archive)
	if out, err := unpack.CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %w: %s", err, out)
	}
	for path, content := range map[string][]byte{
		"integration/host/main.go":                host,
		"relay/libpeerlane/examples/transferer.c": client,
	} {
		path = filepath.Join(tree, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	run := func(command ...string) error {
		c := exec.Command(command[0], command[1:]...)
		c.Dir = tree
		c.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK=off")
		if command[len(command)-1] == "./cmd/"+hook {
			c.Env = append(c.Env, "CGO_ENABLED=0")
		}
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, out)
		}
		return nil
	}
	for _, command := range [][]string{
		{"go", "build", "-o", filepath.Join(to, hook), "./cmd/" + hook},
		{"go", "build", "-o", filepath.Join(to, relay), "./cmd/" + relay},
		{"go", "build", "-o", filepath.Join(to, Host), "./integration/host"},
		{"go", "run", "./relay/libpeerlane/build", to},
		{"cc", "-std=gnu11", "-o", filepath.Join(to, Program), "relay/libpeerlane/examples/transferer.c",
			"-Irelay/libpeerlane/examples", "-Irelay/libpeerlane/source", "-Irelay/wire", "-L" + to, "-l:" + Library, "-ldl"},
	} {
		if err := run(command...); err != nil {
			return err
		}
	}
	return nil
}
