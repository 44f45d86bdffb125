// Command peerlane is the administrator's program of Peerlane: it shows the topology of a host's
// GPUs and RDMA NICs, plans each GPU's lane, installs CDI specifications that offer lanes to
// container engines, and monitors and controls running relays.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
)

// Exit statuses, which the help documents.
const (
	exitFailure = 1
	exitUsage   = 2
	exitDrift   = 3 // drift (peerlane cdi validate)
	exitPairs   = 4 // unfit or untested pairs (peerlane self-test)

	// Worst finding of peerlane doctor.
	exitDoctorUnknown = 5
	exitDoctorWarning = 6
	exitDoctorFailure = 7
)

func main() {
	if os.Getenv("GOTRACEBACK") == "" {
		// A panic on another goroutine, which run cannot recover, prints its value without a stack.
		debug.SetTraceback("none")
	}
	if err := delegate(os.Args[1:]); err != nil {
		terminal.New(os.Stderr).Printf("peerlane: %s\n", err)
		os.Exit(exitFailure)
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run executes the command line args and returns the exit status.
func run(args []string, out, errOut io.Writer) int {
	return runCommand(newRootCommand, args, out, errOut)
}

func runCommand(newRoot func(*app) *cobra.Command, args []string, out, errOut io.Writer) int {
	a := &app{out: terminal.New(out), errOut: terminal.New(errOut), log: logrus.New()}
	err := version.Sentence(func() error {
		root := newRoot(a)
		root.SetArgs(args)
		return root.Execute()
	})
	if printed := a.out.Err(); err == nil && printed != nil {
		err = fmt.Errorf("print to standard output: %w", printed)
	}
	if err == nil {
		return 0
	}
	a.errOut.Printf("peerlane: %s\n", err)
	var usage usageError
	if errors.As(err, &usage) {
		a.errOut.Printf("see %s --help\n", usage.command)
		return exitUsage
	}
	var finding findingError
	if errors.As(err, &finding) {
		return finding.code
	}
	return exitFailure
}

// app is the state that commands share: the paths of the host's files, the log and the output.
type app struct {
	out, errOut *terminal.Writer
	log         *logrus.Logger
	layout      paths.Layout

	root, logLevel, logFormat string
}

func newRootCommand(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "peerlane",
		Short: "A virtual PCIe switch: every GPU of a host beside an RDMA NIC",
		Long: `Peerlane gives every GPU of a host a lane to the network as fast as that of the GPUs
beside an RDMA NIC: a relay stages the traffic of a far GPU through GPUs that share a
PCIe switch with a NIC.

Exit status:
  0  success
  1  failed; standard error has operation, object, cause and remedy
  2  wrong command line
  3  peerlane cdi validate: installed specifications differ from this host
  4  peerlane self-test: a pair of GPUs is unfit for staging
  5  peerlane doctor: no problem found, but some results are unknown
  6  peerlane doctor: a warning
  7  peerlane doctor: a failure`,
		Example: `  peerlane topo                            show the paths between GPUs and NICs
  peerlane plan                            show each GPU's lane, with the reason
  peerlane cdi generate --spec-dir /etc/cdi
  docker run --device nvidia.com/gpu=3 --device peerlane.dev/lane=3 IMAGE`,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return a.start(cmd)
		},
	}
	root.SetOut(a.out.Document())
	root.SetErr(a.errOut.Document())
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{cmd.CommandPath(),
			nearFlag(cmd, err)}
	})
	setTemplates(root)

	flags := root.PersistentFlags()
	flags.StringVar(&a.root, "root", "/", "use var/lib/peerlane, run/peerlane and etc/peerlane below `DIR`")
	flags.StringVar(&a.logLevel, "log-level", "info", "minimum `LEVEL` of log messages: debug, info, warning, error")
	flags.StringVar(&a.logFormat, "log-format", "text", "log to standard error in `FORM`: text, json")
	must(root.MarkPersistentFlagDirname("root"))
	complete(root, "log-level", logLevels...)
	complete(root, "log-format", "text", "json")

	root.AddCommand(commands(a)...)
	group(root)
	root.SetHelpCommand(newHelpCommand(root))
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			group(cmd)
		}
	}
	arrange(root)
	return root
}

