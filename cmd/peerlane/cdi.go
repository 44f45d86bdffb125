package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/topo"
)

func newCDICommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cdi",
		Short: "Write the specifications that make lanes devices of container engines",
	}
	cmd.AddCommand(newGenerateCommand(a))
	return group(cmd)
}

func newGenerateCommand(a *app) *cobra.Command {
	var specDir, hook, devRoot, class string
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Plan this host, and generate its CDI specifications",
		Long: `Plan this host, and generate the CDI specifications of its lanes:

  peerlane.dev/lane=N  the relay and its socket; the GPU itself comes from
                       nvidia.com/gpu=N
  peerlane.dev/gpu=N   all of that, and the device nodes of the GPU, its server
                       GPUs and its NIC; not with tenancy = "multi"
  peerlane.dev/nic=M   the device nodes of a NIC; not with tenancy = "multi"

N is a GPU's index, UUID or PCI address, a group of the configuration, or "all",
and M a NIC's name or PCI address, or "all".

With --spec-dir the specifications are installed there, and the plan is written
to var/lib/peerlane/plan.json, where the hook reads it when a container starts.
Otherwise they are printed, and nothing on the host is changed.`,
		Example: `  peerlane cdi generate --spec-dir /etc/cdi
  peerlane cdi generate --class lane`,
		Args: noArgs,
	}
	host := addLiveHost(cmd)
	host.addSoftware()
	cmd.Flags().StringVar(&specDir, "spec-dir", "", "install the specifications in `DIR`; without it they are printed")
	cmd.Flags().StringVar(&class, "class", "", "print only the specification of `CLASS`: lane, gpu, nic")
	cmd.Flags().StringVar(&hook, "hook", "", "absolute `PATH` of peerlane-hook (default: beside this command)")
	cmd.Flags().StringVar(&devRoot, "dev-root", "/", "take device nodes from the dev/ in `DIR`")
	complete(cmd, "class", "lane", "gpu", "nic")
	completeFiles(cmd, "hook")
	completeDirectories(cmd, "spec-dir", "dev-root")
	cmd.RunE = func(*cobra.Command, []string) error {
		if class != "" && specDir != "" {
			return usageError{cmd.CommandPath(), errors.New("--class chooses what is printed; --spec-dir always installs all")}
		}
		p, err := a.plan(host)
		if err != nil {
			return err
		}
		path, err := hookPath(hook)
		if err != nil {
			return err
		}
		o := cdi.Options{Layout: a.layout, HookPath: path, Tenancy: p.config.CDI.Tenancy, DevRoot: devRoot}
		list, err := cdi.Generate(p.plan, o)
		if err != nil {
			return err
		}
		if specDir == "" {
			return a.printSpecs(list, class)
		}
		return a.install(p.plan, list, specDir, o)
	}
	return cmd
}

// hookPath is the hook that containers will be started with: the one that was
// named, or the one beside this command.
func hookPath(named string) (string, error) {
	path := named
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("looking for peerlane-hook beside this command: %w; name it with --hook", err)
		}
		path = filepath.Join(filepath.Dir(self), "peerlane-hook")
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("there is no hook %s, and a container with a lane could not start; name the hook with --hook", path)
	case err != nil:
		return "", fmt.Errorf("looking at the hook: %w", err)
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return "", fmt.Errorf("the hook %s is no executable file (%v); name the hook with --hook", path, info.Mode())
	}
	return path, nil
}

// printSpecs prints one specification, or all of them one after another.
func (a *app) printSpecs(list []*specs.Spec, class string) error {
	if class == "" {
		return cdi.Encode(a.out, list...)
	}
	for _, spec := range list {
		if spec.Kind == cdi.Vendor+"/"+class {
			return cdi.Encode(a.out, spec)
		}
	}
	return fmt.Errorf("this host offers no device of %s/%s", cdi.Vendor, class)
}

// install writes the plan before the specifications that lead a hook to it.
func (a *app) install(plan *topo.Plan, list []*specs.Spec, specDir string, o cdi.Options) error {
	if err := a.layout.Create(); err != nil {
		return asRoot(fmt.Errorf("making Peerlane's directories: %w", err))
	}
	if err := plan.Write(a.layout.PlanFile()); err != nil {
		return asRoot(err)
	}
	if err := cdi.Write(specDir, list); err != nil {
		return asRoot(err)
	}
	notes, err := cdi.Notes(plan, o)
	if err != nil {
		return err
	}
	for _, note := range notes {
		a.log.Warn(note)
	}
	fmt.Fprintf(a.out, "wrote %s\n", a.layout.PlanFile())
	for _, spec := range list {
		fmt.Fprintf(a.out, "wrote %s: %d devices\n", filepath.Join(specDir, cdi.FileName(spec.Kind)), len(spec.Devices))
	}
	return nil
}

// asRoot adds the remedy to an error of permission.
func asRoot(err error) error {
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
		return fmt.Errorf("%w; run it as root, or on files of your own (--root, --spec-dir)", err)
	}
	return err
}
