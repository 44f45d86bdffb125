//go:build !front

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	library "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo/planner"
)

func newCDICommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cdi",
		Short: "Manage the specifications that offer lanes to container engines",
		Long: `Manage the specifications (CDI, the Container Device Interface) that offer lanes as
devices to container engines. peerlane cdi generate writes them with the plan of this
host's lanes; the other commands list, check and remove them.`,
		Example: `  peerlane cdi generate --spec-dir /etc/cdi
  peerlane cdi list
  peerlane cdi validate`,
	}
	cmd.AddCommand(newGenerateCommand(a), newCDIAnchorCommand(a), newCDIListCommand(a), newCDIValidateCommand(a),
		newCDIRefreshCommand(a), newCDIRemoveCommand(a))
	return group(cmd)
}

// specFlags are the flags for the content and the location of specifications.
type specFlags struct {
	cmd           *cobra.Command
	dirs          []string
	format        string
	hook, devRoot string
}

// addSpecDirs adds the flag for the directories of specifications to a command.
func addSpecDirs(cmd *cobra.Command, f *specFlags, usage string) {
	cmd.Flags().StringArrayVar(&f.dirs, "spec-dir", nil, usage)
	completeDirectories(cmd, "spec-dir")
}

// addContents adds the flags for the content of specifications to a command.
func addContents(cmd *cobra.Command, f *specFlags, hook string) {
	cmd.Flags().StringVar(&f.hook, "hook", "", "absolute `PATH` of peerlane-hook (default: "+hook+")")
	cmd.Flags().StringVar(&f.devRoot, "dev-root", "/", "take device nodes from the dev/ in `DIR`")
	completeFiles(cmd, "hook")
	completeDirectories(cmd, "dev-root")
}

// addFormat adds the flag for the format of specifications to a command.
func addFormat(cmd *cobra.Command, f *specFlags, otherwise string) {
	cmd.Flags().StringVar(&f.format, "format", "", "write specifications as `FORMAT`: json, yaml (default: "+otherwise+")")
	complete(cmd, "format", cdi.Formats...)
}

func (f *specFlags) checkFormat() error {
	if f.format != "" && !slices.Contains(cdi.Formats, f.format) {
		return usageError{f.cmd.CommandPath(), fmt.Errorf("--format %s: unknown format; use %s", f.format,
			strings.Join(cdi.Formats, ", "))}
	}
	return nil
}

// specDirs returns the directories of --spec-dir. The default is the directories that engines read
// or, with --root, a directory below that root, which no engine reads.
func (a *app) specDirs(f *specFlags) []string {
	if len(f.dirs) > 0 {
		return f.dirs
	}
	var dirs []string
	for _, dir := range library.DefaultSpecDirs {
		dirs = append(dirs, filepath.Join(a.layout.Root, dir))
	}
	return dirs
}

// specOptions returns the options of specifications for a plan.
func (a *app) specOptions(p *planned, host *hostFlags, hook, devRoot string) cdi.Options {
	return cdi.Options{Layout: a.layout, HookPath: hook, Tenancy: p.config.CDI.Tenancy, DevRoot: devRoot, Proc: host.proc,
		LibraryDir: a.libraryDir()}
}

// libraryDir returns the directory of the libraries for containers if the prefix of this command
// is not that of the packages (make install PREFIX=); otherwise it returns "".
func (a *app) libraryDir() string {
	self, err := os.Executable()
	if err != nil || !a.layout.IsDefault() {
		return ""
	}
	return prefixedLibraries(self, a.layout.Libraries())
}

