package config

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const sizing = "../docs/sizing.md"

// sizingRow matches a row of a table in docs/sizing.md that begins with a key and its default.
var sizingRow = regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| ([^|]*) \\|")

// TestSizingGuideHasTheDefaults compares the defaults in docs/sizing.md with Default.
func TestSizingGuideHasTheDefaults(t *testing.T) {
	values := map[string]reflect.Value{}
	for _, k := range keys() {
		values[strings.Trim(k.name, "[]")] = k.value
	}
	text, err := os.ReadFile(sizing)
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	want := sizingRow.ReplaceAllStringFunc(string(text), func(row string) string {
		rows++
		cells := sizingRow.FindStringSubmatch(row)
		v, known := values[cells[1]]
		if !known {
			t.Errorf("%s: %s is no key of the configuration", sizing, cells[1])
			return row
		}
		return fmt.Sprintf("| `%s` | %s |", cells[1], sizingDefault(v))
	})
	if rows < 10 {
		t.Errorf("%s has %d rows with a key and its default", sizing, rows)
	}
	if *update {
		if err := os.WriteFile(sizing, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s (-by the code +there; go test ./config -update accepts it):\n%s", sizing, diff)
	}
}

// sizingDefault returns a default in the form of docs/sizing.md.
func sizingDefault(v reflect.Value) string {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return "unset"
		}
		v = v.Elem()
	}
	if size, ok := v.Interface().(Size); ok {
		return size.String()
	}
	return fmt.Sprint(v.Interface())
}
