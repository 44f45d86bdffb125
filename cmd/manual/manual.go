// Package manual generates man pages and a Markdown reference from cobra commands.
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

// Command describes a command. Hidden commands, hidden flags, and the commands that cobra adds
// (help, completion) are left out.
type Command struct {
	Path  string `json:"path"`  // "peerlane cdi generate"
	Usage string `json:"usage"` // "peerlane cdi generate [flags]"
	// Short is a single line. Long has paragraphs; indented lines are preformatted.
	Short   string `json:"short"`
	Long    string `json:"long"`
	Example string `json:"example,omitempty"`
	// Exit has a line for every exit status: two blanks, the status, two blanks, the meaning. A
	// meaning may continue in further lines with more indentation.
	Exit string `json:"exit,omitempty"`
	// Flags are the flags of this command, and Global the flags of the parent commands.
	Flags    []Flag    `json:"flags,omitempty"`
	Global   []Flag    `json:"global,omitempty"`
	Commands []Command `json:"commands,omitempty"`
}

// Flag is an option of a command.
type Flag struct {
	Name string `json:"name"`
	// Shorthand is a letter.
	Shorthand string `json:"shorthand,omitempty"`
	// Value is the name of the value; empty for a flag without a value.
	Value   string `json:"value,omitempty"`
	Usage   string `json:"usage"`
	Default string `json:"default,omitempty"`
}

// DefaultExit is the exit status of a command whose help has no section "Exit status:".
const DefaultExit = `  0  success
  1  failed; standard error has operation, object, cause and remedy
  2  wrong command line
`

const exitHeading = "Exit status:\n"

// Exit splits the long text of a command into the text and the last section, "Exit status:".
func Exit(long string) (text, exit string) {
	text, exit, found := strings.Cut(long, exitHeading)
	if !found {
		return long, DefaultExit
	}
	exit = strings.TrimRight(exit, "\n") + "\n"
	if !strings.Contains("\n"+exit, "\n  2  ") {
		exit += "  2  wrong command line\n"
	}
	return strings.TrimSpace(text), exit
}

// Describe describes a command and the subcommands.
func Describe(cmd *cobra.Command) Command {
	cmd.InitDefaultHelpFlag() // adds [flags] to the usage line
	long, exit := Exit(cmd.Long)
	c := Command{
		Path: cmd.CommandPath(), Usage: cmd.UseLine(),
		Short: cmd.Short, Long: cmp.Or(long, cmd.Short), Example: cmd.Example, Exit: exit,
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

// all returns a command and its subcommands, parents first.
func (c Command) all() []Command {
	all := []Command{c}
	for _, below := range c.Commands {
		all = append(all, below.all()...)
	}
	return all
}

// NewCommand returns a hidden command that writes the description of its parent as JSON, for Read:
// the program does not link the generator of man pages.
func NewCommand() *cobra.Command {
	return &cobra.Command{
		Use: "manual", Hidden: true, Short: "Describe all commands in JSON, for packaging/manpages", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return json.NewEncoder(cmd.OutOrStdout()).Encode(Describe(cmd.Root()))
		},
	}
}

// Read parses the output of the command of NewCommand.
func Read(r io.Reader) (c Command, err error) {
	err = json.NewDecoder(r).Decode(&c)
	return c, err
}
