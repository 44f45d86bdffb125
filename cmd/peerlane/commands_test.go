package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/peerlane/peerlane/cmd/manual"
)

// allCommands returns every command that is not hidden.
func allCommands(t *testing.T) (all []*cobra.Command) {
	t.Helper()
	var add func(*cobra.Command)
	add = func(cmd *cobra.Command) {
		all = append(all, cmd)
		for _, below := range cmd.Commands() {
			if below.IsAvailableCommand() && below.Name() != "completion" {
				add(below)
			}
		}
	}
	add(newRootCommand(&app{log: logrus.New()}))
	if len(all) < 20 {
		t.Fatalf("%d commands, want at least 20", len(all))
	}
	return all
}

// prints maps the commands without a table, and so without -o json, to their output.
var prints = map[string]string{
	"peerlane cdi generate": "specifications, which are JSON",
	"peerlane exporter":     "metrics, in Prometheus' form",
	"peerlane topo capture": "a tar file",
}

// noValues matches flags whose values cannot be listed for completion.
var noValues = regexp.MustCompile(`^(root|sysfs|proc|dev-root|input|save|hook|timeout|interval|duration|pace|sizes|depths|bytes|seed|slots|slot-size|config|file|to|key|listen)$`)

func TestEveryCommandIsWhole(t *testing.T) {
	for _, cmd := range allCommands(t) {
		t.Run(cmd.CommandPath(), func(t *testing.T) {
			if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") || strings.Contains(cmd.Short, "\n") {
				t.Errorf("short help is %q", cmd.Short)
			}
			if text, _ := manual.Exit(cmd.Long); text == "" {
				t.Error("the help has no text")
			}
			for line := range strings.Lines(cmd.Long + "\n" + cmd.Example) {
				if len([]rune(strings.TrimSuffix(line, "\n"))) > 110 || strings.Contains(line, "\t") {
					t.Errorf("line too wide, or with a tab: %q", line)
				}
			}
			if cmd.Example == "" || !strings.Contains(cmd.Example, cmd.CommandPath()) {
				t.Errorf("examples are %q", cmd.Example)
			}
			for line := range strings.Lines(cmd.Example) {
				if !strings.HasPrefix(line, "  ") {
					t.Errorf("an example is not indented: %q", line)
				}
			}
			help := peerlane(t, append(strings.Fields(cmd.CommandPath())[1:], "--help")...)
			if n := strings.Count(help, "Exit status:\n  0  "); n != 1 || !strings.Contains(help, "\n  1  ") ||
				!strings.Contains(help, "\n  2  ") {
				t.Errorf("help states the exit status %d times:\n%s", n, help)
			}
			if cmd.HasSubCommands() && cmd.Name() != "topo" {
				return
			}
			if _, other := prints[cmd.CommandPath()]; cmd.Flags().Lookup("output") == nil && !other {
				t.Error("missing -o json")
			}
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				if f.Usage == "" {
					t.Errorf("--%s does what?", f.Name)
				}
				if f.Hidden || f.Name == "help" || f.Value.Type() == "bool" || noValues.MatchString(f.Name) {
					return
				}
				_, directories := f.Annotations[cobra.BashCompSubdirsInDir]
				_, files := f.Annotations[cobra.BashCompFilenameExt]
				if _, listed := cmd.GetFlagCompletionFunc(f.Name); !listed && !directories && !files {
					t.Errorf("the values of --%s (%s) are not completed", f.Name, f.Value.Type())
				}
			})
			if strings.Contains(cmd.Use, "NAME") || strings.Contains(cmd.Use, "DEVICE") {
				if cmd.ValidArgsFunction == nil {
					t.Errorf("the arguments of %q are not completed", cmd.Use)
				}
			}
		})
	}
}

// docs/cli.md equals the generated help of all commands.
func TestReferenceOfCommandsIsCurrent(t *testing.T) {
	const reference = "../../docs/cli.md"
	got := "# Commands\n\n" +
		"Usage and options of each command. `peerlane COMMAND --help` and the man pages have descriptions\n" +
		"and examples. `go test ./cmd/peerlane -run TestReferenceOfCommandsIsCurrent -update` writes this page.\n" +
		"All commands that print a table take `-o json`, too. Unless a command states another, its exit status is\n\n```\n" +
		manual.DefaultExit + "```\n\n" + manual.Describe(newRootCommand(&app{log: logrus.New()})).Markdown()
	if *update {
		if err := os.WriteFile(reference, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-file +generated; accept with go test -update):\n%s", reference, diff)
	}
}

func TestMisspeltFlagsGetSuggestion(t *testing.T) {
	for given, want := range map[string]string{
		"plan --explian 3":                "did you mean --explain?",
		"plan --ouput json":               "did you mean --output?",
		"plan --log-levle debug":          "did you mean --log-level?",
		"cdi generate --spec-dirs /x":     "did you mean --spec-dir?",
		"runtime remove --runtime dcoker": "did you mean docker?",
	} {
		var out, errOut bytes.Buffer
		if code := run(strings.Fields(given), &out, &errOut); code != exitUsage || !strings.Contains(errOut.String(), want) {
			t.Errorf("peerlane %s: exit status %d, %q, want %q", given, code, errOut.String(), want)
		}
	}
	var out, errOut bytes.Buffer
	if run([]string{"plan", "--nothing-like-it"}, &out, &errOut); strings.Contains(errOut.String(), "did you mean") {
		t.Errorf("a near flag is suggested: %q", errOut.String())
	}
}

// A panic prints one sentence and exits with a status, like an error.
func TestPanicPrintsOneSentence(t *testing.T) {
	t.Setenv("GOTRACEBACK", "")
	var out, errOut bytes.Buffer
	code := runCommand(func(*app) *cobra.Command {
		return &cobra.Command{Use: "peerlane", RunE: func(*cobra.Command, []string) error {
			var lane *struct{ gpu int }
			out.WriteByte(byte(lane.gpu))
			return nil
		}}
	}, nil, &out, &errOut)
	stderr := errOut.String()
	if code != exitFailure || strings.Count(stderr, "\n") != 1 ||
		!strings.Contains(stderr, "nil pointer dereference; please report it") || strings.Contains(stderr, "goroutine") {
		t.Errorf("exit status %d: %s", code, stderr)
	}
}
