//go:build !front

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cdi/engine"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config"
)

func newRuntimeCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "runtime",
		Short: "Configure container engines for lanes",
		Long: `Configure container engines for CDI devices, by which containers get lanes: Docker,
containerd, Podman and CRI-O. Newer versions need no configuration; see peerlane
runtime status. An engine without CDI gets peerlane-runtime as a runtime named peerlane.

Engines are never restarted.`,
		Example: `  peerlane runtime status
  peerlane runtime configure --runtime docker --dry-run`,
	}
	cmd.AddCommand(newRuntimeStatusCommand(a), newRuntimeConfigureCommand(a), newRuntimeRemoveCommand(a))
	return group(cmd)
}

// engineFlags select an engine and its configuration file and version.
type engineFlags struct {
	name, file, version string
	wanted              engine.Wanted
}

func (f *engineFlags) addName(cmd *cobra.Command, usage string) {
	cmd.Flags().StringVar(&f.name, "runtime", "", usage+": "+strings.Join(engine.Names, ", "))
	complete(cmd, "runtime", engine.Names...)
}

func (f *engineFlags) addFile(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.file, "config", "", "configuration `FILE` of the engine (default: the engine's)")
	cmd.Flags().StringVar(&f.version, "engine-version", "", "`VERSION` of the engine (default: from the engine)")
	completeFiles(cmd, "config", "json", "toml", "conf")
	complete(cmd, "engine-version")
}

func (f *engineFlags) host(a *app) engine.Host {
	return engine.Host{Root: a.layout.Root, ConfigFile: f.file, Version: f.version}
}

// check requires the name of an engine, or with optional no name.
func (f *engineFlags) check(cmd *cobra.Command, optional bool) error {
	if slices.Contains(engine.Names, f.name) || optional && f.name == "" {
		return nil
	}
	cause := fmt.Errorf("--runtime is required: %s", strings.Join(engine.Names, ", "))
	if f.name != "" {
		cause = fmt.Errorf("--runtime %s: unknown engine; use %s", f.name, strings.Join(engine.Names, ", "))
		if near, letters := config.Nearest(f.name, engine.Names); letters <= 2 {
			cause = fmt.Errorf("%w; did you mean %s?", cause, near)
		}
	}
	return usageError{cmd.CommandPath(), cause}
}

// engineStore returns the directory with the records of changed engines.
func (a *app) engineStore() string { return filepath.Join(a.layout.State(), "engines") }

// packagedRuntime is the path of peerlane-runtime in packages.
const packagedRuntime = "/usr/bin/peerlane-runtime"

// runtimePath returns the path of peerlane-runtime: beside this command, in the prefix of this
// command, or that of the packages.
func runtimePath() string {
	self, err := os.Executable()
	if err != nil {
		return packagedRuntime
	}
	return runtimeOf(self)
}

func runtimeOf(self string) string {
	paths := []string{filepath.Join(filepath.Dir(self), "peerlane-runtime")}
	if prefix, ok := prefixOf(self); ok {
		paths = append(paths, filepath.Join(prefix, "bin/peerlane-runtime"))
	}
	for _, path := range paths {
		if executable(path) {
			return path
		}
	}
	return packagedRuntime
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

func newRuntimeStatusCommand(a *app) *cobra.Command {
	f := &engineFlags{}
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show container engines and their support for lanes",
		Long: `Show the container engines of this host: version, CDI support, configuration, and the
changes that peerlane runtime configure would make. The version is that of a running
daemon, or else of the program; nothing is changed. If an engine cannot be examined the
others are shown, and the command fails.

CDI is on, off (disabled by the configuration), or none (not in this version).`,
		Example: `  peerlane runtime status
  peerlane runtime status --runtime containerd -o json`,
		Args: noArgs,
	}
	f.addName(cmd, "show this `ENGINE` alone")
	f.addFile(cmd)
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if err := f.check(cmd, f.file == "" && f.version == ""); err != nil {
			return err
		}
		names := engine.Names
		if f.name != "" {
			names = []string{f.name}
		}
		f.wanted.RuntimePath = runtimePath()
		states := []engine.State{}
		var failed error
		for _, name := range names {
			s, err := f.host(a).Look(cmd.Context(), name, f.wanted)
			if err != nil && len(names) == 1 {
				return asRoot(err)
			}
			if err != nil && !errors.Is(err, engine.ErrNotInstalled) {
				s.Error, failed = err.Error(), errors.Join(failed, err)
			}
			// Only root can read the records. Print the other fields for every user.
			if s.Configured, err = engine.Configured(a.engineStore(), name); err != nil && s.Error == "" {
				s.Notes = append(s.Notes, fmt.Sprintf("whether Peerlane has configured it is not known: %v", err))
			}
			states = append(states, s)
		}
		if form.value == formJSON {
			return errors.Join(a.printJSON(states), asRoot(failed))
		}
		t := a.newTable("ENGINE", "VERSION", "CDI", "CONFIGURATION", "STATE")
		for _, s := range states {
			t.AppendRow(table.Row{s.Engine, dash(s.Version), dash(string(s.CDI)), s.File, a.engineWords(s)})
		}
		a.out.Println(t.Render())
		for _, s := range states {
			for _, note := range s.Notes {
				a.out.Printf("%s: %s\n", s.Engine, note)
			}
		}
		return asRoot(failed)
	}
	return cmd
}

