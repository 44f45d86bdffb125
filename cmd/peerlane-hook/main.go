// Command peerlane-hook is the OCI hook of Peerlane: CDI specifications tell container runtimes to
// run it. Its command line is a public interface, which engines keep in their containers for
// months.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/journal"
	"github.com/peerlane/peerlane/hook/supervisor"
)

const usage = `peerlane-hook starts the relays of containers. Container runtimes run it as an OCI
hook of the CDI specifications (peerlane cdi generate).

  peerlane-hook create [--root DIR] [--lane UUID@ADDRESS ...] [--auto]
                       [--gpu UUID@ADDRESS ...] [--nic NAME ...]
      as createRuntime or prestart hook: start the container's relay for the lanes
      of these GPUs, and mount the relay's socket at /run/peerlane. --auto selects
      the GPUs in linux.devices of the container's config.json. --gpu and --nic
      declare that the container also gets the device nodes of the GPU or the NIC,
      and let the container lock memory
  peerlane-hook create-annotated [--root DIR]
      the same for the lanes of the annotation peerlane.dev/lanes, if
      [hook] annotations = true permits the annotation
  peerlane-hook remove [--root DIR]
      as poststop hook: remove the files and processes of ended containers
  peerlane-hook supervise --root DIR --generation ID
      supervise a relay; only peerlane-hook runs this command
  peerlane-hook accept
      as peerlane-relay@.service: supervise the relay that a hook passes on
      standard input; only systemd runs this command
  peerlane-hook confine [--uid N] [--group N ...] [--read PATH ...]
                        [--write PATH ...] [--device PATH ...] [--open N]
                        [--tasks N] [--tcp FIRST-LAST] [--host-network]
                        [--processes] [--show] -- PROGRAM ARGUMENTS
      execute a program in the sandbox of relays, with access to the named paths
      and devices, to the GPU driver, and to nothing else of the host. --processes
      permits new processes, which relays cannot start. --show prints the rules
  peerlane-hook version

DIR replaces / for var/lib/peerlane, run/peerlane and etc/peerlane. UUID@ADDRESS is
a GPU's UUID, which may be empty, and its PCI address.
Exit status: 0 success, 1 failed, 2 wrong command line.
`

// errUsage is the cause of an invalid command line.
var errUsage = errors.New("peerlane-hook help shows the command line")

func main() {
	// Runtimes show the output of a failed hook, often as one line.
	config.SetLogFormat(config.LogText)
	err := version.Sentence(func() error { return run(os.Args[1:]) })
	if err == nil {
		return
	}
	terminal.PrintError(os.Stderr, "peerlane-hook", err)
	if errors.Is(err, errUsage) {
		os.Exit(2)
	}
	os.Exit(1)
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("missing command; %w", errUsage)
	}
	command, args := args[0], args[1:]
	switch command {
	case "create":
		return create(args)
	case "create-annotated":
		return createAnnotated(args)
	case "remove":
		return remove(args)
	case "supervise":
		return supervise(args)
	case "accept":
		return accept(args)
	case "confine":
		return confine(args)
	case "version", "--version":
		_, err := fmt.Println("peerlane-hook", version.Get())
		return err
	case "help", "--help", "-h":
		_, err := fmt.Print(usage)
		return err
	}
	return fmt.Errorf("unknown command %q; %w", command, errUsage)
}

// list is the value of an option that may be repeated.
type list []string

func (l *list) String() string { return strings.Join(*l, " ") }
func (l *list) Set(s string) error {
	*l = append(*l, s)
	return nil
}

// parse parses the flags of a command without other arguments. Every command has --root, with the
// default /.
func parse(flags *flag.FlagSet, args []string) (paths.Layout, error) {
	root := flags.String("root", "/", "")
	flags.SetOutput(io.Discard) // err contains the text
	if err := flags.Parse(args); err != nil {
		return paths.Layout{}, fmt.Errorf("%s: %w; %w", flags.Name(), err, errUsage)
	}
	if flags.NArg() > 0 {
		return paths.Layout{}, fmt.Errorf("%s: unexpected argument %q; %w", flags.Name(), flags.Arg(0), errUsage)
	}
	if !filepath.IsAbs(*root) {
		return paths.Layout{}, fmt.Errorf("%s: --root %q is not an absolute path; %w", flags.Name(), *root, errUsage)
	}
	return paths.New(*root), nil
}

func create(args []string) error {
	flags := flag.NewFlagSet("create", flag.ContinueOnError)
	var lanes, gpus, nics list
	flags.Var(&lanes, "lane", "")
	auto := flags.Bool("auto", false, "")
	flags.Var(&gpus, "gpu", "")
	flags.Var(&nics, "nic", "")
	l, err := parse(flags, args)
	if err != nil {
		return logError(l, "", err)
	}
	if len(lanes)+len(gpus)+len(nics) == 0 && !*auto {
		return logError(l, "", fmt.Errorf("create: --lane, --auto, --gpu or --nic is required; %w", errUsage))
	}
	ahead := hook.ReadAhead(l)
	state, err := hook.ReadState(os.Stdin)
	if err != nil {
		return logError(l, "", err)
	}
	warning, err := hook.Create(ahead, state, runtimeRoot(),
		hook.Devices{Lanes: lanes, Auto: *auto, GPUs: gpus, NICs: nics})
	if warning != nil {
		logrus.Warn(warning)
		logToHost(l, journal.SeverityWarning, state.ID, warning)
	}
	return logError(l, state.ID, err)
}

// logError writes an error to the host's log, because a runtime may not show the output of a failed
// hook, and returns the error.
func logError(l paths.Layout, container string, err error) error {
	if err != nil {
		logToHost(l, journal.SeverityError, container, err)
	}
	return err
}

// logToHost writes a message to the host's log.
func logToHost(l paths.Layout, severity int, container string, message error) {
	if l.Root == "" { // the command line is invalid
		l = paths.New("/")
	}
	if err := journal.Write(l, severity, container, "", message.Error()); err != nil {
		logrus.WithError(err).Warn("the host's log did not accept the error")
	}
}

func remove(args []string) error {
	l, err := parse(flag.NewFlagSet("remove", flag.ContinueOnError), args)
	if err != nil {
		return err
	}
	// The state names the ended container, but the report may be late, and a running container
	// may have the name by now. Collect finds ended containers without the name. Read the state
	// nevertheless: some runtimes fail if the hook does not read it.
	_, read := io.Copy(io.Discard, os.Stdin)
	_, err = collector.Collect(l)
	return logError(l, "", errors.Join(err, read))
}

func supervise(args []string) error {
	flags := flag.NewFlagSet("supervise", flag.ContinueOnError)
	generation := flags.String("generation", "", "")
	l, err := parse(flags, args)
	if err != nil {
		return err
	}
	return logError(l, "", supervisor.Supervise(l, *generation))
}

// runtimeRoot returns the --root of the runtime that called the hook: the directory of the
// runtime's containers, which distinguishes containers with the same id. The result is empty for
// the runtime's default, or if /proc is unreadable.
func runtimeRoot() string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", os.Getppid()))
	if err != nil {
		return ""
	}
	return rootArgument(text)
}

// rootArgument returns the value of --root in the content of a /proc/PID/cmdline.
func rootArgument(cmdline []byte) string {
	args := strings.Split(string(bytes.TrimRight(cmdline, "\x00")), "\x00")
	for i, arg := range args {
		option, ok := strings.CutPrefix(arg, "-")
		option = strings.TrimPrefix(option, "-")
		if value, given := strings.CutPrefix(option, "root="); ok && given {
			return value
		}
		if ok && option == "root" && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}
