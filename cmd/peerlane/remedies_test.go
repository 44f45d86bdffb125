package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/integration/documents"
	"github.com/peerlane/peerlane/topo/planner"
)

// messages is the key of the programs' messages in allDocuments.
const messages = "messages"

// allDocuments returns the README, docs/*.md and the messages of all programs by name.
func allDocuments(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d documents: %v", len(files), err)
	}
	all := map[string]string{}
	for _, file := range append(files, "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[filepath.Base(file)] = string(text)
	}
	printed, err := documents.Messages("../..")
	if err != nil || len(printed) < 1000 {
		t.Fatalf("%d messages: %v", len(printed), err)
	}
	for _, m := range printed {
		all[messages] += m.Text + "\n"
	}
	return all
}

var (
	codeBlock = regexp.MustCompile("(?ms)^ *```[a-z]*\n(.*?)^ *```")
	codeSpan  = regexp.MustCompile("``(.+?)``|`([^`]+)`")
	mentioned = regexp.MustCompile(`(?:^|[\s(;|&"]|/usr/bin/)peerlane((?: [^\s|;()&<>"]+)+)`)
	invoked   = regexp.MustCompile(`(?:^[\s$#]*|sudo (?:-\w )*|[;|&(] *|/usr/bin/)peerlane((?: [^\s|;()&<>"]+)+)`)
	plainWord = regexp.MustCompile(`^[a-z][a-z-]*$`)
	flagWord  = regexp.MustCompile(`^--?[a-z][a-z-]*(=.*)?$`)
)

// commandLines returns the invocations of peerlane in a document's code, or in messages.
func commandLines(name, text string) (lines []string) {
	var sources []string
	if name == messages {
		sources = strings.Split(strings.ReplaceAll(text, "`", " "), "\n")
	} else {
		for _, m := range codeBlock.FindAllStringSubmatch(text, -1) {
			joined := strings.ReplaceAll(m[1], "\\\n", " ")
			for line := range strings.Lines(joined) {
				line, _, _ = strings.Cut(line, " #")
				sources = append(sources, line)
			}
		}
		for _, m := range codeSpan.FindAllStringSubmatch(codeBlock.ReplaceAllString(text, ""), -1) {
			sources = append(sources, strings.ReplaceAll(m[1]+m[2], "\n", " "))
		}
	}
	form := invoked
	if name == messages {
		form = mentioned
	}
	for _, source := range sources {
		for _, m := range form.FindAllStringSubmatch(source, -1) {
			lines = append(lines, strings.TrimSpace(m[1]))
		}
	}
	return lines
}

// verbs are words after "peerlane" in messages that are not commands.
var verbs = []string{"reads", "and", "command", "writes", "needs"}

// faultOf returns the first word of a command line that is neither a command nor a flag. In prose,
// a word that is not a command ends the command line.
func faultOf(root *cobra.Command, line string, prose bool) string {
	cmd, words := root, strings.Fields(line)
	for i := 0; i < len(words); i++ {
		word := strings.TrimRight(words[i], ".,:'")
		switch {
		case strings.HasPrefix(word, "-") && flagWord.MatchString(word):
			name, _, valued := strings.Cut(strings.TrimLeft(word, "-"), "=")
			flag := cmd.Flags().Lookup(name)
			for _, set := range []*pflag.FlagSet{cmd.PersistentFlags(), cmd.InheritedFlags()} {
				if flag == nil {
					flag = set.Lookup(name)
				}
			}
			if flag == nil && len(name) == 1 {
				flag = cmd.Flags().ShorthandLookup(name)
			}
			switch {
			case name == "help" || name == "h" || cmd == root && name == "version":
			case flag == nil:
				return cmd.CommandPath() + " has no flag " + word
			case !valued && flag.NoOptDefVal == "":
				i++ // the flag's value
			}
		case cmd.HasAvailableSubCommands() && plainWord.MatchString(word):
			at := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool {
				return c.Name() == word ||
					slices.Contains(c.Aliases, word)
			})
			switch {
			case at >= 0:
				cmd = cmd.Commands()[at]
			case word == "help" || word == "completion":
				return ""
			case prose && (cmd != root && cmd.Runnable() || slices.Contains(verbs, word)):
				return ""
			default:
				return cmd.CommandPath() + " has no command " + word
			}
		case prose:
			return ""
		}
	}
	return ""
}