// engineWords describes the state of an engine.
func (a *app) engineWords(s engine.State) terminal.Styled {
	switch {
	case s.Error != "":
		return a.paint("could not tell", red) // the error of the command has the reason
	case s.Version == "":
		return a.paint("not installed")
	case len(s.Change) > 0:
		return a.paint("needs "+strings.Join(s.Change, ", "), yellow)
	case s.Configured:
		return a.paint("ready, configured by Peerlane")
	}
	return a.paint("ready")
}

// changeReport is the JSON document of a change of an engine's configuration.
type changeReport struct {
	Engine  string   `json:"engine"`
	File    string   `json:"file"`
	Changed bool     `json:"changed"`
	DryRun  bool     `json:"dryRun,omitempty"`
	Keys    []string `json:"keys,omitempty"`
	Diff    string   `json:"diff,omitempty"`
	Backup  string   `json:"backup,omitempty"`
	Restart string   `json:"restart,omitempty"`
	Notes   []string `json:"notes"`
}

// report prints a change, or with dry a planned change.
func (a *app) report(form string, c engine.Change, dry bool, r changeReport) error {
	r.Engine, r.DryRun, r.Changed, r.Restart, r.Notes = c.Engine, dry, !c.None(), c.Restart, append([]string{}, c.Notes...)
	if r.File == "" {
		r.File = c.Path
	}
	if r.Changed {
		r.Diff = c.Diff()
	} else {
		r.Restart, r.Backup = "", ""
	}
	if form == formJSON {
		return a.printJSON(r)
	}
	for _, note := range c.Notes {
		a.log.Warn(c.Engine + ": " + terminal.Sanitise(note))
	}
	switch {
	case !r.Changed:
		a.out.Printf("%s: nothing has to be changed.\n", c.Engine)
		return nil
	case dry:
		a.out.PrintLines(r.Diff)
	case c.New == nil:
		a.out.Printf("removed %s\n", r.File)
	default:
		a.out.Printf("wrote %s\n", r.File)
	}
	if r.Backup != "" && !dry {
		a.out.Printf("%s has it as it was\n", r.Backup)
	}
	if r.Restart != "" && !dry {
		a.out.Printf("To take effect: %s\n", r.Restart)
	}
	return nil
}

