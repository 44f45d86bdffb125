// Package manual makes man pages and a reference of commands from the commands
// themselves.
package manual

import (
	"cmp"
	"encoding/json"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Command is all that is known of a command. Hidden ones, their hidden flags, and
// what cobra adds by itself (help, completion) are left out.
type Command struct {
	Path    string `json:"path"`  // "peerlane cdi generate"
	Usage   string `json:"usage"` // "peerlane cdi generate [flags]"
	Short   string `json:"short"` // one line
	Long    string `json:"long"`  // paragraphs; what is indented stands as it is
	Example string `json:"example,omitempty"`
	// Exit has a line for each exit status: two blanks, the status, two blanks, what
	// it means. A meaning may go on below, further in.
	Exit     string    `json:"exit,omitempty"`
	Flags    []Flag    `json:"flags,omitempty"`  // its own
	Global   []Flag    `json:"global,omitempty"` // those of the commands above it
	Commands []Command `json:"commands,omitempty"`
}

// Flag is an option of a command.
type Flag struct {
	Name      string `json:"name"`
	Shorthand string `json:"shorthand,omitempty"` // one letter
	Value     string `json:"value,omitempty"`     // what its value is called; empty for none
	Usage     string `json:"usage"`
	Default   string `json:"default,omitempty"`
}

// DefaultExit is the exit status of a command that says nothing of it.
const DefaultExit = `  0  done
  1  failed; one sentence on standard error says what, on what, and what to do
  2  the command line was wrong
`

const exitHeading = "Exit status:\n"

// Exit separates a command's long text from what it says of its exit status,
// which is at the end, below "Exit status:".
func Exit(long string) (text, exit string) {
	text, exit, found := strings.Cut(long, exitHeading)
	if !found {
		return long, DefaultExit
	}
	exit = strings.TrimRight(exit, "\n") + "\n"
	if !strings.Contains("\n"+exit, "\n  2  ") {
		exit += "  2  the command line was wrong\n"
	}
	return strings.TrimSpace(text), exit
}

// Describe describes a command and those below it.
func Describe(cmd *cobra.Command) Command {
	cmd.InitDefaultHelpFlag() // the line of usage says [flags] with it
	long, exit := Exit(cmd.Long)
	c := Command{
		Path: cmd.CommandPath(), Usage: cmd.UseLine(), Short: cmd.Short, Long: cmp.Or(long, cmd.Short), Example: cmd.Example, Exit: exit,
		Flags: flags(cmd.NonInheritedFlags()), Global: flags(cmd.InheritedFlags()),
	}
	for _, below := range cmd.Commands() {
		if below.IsAvailableCommand() && below.Name() != "completion" {
			c.Commands = append(c.Commands, Describe(below))
		}
	}
	return c
}

func flags(set *pflag.FlagSet) (list []Flag) {
	set.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		one := Flag{Name: f.Name, Shorthand: f.Shorthand, Value: value, Usage: usage}
		if !slices.Contains([]string{"", "false", "0", "[]", "0s"}, f.DefValue) {
			one.Default = f.DefValue
		}
		list = append(list, one)
	})
	return list
}

// All are a command and those below it, each before those below it.
func (c Command) All() []Command {
	all := []Command{c}
	for _, below := range c.Commands {
		all = append(all, below.All()...)
	}
	return all
}

// NewCommand is a hidden command that describes the one that it is added to, in
// JSON, for Read: what makes man pages is then no part of the program.
func NewCommand() *cobra.Command {
	return &cobra.Command{
		Use: "manual", Hidden: true, Short: "Describe all commands in JSON, for packaging/manpages", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return json.NewEncoder(cmd.OutOrStdout()).Encode(Describe(cmd.Root()))
		},
	}
}

// Read reads what the command of NewCommand wrote.
func Read(r io.Reader) (c Command, err error) {
	err = json.NewDecoder(r).Decode(&c)
	return c, err
}