// Every invocation of peerlane in messages and documents has existing commands and flags. A remedy
// that promises installation installs: cdi generate without --spec-dir only prints.
func TestCommandsOfMessagesAndDocumentsExist(t *testing.T) {
	root := newRootCommand(&app{log: logrus.New()})
	root.InitDefaultHelpCmd()
	count := 0
	for name, text := range allDocuments(t) {
		for _, line := range commandLines(name, text) {
			count++
			if fault := faultOf(root, line, name == messages); fault != "" {
				t.Errorf("%s: peerlane %s: %s", name, line, fault)
			}
			remedies := name == messages || name == "troubleshooting.md" || name == "errors.md" || name == "doctor.md"
			if remedies && strings.Contains(line, "cdi generate") && !strings.Contains(line, "--spec-dir") {
				t.Errorf("%s: peerlane %s: prints specifications and installs nothing; the remedy is peerlane cdi refresh", name,
					line)
			}
		}
	}
	if count < 200 {
		t.Errorf("only %d invocations were found", count)
	}
	for line, want := range map[string]string{
		"cdi generat":                    "peerlane cdi has no command generat",
		"relay list --nosuch":            "peerlane relay list has no flag --nosuch",
		"--root /x relay list -o wide x": "",
	} {
		if got := faultOf(root, line, false); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

// extensions are the extensions of file names that look like keys: relay.log, network.md.
var extensions = []string{"log", "md", "sock", "json", "toml", "go", "py", "c", "h", "so", "service", "socket",
	"slice", "conf", "xml", "svg", "html", "key", "target"}

// keyFaults returns the words of a text that have the form of a configuration key but are none.
func keyFaults(text string) (faults []string) {
	keys := config.Keys()
	tables := map[string]bool{}
	for _, k := range keys {
		table, _, _ := strings.Cut(k, ".")
		tables[table] = true
	}
	for _, m := range regexp.MustCompile(
		`(^|[^a-zA-Z0-9_./-])([a-z]+(?:\.[a-z0-9_]+)+)($|[^a-zA-Z0-9_(/-])`).FindAllStringSubmatch(text, -1) {
		word := strings.TrimRight(m[2], ".0123456789") // relay.log.1 is a file
		table, rest, _ := strings.Cut(word, ".")
		known := slices.Contains(keys, word) || slices.ContainsFunc(keys,
			func(k string) bool { return strings.HasPrefix(k, word+".") || strings.HasPrefix(word, k+".") })
		if tables[table] && word != "cdi.k8s" && !known && !slices.Contains(extensions,
			rest[strings.LastIndex(rest, ".")+1:]) {
			faults = append(faults, word)
		}
	}
	return faults
}

// Every configuration key in messages and documents exists.
func TestKeysOfMessagesAndDocumentsExist(t *testing.T) {
	for name, text := range allDocuments(t) {
		text = strings.ReplaceAll(text, `\_`, "_") // escaped in tables
		for _, key := range keyFaults(text) {
			t.Errorf("%s: there is no key %s", name, key)
		}
	}
	if got := keyFaults("smaller `staging.slots`, relay.slots, relay.log and `relay.limits.rings`."); !slices.Equal(got,
		[]string{"staging.slots", "relay.limits.rings"}) {
		t.Errorf("faults: %q", got)
	}
}

// `peerlane cdi refresh` writes the plan of this host: it is the remedy for a plan that is
// missing, damaged, of another release or of another host.
func TestRefreshReplacesAWrongPlan(t *testing.T) {
	h := newCDIHost(t)
	h.run("refresh", "--hook", h.hook)
	want := planOf(t, h)
	file := h.planFile()
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"missing":            "",
		"torn":               string(good[:len(good)/2]),
		"of another release": strings.Replace(string(good), `"version"`, `"version": 1, "other"`, 1),
		"of a file":          strings.Replace(string(good), `"kind": "sysfs"`, `"kind": "ncclxml", "file": "x"`, 1),
		"with another GPU": strings.Replace(string(good), want.GPUs[0].UUID,
			"GPU-00000000-0000-0000-0000-000000000000", 1),
		"without tree of a host": strings.Replace(string(good), `"cpus"`, `"others"`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			if text == string(good) {
				t.Fatal("the plan is not changed")
			}
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			if text == "" {
				if err := os.Remove(file); err != nil {
					t.Fatal(err)
				}
			}
			h.run("refresh")
			p, err := planner.Read(file)
			if err != nil {
				t.Fatal(err)
			}
			now, err := os.ReadFile(file)
			if err != nil || string(now) != string(good) {
				t.Errorf("%v; %d lanes; the plan is not that of the host", err, len(p.Lanes))
			}
		})
	}
}