func newRuntimeConfigureCommand(a *app) *cobra.Command {
	f := &engineFlags{}
	var dry bool
	cmd := &cobra.Command{
		Use:   "configure --runtime ENGINE",
		Short: "Configure an engine for lanes",
		Long: `Change an engine's configuration so that containers get CDI devices, and nothing else.
Versions that enable CDI by default need no change: Docker from 28.2 on, containerd from
2.0, Podman from 4.1, CRI-O from 1.23. Older versions:

  docker      features.cdi in daemon.json, from 25.0 on
  containerd  enable_cdi of the CRI in config.toml, or in the imported file with
              the CRI's table; from 1.7 on
  others      peerlane-runtime as a runtime named peerlane, as with
              --set-as-runtime for every engine

Lists of specification directories get missing entries. Podman and CRI-O get a drop-in
file, 99-peerlane.conf.

Comments and all other keys stay. The original file is kept in var/lib/peerlane/engines,
and peerlane runtime remove restores it. If the command cannot read a file, or cannot
change only these keys, the file stays unchanged, and the error has the line. The engine
is not restarted: the last line states whether a restart is needed, and its command.`,
		Example: `  peerlane runtime configure --runtime docker --dry-run
  peerlane runtime configure --runtime containerd
  peerlane runtime configure --runtime docker --set-as-runtime
  peerlane runtime configure --runtime crio --hooks-dir /etc/containers/oci/hooks.d`,
		Args: noArgs,
	}
	f.addName(cmd, "the `ENGINE`")
	f.addFile(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&dry, "dry-run", false, "print the changes as a unified diff, and change nothing")
	flags.StringArrayVar(&f.wanted.SpecDirs, "spec-dir", nil,
		"CDI specifications are in `DIR`, too; may be given more than once")
	flags.StringArrayVar(&f.wanted.HooksDirs, "hooks-dir", nil,
		"OCI hooks are in `DIR`, too (podman, crio); may be given more than once")
	flags.BoolVar(&f.wanted.Runtime, "set-as-runtime", false, "add peerlane-runtime as runtime peerlane for any version")
	flags.StringVar(&f.wanted.RuntimePath, "peerlane-runtime", "",
		"absolute `PATH` of peerlane-runtime (default: beside this command, or "+packagedRuntime+")")
	flags.StringArrayVar(&f.wanted.RuntimeArgs, "runtime-arg", nil,
		"give peerlane-runtime the argument `ARG` (docker); may be given more than once")
	completeDirectories(cmd, "spec-dir", "hooks-dir")
	completeFiles(cmd, "peerlane-runtime")
	complete(cmd, "runtime-arg")
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if err := f.check(cmd, false); err != nil {
			return err
		}
		if f.wanted.RuntimePath == "" {
			f.wanted.RuntimePath = runtimePath()
		}
		for _, path := range slices.Concat([]string{f.wanted.RuntimePath}, f.wanted.SpecDirs, f.wanted.HooksDirs) {
			if !filepath.IsAbs(path) {
				return usageError{cmd.CommandPath(), fmt.Errorf("%q is not an absolute path, which engines need", path)}
			}
		}
		return a.held(dry, func() error {
			c, s, err := f.host(a).Configure(cmd.Context(), a.engineStore(), f.name, f.wanted)
			if err != nil {
				return asRoot(err)
			}
			if !dry && !c.None() {
				if err := c.Apply(); err != nil {
					return asRoot(err)
				}
			}
			return a.report(form.value, c, dry, changeReport{Keys: s.Change, File: s.File, Backup: c.Backup()})
		})
	}
	return cmd
}

// held calls do under the lock of Peerlane's state. A dry run takes no lock, because it writes
// nothing.
func (a *app) held(dry bool, do func() error) (err error) {
	if !dry {
		lock, err := cdi.Hold(a.layout)
		if err != nil {
			return asRoot(err)
		}
		defer func() { err = errors.Join(err, lock.Close()) }()
	}
	return do()
}

func newRuntimeRemoveCommand(a *app) *cobra.Command {
	f := &engineFlags{}
	var dry bool
	cmd := &cobra.Command{
		Use:   "remove --runtime ENGINE",
		Short: "Revert the configuration of an engine",
		Long: `Restore an engine's configuration to that before peerlane runtime configure: byte for
byte if the file has not changed since. Otherwise only the keys that Peerlane has set are
restored; a key that was changed since stays, and is reported.

The engine is not restarted.`,
		Example: `  peerlane runtime remove --runtime docker --dry-run
  peerlane runtime remove --runtime docker`,
		Args: noArgs,
	}
	f.addName(cmd, "the `ENGINE`")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the changes as a unified diff, and change nothing")
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if err := f.check(cmd, false); err != nil {
			return err
		}
		return a.held(dry, func() error {
			c, err := engine.Remove(a.engineStore(), f.name)
			if err != nil {
				return asRoot(err)
			}
			if !dry {
				if err := c.Apply(); err != nil {
					return asRoot(err)
				}
			}
			return a.report(form.value, c, dry, changeReport{})
		})
	}
	return cmd
}
