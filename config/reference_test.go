package config

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
)

var update = flag.Bool("update", false, "write docs/configuration.md anew")

const reference = "../docs/configuration.md"

const introduction = `# Configuration

/etc/peerlane/config.toml and every key in it are optional. ` + "`peerlane`" + ` and the hook read it; only
root may be able to write it. An unknown key is an error that names the nearest one.
` + "`peerlane`" + ` stops at an error. The hook uses the last good copy,
/var/lib/peerlane/config.good.toml, and reports that in the journal; without a copy no container
with a lane starts. ` + "`peerlane plan`" + ` shows the effect of keys about devices, and
` + "`peerlane cdi refresh`" + ` applies them.

Sizes are texts such as "32MiB"; GPUs are an index, a UUID or a PCI address, as texts; path types are
those of [topology.md](topology.md). ` + "`go test ./config -update`" + ` writes this page.

`

// The comments of the fields are the reference, so docs/configuration.md must equal them.
func TestConfigurationReferenceIsCurrent(t *testing.T) {
	comments := fieldComments(t, "config.go", "../topo/planner/plan.go")
	var text bytes.Buffer
	text.WriteString(introduction)
	section := ""
	for _, k := range keys() {
		table, name := "", strings.Trim(k.name, "[]")
		name = strings.TrimSuffix(name, ".NAME")
		if i := strings.LastIndex(name, "."); i >= 0 {
			table = name[:i]
		}
		heading := table
		if strings.HasPrefix(k.name, "[[") {
			heading = strings.Trim(k.name, "[]")
		}
		if heading == "" {
			heading = name
		}
		if heading != section {
			fmt.Fprintf(&text, "## %s\n\n", heading)
			section = heading
		}
		comment := comments[k.owner.String()+"."+k.field.Name]
		if comment == "" {
			t.Fatalf("%s has no comment", k.name)
		}
		switch {
		case strings.HasPrefix(k.name, "[["):
			fmt.Fprintf(&text, "`[[%s]]`, any number of them: %s\n\n", name, uncapital(comment))
		case strings.HasSuffix(k.name, ".NAME"):
			fmt.Fprintf(&text, "`[%s]`, a table of %s: %s\n\n", name, typeName(k.field.Type.Elem()), uncapital(comment))
		default:
			fmt.Fprintf(&text, "`%s`, %s%s: %s\n\n", name, typeName(k.field.Type), standing(k.value), uncapital(comment))
		}
	}
	got := strings.TrimSuffix(text.String(), "\n")
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
		t.Errorf("%s (-there +by the code; go test -update accepts it):\n%s", reference, diff)
	}
}

// uncapital makes a comment the end of a sentence, and keeps names in capitals.
func uncapital(s string) string {
	if len(s) > 1 && unicode.IsUpper(rune(s[1])) { // GPUs, PCIe
		return s
	}
	return strings.ToLower(s[:1]) + s[1:]
}

func typeName(t reflect.Type) string {
	switch {
	case t.Kind() == reflect.Pointer:
		return typeName(t.Elem())
	case t == reflect.TypeFor[Size]():
		return "size"
	case t == reflect.TypeFor[topo.PathType]():
		return "path type"
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Slice:
		return "list of pairs"
	case t.Kind() == reflect.Slice:
		return "list of texts"
	case t.Kind() == reflect.Int:
		return "number"
	case t.Kind() == reflect.Bool:
		return "true or false"
	}
	return "text"
}

// standing describes the default, if the type has a printable default.
func standing(v reflect.Value) string {
	if v.IsZero() || v.Kind() == reflect.Slice {
		return ""
	}
	switch x := v.Interface().(type) {
	case Size:
		text, err := x.MarshalText()
		if err != nil {
			return ""
		}
		return fmt.Sprintf(", %q by default", text)
	case int:
		return fmt.Sprintf(", %d by default", x)
	default:
		return fmt.Sprintf(", \"%v\" by default", x)
	}
}

// fieldComments maps the fields of structs in these files, "config.Relay.Slots", to their
// comments.
func fieldComments(t *testing.T, files ...string) map[string]string {
	t.Helper()
	comments := map[string]string{}
	for _, name := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					for _, field := range f.Names {
						comments[parsed.Name.Name+"."+spec.Name.Name+"."+field.Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
					}
				}
			}
			return true
		})
	}
	return comments
}

func TestDistanceCountsEdits(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "", 3}, {"", "ab", 2}, {"slots", "slots", 0}, {"slotsize", "slot_size", 1},
		{"kitten", "sitting", 3}, {"ab", "bab", 1}, {"xab", "ab", 1}, {"abcd", "dabc", 2}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("distance(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestNearestKeepsFirstOfEqualWords(t *testing.T) {
	for _, c := range []struct {
		word, want string
		letters    int
		known      []string
	}{
		{"slot", "slots", 1, []string{"chunk", "slots", "depth"}},
		{"slots", "slots", 0, []string{"slots", "depth"}},
		{"ab", "ac", 1, []string{"ac", "ad"}},
		{"ab", "", 0, nil},
	} {
		if got, letters := Nearest(c.word, c.known); got != c.want || letters != c.letters {
			t.Errorf("%s of %q: %q, %d; want %q, %d", c.word, c.known, got, letters, c.want, c.letters)
		}
	}
}

func TestBounceIsAtMostQuarterOfMemory(t *testing.T) {
	for _, c := range []struct {
		bounce        string
		limit, memory Size
		want          uint64
	}{
		{BounceAllow, 100, 400, 100}, {BounceAllow, 101, 400, 100}, {BounceAllow, 99, 400, 99}, {BounceNever, 100, 400, 0},
	} {
		config := Default()
		config.Staging.Bounce, config.Staging.BounceLimit, config.Relay.Memory = c.bounce, c.limit, c.memory
		if got := config.Bounce(); got != c.want {
			t.Errorf("%+v: %d bytes", c, got)
		}
	}
}

func TestMarshalSizeUsesLargestExactUnit(t *testing.T) {
	for size, want := range map[Size]string{
		0: "0", 1: "1", 1023: "1023", 1024: "1KiB", 1025: "1025", 1 << 20: "1MiB", 1<<20 + 1024: "1025KiB",
		1 << 30: "1024MiB",
	} {
		if text, err := size.MarshalText(); err != nil || string(text) != want {
			t.Errorf("%d: %q, %v; want %q", uint64(size), text, err, want)
		}
	}
}
