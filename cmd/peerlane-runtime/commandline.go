package main

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
)

// commandLine is the part of a runtime's command line that this program uses.
type commandLine struct {
	own
	// forward are the arguments for the runtime: all except this program's own.
	forward []string
	// command is the runtime's command; empty if missing.
	command string
	// bundle and config are the values of the command's last --bundle and (crun) --config; empty
	// if missing.
	bundle, config string
	// log and logFormat are the path and the format of the log in which an engine reads errors.
	log, logFormat string
}

// own are this program's options.
type own struct {
	devices  []string
	specDirs []string
	root     string
	help     bool
	version  bool
}

// ownPrefix begins this program's options, which the runtime does not get.
const ownPrefix = "--peerlane-"

// Options with a value, which is the next argument without "=". The lists contain the options of
// runc and crun; word handles the options of other runtimes.
var (
	globalValues = []string{"log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager"}
	createValues = []string{"bundle", "b", "config", "f", "console-socket", "pidfd-socket", "pid-file", "preserve-fds"}
	globalFlags  = []string{"debug", "systemd-cgroup", "help", "h", "?", "usage", "version", "v", "V"}
)

// commands are words that cannot be the value of an unknown global option.
var commands = []string{
	"checkpoint", "create", "delete", "events", "exec", "features", "init", "kill", "list", "mounts", "pause", "ps",
	"restore", "resume", "run", "spec", "start", "state", "update",
}

// parse reads a command line as runc does (one or two dashes, with or without "=") and as crun
// does (-bDIR), and leaves mistakes to the runtime. An error is about this program's own
// options; log and logFormat are valid even with an error.
func parse(args []string) (c commandLine, err error) {
	for len(args) > 0 && c.command == "" {
		arg := args[0]
		if strings.HasPrefix(arg, ownPrefix) {
			err = errors.Join(err, c.own.set(arg))
			args = args[1:]
			continue
		}
		name, value, n := word(args, globalValues)
		switch name {
		case "":
			c.command = arg
		case "log":
			c.log = value
		case "log-format":
			c.logFormat = value
		}
		if name != "" && n == 1 && !strings.Contains(arg, "=") && takesNext(name, args) {
			n = 2
		}
		c.forward = append(c.forward, args[:n]...)
		args = args[n:]
	}
	c.forward = append(c.forward, args...)
	if c.command != "create" && c.command != "run" {
		return c, err
	}
	for len(args) > 0 && args[0] != "--" {
		name, value, n := word(args, createValues)
		switch {
		case name == "bundle" || name == "b":
			c.bundle = value
		case name == "config" || name == "f":
			c.config = value
		case strings.HasPrefix(name, "b") && name != "bundle" && !strings.HasPrefix(args[0], "--"):
			c.bundle = args[0][2:]
		case strings.HasPrefix(name, "f") && !strings.HasPrefix(args[0], "--"):
			c.config = args[0][2:]
		}
		args = args[n:]
	}
	return c, err
}

// word takes an option, or an argument (with an empty name), from the front of args. n is the
// number of consumed arguments.
func word(args []string, withValue []string) (name, value string, n int) {
	arg := args[0]
	if len(arg) < 2 || arg[0] != '-' || arg == "--" {
		return "", "", 1
	}
	name = strings.TrimPrefix(arg[1:], "-")
	if name, value, found := strings.Cut(name, "="); found {
		return name, value, 1
	}
	if slices.Contains(withValue, name) && len(args) > 1 {
		return name, args[1], 2
	}
	return name, "", 1
}

// takesNext guesses whether a global option that runc and crun lack takes the next argument, as
// options of other runtimes may.
func takesNext(name string, args []string) bool {
	if slices.Contains(globalFlags, name) || len(args) < 2 {
		return false
	}
	next := args[1]
	return !strings.HasPrefix(next, "-") && !slices.Contains(commands, next) &&
		slices.ContainsFunc(args[2:], func(a string) bool {
			return slices.Contains(commands, a)
		})
}

// Causes of an invalid option.
var (
	errNoValue       = errors.New("requires a value: " + ownPrefix + "NAME=VALUE")
	errUnknownOption = errors.New("unknown option; the options after " + ownPrefix +
		" are device, spec-dir, root, version and help")
	errRelative = errors.New("must be an absolute path, because engines run this program in many directories")
)

// optionError is the error of an option of this program.
type optionError struct {
	option string
	cause  error
}

func (e *optionError) Error() string { return e.option + ": " + e.cause.Error() }

func (e *optionError) Unwrap() error { return e.cause }

func (o *own) set(arg string) error {
	name, value, hasValue := strings.Cut(strings.TrimPrefix(arg, ownPrefix), "=")
	switch name {
	case "help", "version":
		o.help, o.version = o.help || name == "help", o.version || name == "version"
		return nil
	case "device", "spec-dir", "root":
		if !hasValue || value == "" {
			return &optionError{arg, errNoValue}
		}
	default:
		return &optionError{arg, errUnknownOption}
	}
	if name != "device" && !filepath.IsAbs(value) {
		return &optionError{arg, errRelative}
	}
	switch name {
	case "device":
		o.devices = append(o.devices, strings.Split(value, ",")...)
	case "spec-dir":
		o.specDirs = append(o.specDirs, value)
	case "root":
		o.root = value
	}
	return nil
}

// configFile returns the path of the bundle's config.json, found as the runtime finds it.
func (c commandLine) configFile() (string, error) {
	switch {
	case c.config != "" && c.config != "config.json":
		return filepath.Abs(c.config) // crun reads this file in place of the bundle's
	case c.bundle == "":
		return filepath.Abs("config.json")
	}
	return filepath.Abs(filepath.Join(c.bundle, "config.json"))
}

var errUsage = errors.New(ownPrefix + "help shows the command line")
