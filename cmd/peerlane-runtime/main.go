// Command peerlane-runtime adds devices to containers of engines without CDI. The engine runs this
// program in place of an OCI runtime. The program edits the config.json of a container that
// requests a device, and executes the runtime.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/peerlane/peerlane/cdi/inject"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/hostconfig"
)

const usage = `peerlane-runtime is an OCI runtime for engines without CDI, such as Docker 20.10.
It adds the CDI devices that a container requests, and runs runc or crun.

  peerlane-runtime [--peerlane-...=...] ARGUMENTS OF THE OCI RUNTIME

  --peerlane-device=NAME    add this device to every container; may be repeated
  --peerlane-spec-dir=DIR   read CDI specifications from DIR instead of etc/cdi and
                            var/run/cdi; may be repeated, the last directory wins
  --peerlane-root=DIR       also use etc/peerlane/config.toml, etc/cdi and var/run/cdi
                            below DIR; an engine without root needs
                            $XDG_RUNTIME_DIR/peerlane
  --peerlane-version        print the version of this program
  --peerlane-help           print this help

A container requests devices in the environment variable PEERLANE_DEVICES or in the
annotation peerlane.dev/devices, as names separated by commas. An image can set both,
so config.toml must permit each device in [runtime] devices. [runtime] path is the
path of the OCI runtime. In Docker's daemon.json:

  "runtimes": {
    "peerlane":       {"path": "/usr/bin/peerlane-runtime"},
    "peerlane-lane3": {"path": "/usr/bin/peerlane-runtime",
                       "runtimeArgs": ["--peerlane-device=peerlane.dev/lane=3"]}
  }

  docker run --runtime peerlane -e PEERLANE_DEVICES=peerlane.dev/lane=3 IMAGE
  docker run --runtime peerlane-lane3 IMAGE

Exit status: that of the OCI runtime; 1 if peerlane-runtime refuses to run it.
`

func main() {
	c, err := parse(os.Args[1:])
	if err == nil {
		err = version.Sentence(func() error { return run(c) })
	} else {
		err = fmt.Errorf("%w; %w", err, errUsage)
	}
	if err == nil {
		return
	}
	// Engines show the last error of the log, as with runc.
	err = fmt.Errorf("peerlane-runtime: %w", err)
	if logged := c.logError(err); logged != nil {
		err = errors.Join(err, logged)
	}
	fmt.Fprintln(os.Stderr, terminal.Lines(err.Error()))
	os.Exit(1)
}

// run replaces this process by the runtime. run returns nil after this program's help or version,
// and otherwise only an error.
func run(c commandLine) error {
	switch {
	case c.help:
		_, err := fmt.Print(usage)
		return err
	case c.version:
		_, err := fmt.Println("peerlane-runtime", version.Get())
		return err
	}
	l := paths.New(c.treeRoot())
	config, err := hostconfig.Read(l)
	if err != nil {
		return err
	}
	program, err := findRuntime(config.Runtime.Path, searchPath)
	if err != nil {
		return err
	}
	if c.command == "create" || c.command == "run" {
		file, err := c.configFile()
		if err != nil {
			return err
		}
		o := inject.Options{
			Devices: c.devices, Allowed: config.Runtime.Devices, ConfigFile: l.ConfigFile(), SpecDirs: c.specDirs,
		}
		if len(o.SpecDirs) == 0 {
			o.SpecDirs = specDirs(l)
		}
		if err := inject.Bundle(file, o); err != nil {
			return err
		}
	}
	err = syscall.Exec(program, append([]string{program}, c.forward...), os.Environ())
	return fmt.Errorf("execute %s: %w", program, err)
}

// treeRoot returns the root of the configuration. For a rootless engine the root is in the user's
// runtime directory.
func (c commandLine) treeRoot() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); c.root == "" && filepath.IsAbs(dir) && (os.Geteuid() != 0 || hook.Rootless()) {
		return filepath.Join(dir, "peerlane")
	}
	return c.root
}

// specDirs returns the directories that engines read, and last, with precedence, the directory of
// a tree other than the host's.
func specDirs(l paths.Layout) []string {
	dirs := slices.Clone(cdi.DefaultSpecDirs)
	if !l.IsDefault() {
		for _, dir := range cdi.DefaultSpecDirs {
			dirs = append(dirs, filepath.Join(l.Root, dir))
		}
	}
	return dirs
}

// logError appends an error to the log that the engine named, as runc and crun do.
func (c commandLine) logError(failed error) (err error) {
	path := strings.TrimPrefix(c.log, "file:") // the form of crun
	if path == "" || strings.HasPrefix(path, "syslog:") || strings.HasPrefix(path, "journald:") {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("the log of --log: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var format logrus.Formatter = &logrus.TextFormatter{DisableColors: true, FullTimestamp: true}
	if c.logFormat == "json" {
		format = &logrus.JSONFormatter{}
	}
	line, err := format.Format(&logrus.Entry{Logger: logrus.StandardLogger(), Level: logrus.ErrorLevel, Time: time.Now(),
		Message: failed.Error()})
	if err != nil {
		return err
	}
	_, err = f.Write(line)
	return err
}