func prefixedLibraries(self, packaged string) string {
	prefix, ok := prefixOf(self)
	if _, err := os.Stat(packaged); err == nil || !ok {
		return ""
	}
	dir := filepath.Join(prefix, "lib/peerlane")
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// prefixOf returns the prefix of this command, which is PREFIX/bin/peerlane, or
// PREFIX/libexec/peerlane/peerlane behind the front.
func prefixOf(self string) (prefix string, ok bool) {
	dir := filepath.Dir(self)
	above := filepath.Dir(dir)
	switch {
	case filepath.Base(dir) == "bin":
		return above, true
	case filepath.Base(dir) == "peerlane" && filepath.Base(above) == "libexec":
		return filepath.Dir(above), true
	}
	return "", false
}

func newGenerateCommand(a *app) *cobra.Command {
	var class string
	var dry bool
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Plan this host, and generate its CDI specifications",
		Long: `Plan this host, and generate the CDI specifications of its lanes:

  peerlane.dev/lane=N  the relay and its socket; the GPU itself comes from
                       nvidia.com/gpu=N
  peerlane.dev/gpu=N   also the device nodes of the GPU, its server GPUs and
                       its NIC; not with tenancy = "multi"
  peerlane.dev/nic=M   the device nodes of a NIC; not with tenancy = "multi"

N is a GPU's index, UUID or PCI address, a group of the configuration, or "all",
and M a NIC's name or PCI address, or "all". peerlane.dev/lane=auto selects the
lanes of the GPUs that the engine gives the container.

With --spec-dir the command installs the specifications there, and writes the plan
to var/lib/peerlane/plan.json, where the hook reads it when a container starts.
As root it also mounts the empty directory for containers (peerlane cdi anchor).
Current files are not touched. Without --spec-dir it prints the specifications and
changes nothing.`,
		Example: `  peerlane cdi generate --spec-dir /etc/cdi
  peerlane cdi generate --spec-dir /etc/cdi --dry-run
  peerlane cdi generate --class lane --format yaml`,
		Args: noArgs,
	}
	host, f := addLiveHost(cmd), &specFlags{cmd: cmd}
	host.addSoftware()
	addSpecDirs(cmd, f, "install the specifications in `DIR`; without it they are printed")
	addContents(cmd, f, defaultHook)
	addFormat(cmd, f, "that of the installed ones, or json")
	cmd.Flags().StringVar(&class, "class", "", "print only the specification of `CLASS`: "+strings.Join(classes(), ", "))
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the changes of --spec-dir as a unified diff, and change nothing")
	complete(cmd, "class", classes()...)
	cmd.RunE = func(*cobra.Command, []string) error {
		switch {
		case class != "" && len(f.dirs) > 0:
			return usageError{cmd.CommandPath(),
				errors.New("--class selects a specification to print; --spec-dir always installs all classes: give one or the " +
					"other")}
		case dry && len(f.dirs) == 0:
			return usageError{cmd.CommandPath(),
				errors.New("--dry-run needs --spec-dir; without --spec-dir the command only prints")}
		}
		if err := f.checkFormat(); err != nil {
			return err
		}
		hook, err := hookPath(f.hook)
		if err != nil {
			return err
		}
		var plan *planner.Plan
		var made *planned
		var o cdi.Options
		var list []*specs.Spec
		read := func() (*planner.Plan, []*specs.Spec, error) {
			p, err := a.plan(host)
			if err != nil {
				return nil, nil, err
			}
			made, plan, o = p, p.plan, a.specOptions(p, host, hook, f.devRoot)
			list, err = cdi.Generate(plan, o)
			return plan, list, err
		}
		if len(f.dirs) == 0 {
			if _, _, err := read(); err != nil {
				return err
			}
			return a.printSpecs(list, class, cdi.Format(f.format))
		}
		i := cdi.Installation{Layout: a.layout, Dirs: f.dirs, Format: cdi.Format(f.format)}
		changes, err := i.Install(dry, read)
		if err != nil {
			return asRoot(err)
		}
		if dry {
			a.printDiffs(changes)
			return nil
		}
		a.keepKnownPairs(made)
		if err := a.installAnchor(); err != nil {
			return err
		}
		notes, err := cdi.Notes(plan, o)
		if err != nil {
			return err
		}
		for _, note := range notes {
			a.log.Warn(note)
		}
		for _, c := range changes {
			a.out.Println(changeWords(c))
		}
		if len(changes) == 0 {
			a.out.Println("Plan and specifications are up to date.")
		}
		return nil
	}
	return cmd
}

// classes returns the kinds of device without the vendor.
func classes() (all []string) {
	for _, kind := range cdi.Kinds {
		all = append(all, strings.TrimPrefix(kind, cdi.Vendor+"/"))
	}
	return all
}

// Default paths of the hook. Packages install the hook outside PATH.
const (
	packagedHook = "/usr/libexec/peerlane/peerlane-hook"
	defaultHook  = "beside this command, in ../libexec/peerlane from there, or " + packagedHook
)

// hookPath returns the path of the hook for specifications: --hook, a hook beside this command, or
// the path of the packages. With an error, path is the path that hookPath tried.
func hookPath(named string) (string, error) {
	if named != "" {
		return checkHook(named)
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find peerlane-hook beside this command: %w; name its path with --hook", err)
	}
	dir := filepath.Dir(self)
	return firstHook(filepath.Join(dir, "peerlane-hook"), filepath.Join(dir, "../libexec/peerlane/peerlane-hook"),
		packagedHook)
}

// binaries returns the directory of peerlane, peerlane-hook and peerlane-relay: this command's
// directory, or that of the packages.
func binaries() (string, error) {
	hook, err := hookPath("")
	return filepath.Dir(hook), err
}

// Causes of a missing hook.
var (
	errNoHook   = errors.New("it does not exist, so containers with a lane could not start")
	errHookMode = errors.New("it is not an executable file")
)

func hookError(path string, cause error) error {
	return &fault.Error{Operation: "find the hook", Object: path, Cause: cause, Remedy: "name the hook with --hook"}
}

// firstHook returns the first path that exists, or the last path if none exists.
func firstHook(paths ...string) (path string, err error) {
	for _, path = range paths {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return checkHook(path)
		}
	}
	return path, hookError(strings.Join(paths, " or "), errNoHook)
}

func checkHook(path string) (string, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return path, hookError(path, errNoHook)
	case err != nil:
		return path, fmt.Errorf("examine the hook: %w", err)
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return path, hookError(path, errHookMode)
	}
	return path, nil
}

// printSpecs prints the specification of a class, or every specification if class is empty.
func (a *app) printSpecs(list []*specs.Spec, class string, format cdi.Format) error {
	if class == "" {
		return format.Encode(a.out.Document(), list...)
	}
	for _, spec := range list {
		if spec.Kind == cdi.Vendor+"/"+class {
			return format.Encode(a.out.Document(), spec)
		}
	}
	return fmt.Errorf("this host offers no device of %s/%s", cdi.Vendor, class)
}

// printDiffs prints the changes.
func (a *app) printDiffs(changes []cdi.Change) {
	for _, c := range changes {
		if diff := c.Diff(); diff != "" {
			a.out.PrintLines(diff)
		} else {
			a.out.Printf("# %s is unchanged; its mode or owner would change\n", c.Path)
		}
	}
}

// changeWords returns the verb for a change of a file.
func changeWords(c cdi.Change) string {
	switch {
	case c.Removed:
		return "removed " + c.Path
	case c.Kind == "":
		return "wrote " + c.Path
	}
	return fmt.Sprintf("wrote %s: %d devices", c.Path, c.Devices)
}

// asRoot adds the remedy to a permission error.
func asRoot(err error) error {
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
		return &fault.Error{Code: fault.NotRoot, Operation: "run without root", Cause: err,
			Remedy: "run it as root, or use files of your own (--root, --spec-dir)"}
	}
	return err
}