// arrange groups the commands of the help by purpose. Cobra lists the remaining commands below
// these groups.
func arrange(root *cobra.Command) {
	for _, part := range []struct {
		title string
		names []string
	}{
		{"Topology and diagnosis:", []string{"topo", "plan", "doctor", "explain"}},
		{"Configuration:", []string{"cdi", "runtime", "key"}},
		{"Monitoring and control:", []string{"relay", "exporter", "self-test"}},
		{"Demos and benchmarks:", []string{"demo", "bench"}},
	} {
		root.AddGroup(&cobra.Group{ID: part.title, Title: part.title})
		for _, cmd := range root.Commands() {
			if slices.Contains(part.names, cmd.Name()) {
				cmd.GroupID = part.title
			}
		}
	}
}

// logLevels are the values of --log-level.
var logLevels = []string{"debug", "info", "warning", "error"}

// start applies the global flags.
func (a *app) start(cmd *cobra.Command) error {
	level, err := logrus.ParseLevel(a.logLevel)
	if err != nil || !slices.Contains(logLevels, a.logLevel) {
		return usageError{cmd.CommandPath(), fmt.Errorf("--log-level %s: unknown level; use debug, info, warning or error",
			a.logLevel)}
	}
	switch a.logFormat {
	case "text":
		a.log.SetFormatter(formatter{&logrus.TextFormatter{DisableColors: !a.errOut.Colours(), DisableTimestamp: true}})
	case "json":
		a.log.SetFormatter(formatter{&logrus.JSONFormatter{}})
	default:
		return usageError{cmd.CommandPath(), fmt.Errorf("--log-format %s is neither text nor json", a.logFormat)}
	}
	a.log.SetLevel(level)
	a.log.SetOutput(a.errOut.Document())
	if !filepath.IsAbs(a.root) {
		return usageError{cmd.CommandPath(),
			fmt.Errorf("--root %s: not an absolute path; the hook and the relays run in other directories", a.root)}
	}
	a.layout = paths.New(a.root)
	return nil
}

// usageError is an error of the command line.
type usageError struct {
	command string
	err     error
}

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// findingError is the result of a command that succeeded and reports a finding to scripts through
// its exit status.
type findingError struct {
	code int
	error
}

// nearFlag adds the nearest flag to the error for an unknown flag.
func nearFlag(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || len(unknown.GetSpecifiedName()) < 2 {
		return err
	}
	var known []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			known = append(known, f.Name)
		}
	})
	name := unknown.GetSpecifiedName()
	near, letters := config.Nearest(name, known)
	if letters > 1+len(name)/4 {
		return err
	}
	return fmt.Errorf("%w; did you mean --%s?", err, near)
}

// group makes a command the parent of subcommands: without arguments it prints help, and an
// unknown subcommand is an error that names the nearest subcommands.
func group(cmd *cobra.Command) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		message := fmt.Sprintf("unknown command %q for %s", args[0], cmd.CommandPath())
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			message += "; did you mean " + strings.Join(near, " or ") + "?"
		}
		return usageError{cmd.CommandPath(), errors.New(message)}
	}
	cmd.SuggestionsMinimumDistance = 2
	return cmd
}

// newHelpCommand returns cobra's help command, except that an unknown command is a usage error.
func newHelpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Show the help of a command",
		Long:              "Show the help of a command, as COMMAND --help does.",
		Example:           "  peerlane help cdi generate",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			of, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return usageError{cmd.CommandPath(), fmt.Errorf("unknown command %q; list commands with peerlane --help",
					strings.Join(args, " "))}
			}
			of.InitDefaultHelpFlag()
			return of.Help()
		},
	}
}

// noArgs is cobra.NoArgs with a usage error.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return usageError{cmd.CommandPath(), fmt.Errorf("%s takes no arguments, got %q", cmd.CommandPath(), args[0])}
}

// complete lists a flag's values for shell completion.
func complete(cmd *cobra.Command, flag string, values ...string) {
	must(cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)))
}

func completeFiles(cmd *cobra.Command, flag string, extensions ...string) {
	must(cmd.MarkFlagFilename(flag, extensions...))
}

func completeDirectories(cmd *cobra.Command, flags ...string) {
	for _, flag := range flags {
		must(cmd.MarkFlagDirname(flag))
	}
}

// must panics on an error that only an undefined flag can cause.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
