//go:build !front

package main

import (
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/terminal/table"
)

func newCDIListCommand(a *app) *cobra.Command {
	var generated bool
	cmd := &cobra.Command{
		Use:   "list [DEVICE...]",
		Short: "List devices and their edits to a container",
		Long: `Show the devices of the installed specifications and the edits of each to a
container: device nodes, mounts, environment and hooks. With --generated, show the
devices that peerlane cdi generate would write.

A DEVICE is a name as for engines, lane=3 or peerlane.dev/lane=3; it is shown in
detail. Names with the same edits are one device.`,
		Example: `  peerlane cdi list
  peerlane cdi list lane=3 gpu=all
  peerlane cdi list --generated
  peerlane cdi list -o json | jq '.[].name'`,
	}
	host, f, form := addLiveHost(cmd), &specFlags{cmd: cmd}, addForm(cmd)
	host.addSoftware()
	addSpecDirs(cmd, f,
		"read the specifications in `DIR`; may be given more than once (default: /etc/cdi and /var/run/cdi)")
	addContents(cmd, f, defaultHook)
	cmd.Flags().BoolVar(&generated, "generated", false, "list the devices that peerlane cdi generate would write")
	devices := func() ([]cdi.Device, error) {
		if !generated {
			files, err := cdi.Load(a.specDirs(f))
			for _, file := range files {
				if file.Err != nil {
					a.log.Warnf("engines ignore %s: %v", file.Path, file.Err)
				}
			}
			return cdi.Devices(files), asRoot(err)
		}
		p, err := a.plan(host)
		if err != nil {
			return nil, err
		}
		hook, err := hookPath(f.hook)
		if err != nil {
			return nil, err
		}
		a.warnOfPairs(p, hook)
		list, err := cdi.Generate(p.plan, a.specOptions(p, host, hook, f.devRoot))
		return cdi.Devices(cdi.GeneratedFiles(list)), err
	}
	cmd.ValidArgsFunction = func(_ *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		if err := a.start(cmd); err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		a.log.SetOutput(io.Discard) // a shell reads the output
		all, err := devices()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var names []string
		for _, d := range all {
			names = append(names, strings.TrimPrefix(d.Name, cdi.Vendor+"/"))
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		if generated && len(f.dirs) > 0 {
			return usageError{cmd.CommandPath(),
				fmt.Errorf("--generated reads this host and --spec-dir reads files: give one or the other")}
		}
		all, err := devices()
		if err != nil {
			return err
		}
		shown := all
		if len(args) > 0 {
			shown = nil
		}
		for _, name := range args {
			found, err := cdi.Find(all, name)
			if err != nil {
				return err
			}
			shown = append(shown, found...)
		}
		switch {
		case form.value == formJSON:
			return a.printJSON(append([]cdi.Device{}, shown...))
		case len(args) > 0:
			a.printDevices(shown)
		case len(shown) == 0:
			a.out.Printf("No device is installed in %s.\n", strings.Join(a.specDirs(f), " or "))
		default:
			a.out.Println(a.deviceTable(shown).Render())
		}
		return nil
	}
	return cmd
}

// deviceTable returns a table with a row for each device and a summary of the edits.
func (a *app) deviceTable(devices []cdi.Device) *table.Writer {
	heading := []any{"DEVICE", "ALSO", "NODES", "MOUNTS", "ENVIRONMENT", "HOOKS"}
	withIgnored := slices.ContainsFunc(devices, func(d cdi.Device) bool { return d.Ignored != "" })
	if withIgnored {
		heading = append(heading, "IGNORED")
	}
	t := a.newTable(heading...)
	for _, d := range devices {
		var nodes, mounts, variables, hooks []string
		for _, n := range d.Nodes {
			nodes = append(nodes, strings.TrimPrefix(n.Path, "/dev/"))
		}
		for _, m := range d.Mounts {
			mounts = append(mounts, m.ContainerPath)
		}
		for _, e := range d.Environment {
			name, _, _ := strings.Cut(e, "=")
			variables = append(variables, name)
		}
		for _, h := range d.Hooks {
			hooks = append(hooks, h.Stage+": "+h.Brief)
		}
		row := table.Row{
			d.Name, dashLines(d.Aliases), dashLines(inLines(nodes)), dashLines(inLines(mounts)), dashLines(
				variables), dashLines(hooks),
		}
		if withIgnored {
			row = append(row, dash(d.Ignored))
		}
		t.AppendRow(row)
	}
	return t
}

// inLines joins words with commas, and breaks the text into lines of a column's width.
func inLines(words []string) (lines []string) {
	const width = 34
	for i, w := range words {
		if i < len(words)-1 {
			w += ","
		}
		if last := len(lines) - 1; last >= 0 && len(lines[last])+1+len(w) <= width {
			lines[last] += " " + w
		} else {
			lines = append(lines, w)
		}
	}
	return lines
}

// dashLines returns the lines as a cell, or a dash without lines.
func dashLines(lines []string) table.Lines {
	if len(lines) == 0 {
		return table.Lines{"-"}
	}
	return lines
}

// printDevices prints every edit of each device.
func (a *app) printDevices(devices []cdi.Device) {
	for i, d := range devices {
		if i > 0 {
			a.out.Println()
		}
		a.out.Println(a.paint(d.Name, bold, cyan))
		t := a.newTable()
		add := func(what string, lines []string, attributes ...int) {
			for _, line := range lines {
				t.AppendRow(table.Row{"  " + what, a.paint(line, attributes...)})
				what = ""
			}
		}
		add("also", d.Aliases)
		if d.File != "" {
			add("of", []string{d.File})
		}
		if d.Ignored != "" {
			add("ignored", []string{d.Ignored}, red)
		}
		var nodes, mounts, hooks, other []string
		for _, n := range d.Nodes {
			line := n.Path
			if n.HostPath != "" && n.HostPath != n.Path {
				line += ", the host's " + n.HostPath
			}
			if n.Permissions != "" {
				line += " (" + n.Permissions + ")"
			}
			nodes = append(nodes, line)
		}
		for _, m := range d.Mounts {
			mounts = append(mounts, fmt.Sprintf("%s, the host's %s (%s)", m.ContainerPath, m.HostPath,
				strings.Join(m.Options, ",")))
		}
		for _, h := range d.Hooks {
			hooks = append(hooks, fmt.Sprintf("at %s %s %s", h.Stage, path.Base(h.Path), h.Does))
		}
		for _, n := range d.NetDevices {
			other = append(other, fmt.Sprintf("network interface %s, the host's %s", n.Name, n.HostInterfaceName))
		}
		for _, g := range d.Groups {
			other = append(other, fmt.Sprintf("group %d", g))
		}
		if d.IntelRdt != nil {
			other = append(other, "a class of cache and memory bandwidth (intelRdt)")
		}
		add("nodes", nodes)
		add("mounts", mounts)
		add("environment", d.Environment)
		add("hooks", hooks)
		add("other", other)
		a.out.Println(t.Render())
	}
}
