package edit

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSetChangesOneKey(t *testing.T) {
	cri := []string{"plugins", "io.containerd.grpc.v1.cri", "enable_cdi"}
	cdi := []string{"features", "cdi"}
	for _, c := range []struct {
		name, before string
		language     Language
		key          Key
		after        string
	}{
		{"nothing", "", TOML, Key{Path: cri, Value: true}, "[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n"},
		{"a value, and its comment", "[plugins.'io.containerd.grpc.v1.cri']\n\tenable_cdi=false # why\n", TOML,
			Key{Path: cri, Value: true},
			"[plugins.'io.containerd.grpc.v1.cri']\n\tenable_cdi=true # why\n"},
		{"a table, and what follows it", "# mine\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    sandbox = " +
			"\"x\" # y\n  [plugins.other]\n    a = 1\n", TOML, Key{Path: cri, Value: true},
			"# mine\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    sandbox = \"x\" # y\n    enable_cdi = true\n  " +
				"[plugins.other]\n    a = 1\n"},
		{"a table below a table", "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\na = 1", TOML,
			Key{Path: cri, Value: true},
			"[plugins.\"io.containerd.grpc.v1.cri\".containerd]\na = " +
				"1\n\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n"},
		{"dotted keys", "[plugins]\n\"io.containerd.grpc.v1.cri\".sandbox = \"x\"\n[z]\n", TOML, Key{Path: cri, Value: true},
			"[plugins]\n\"io.containerd.grpc.v1.cri\".sandbox = \"x\"\n\"io.containerd.grpc.v1.cri\".enable_cdi = true\n[z]\n"},
		{"a key of no table", "# head\n\n[a]\nb = 1\n", TOML, Key{Path: []string{"version"}, Value: int64(2)},
			"# head\n\nversion = 2\n[a]\nb = 1\n"},
		{"a byte order mark", "\ufeff[a]\nb = 1\n", TOML, Key{Path: []string{"version"}, Value: int64(2)},
			"\ufeffversion = 2\n[a]\nb = 1\n"},
		{"a byte order mark alone", "\ufeff", TOML, Key{Path: []string{"version"}, Value: int64(2)}, "\ufeffversion = 2\n"},
		{"no end of the last line", "a = 1", TOML, Key{Path: []string{"b"}, Value: int64(2)}, "a = 1\nb = 2\n"},
		{"tables of an array", "[[a]]\nb = 1\n[[a]]\nb = 2\n", TOML, Key{Path: []string{"c", "d"}, Value: true},
			"[[a]]\nb = 1\n[[a]]\nb = 2\n\n[c]\nd = true\n"},
		{"blanks around names", "[ a . b ]\n c . d = 1\n", TOML, Key{Path: []string{"a", "b", "c", "d"}, Value: int64(2)},
			"[ a . b ]\n c . d = 2\n"},
		{"blanks in an object", "{ \"a\" : { \"b\" : 1 , \"c\" : 2 } }", JSON, Key{Path: []string{"a", "c"}, Value: true},
			"{ \"a\" : { \"b\" : 1 , \"c\" : true } }"},
		{"a number of two digits", "[a]\nb = 10\n", TOML, Key{Path: []string{"a", "b"}, Value: int64(25)}, "[a]\nb = 25\n"},
		{"a table without lines", "[a]", TOML, Key{Path: []string{"a", "b"}, Value: true}, "[a]\nb = true\n"},
		{"a list with a comment sign in a text", "[a]\nl = ['#', \"]\"] # end\nm = 1\n", TOML,
			Key{Path: []string{"a", "l"}, Value: []string{"x"}}, "[a]\nl = [\"x\"] # end\nm = 1\n"},
		{"a list over lines", "[a]\nl = [ # one\n  \"x\", # ]\n  '''\n]''',\n] # end\nm = 1\n", TOML,
			Key{Path: []string{"a", "l"}, Value: []string{"x", "y\\\"\x01"}},
			"[a]\nl = [\"x\", \"y\\\\\\\"\\u0001\"] # end\nm = 1\n"},
		{"Windows' ends of lines", "[a]\r\nb = 1\r\n", TOML, Key{Path: []string{"a", "c"}, Value: "d"},
			"[a]\r\nb = 1\r\nc = \"d\"\r\n"},
		{"take a key", "[a]\nb = 1\n# of c\nc = 2 # c\n\n[d]\n", TOML, Key{Path: []string{"a", "c"}},
			"[a]\nb = 1\n# of c\n\n[d]\n"},
		{"take a table", "[a]\nb = 1\n\n[d.e]\nf = 1\n", TOML, Key{Path: []string{"d", "e", "f"}}, "[a]\nb = 1\n"},
		{"leave a table", "[a]\nb = 1\n\n[d.e]\nf = 1\n", TOML, Key{Path: []string{"d", "e", "f"}, Keep: 2},
			"[a]\nb = 1\n\n[d.e]\n"},
		{"take what is not there", "[a]\nb = 1\n", TOML, Key{Path: []string{"x", "y"}}, "[a]\nb = 1\n"},

		{"nothing", "", JSON, Key{Path: cdi, Value: true}, "{\n  \"features\": {\n    \"cdi\": true\n  }\n}\n"},
		{"an empty object", "{}\n", JSON, Key{Path: cdi, Value: true}, "{\n  \"features\": {\n    \"cdi\": true\n  }\n}\n"},
		{"lines", "{\n    \"debug\": true,\n    \"labels\": [\n        \"a\"\n    ]\n}", JSON, Key{Path: cdi, Value: true},
			"{\n    \"debug\": true,\n    \"labels\": [\n        \"a\"\n    ],\n    \"features\": {\n        \"cdi\": true\n " +
				"   }\n}"},
		{"one line", `{"debug": true}`, JSON, Key{Path: cdi, Value: true}, `{"debug": true,"features": {"cdi":true}}`},
		{"one line, an empty object", `{"features": {}}`, JSON, Key{Path: cdi, Value: true},
			"{\"features\": {\n    \"cdi\": true\n  }}"},
		{"lines without members", "{\n}\n", JSON, Key{Path: []string{"debug"}, Value: true}, "{\n  \"debug\": true\n}\n"},
		{"an indentation of no depth", "{\n \"a\": {\n   \"b\": 1\n }\n}\n", JSON,
			Key{Path: []string{"a", "c"}, Value: []string{"d"}},
			"{\n \"a\": {\n   \"b\": 1,\n   \"c\": [\n     \"d\"\n   ]\n }\n}\n"},
		{"a value", `{"features": {"cdi": false, "x": 1e3}}`, JSON, Key{Path: cdi, Value: true},
			`{"features": {"cdi": true, "x": 1e3}}`},
		{"an object", "{\n\t\"features\": {\n\t\t\"x\": \"}\\\"{\"\n\t},\n\t\"z\": 1\n}\n", JSON, Key{Path: cdi, Value: true},
			"{\n\t\"features\": {\n\t\t\"x\": \"}\\\"{\",\n\t\t\"cdi\": true\n\t},\n\t\"z\": 1\n}\n"},
		{"an object with nothing in it", "{\n  \"features\": {}\n}\n", JSON, Key{Path: cdi, Value: true},
			"{\n  \"features\": {\n    \"cdi\": true\n  }\n}\n"},
		{"a list", `{}`, JSON, Key{Path: []string{"l"}, Value: []string{"a", "b"}},
			"{\n  \"l\": [\n    \"a\",\n    \"b\"\n  ]\n}"},
		{"take the first", "{\n  \"features\": {\n    \"cdi\": true\n  },\n  \"z\": 1\n}\n", JSON, Key{Path: cdi},
			"{\n  \"z\": 1\n}\n"},
		{"take the last", "{\n  \"z\": 1,\n  \"features\": {\n    \"cdi\": true\n  }\n}\n", JSON, Key{Path: cdi},
			"{\n  \"z\": 1\n}\n"},
		{"leave an object", "{\"features\": {\"cdi\": true}}", JSON, Key{Path: cdi, Keep: 1}, "{\"features\": {}}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			after, err := Set(c.language, []byte(c.before), c.key)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.after, string(after)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			again, err := Set(c.language, after, c.key)
			if err != nil || !bytes.Equal(again, after) {
				t.Errorf("the second time it is\n%s, %v", again, err)
			}
		})
	}
}

// Set refuses a key that cannot be changed alone, and names the line.
func TestSetImpossibleChangeIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, text string
		language   Language
		path       []string
		line       int
		want       string
	}{
		{"torn TOML", "[a]\nb = 1\n[c\n", TOML, []string{"a", "c"}, 3, ""},
		{"a key twice", "[a]\nb = 1\nb = 2\n", TOML, []string{"a", "c"}, 3, "already"},
		{"a table in a line", "x = 1\na = { b = 1 }\n", TOML, []string{"a", "c"}, 2, "change it to a table [a] by hand"},
		{"a list of tables", "[[a]]\nb = 1\n", TOML, []string{"a", "c"}, 0, "is not a table"},
		{"no table", "a = 1\n", TOML, []string{"a", "c"}, 0, "a is not a table"},
		{"torn JSON", "{\n  \"a\": 1,\n", JSON, []string{"b"}, 3, "ends in the middle"},
		{"a comma too many", "{\n  \"a\": 1,\n}\n", JSON, []string{"b"}, 3, "invalid character '}'"},
		{"no object", "\n[1]\n", JSON, []string{"b"}, 2, "expected an object"},
		{"null", "null", JSON, []string{"b"}, 1, "instead of null"},
		{"two objects", "{}\n\n{}\n", JSON, []string{"b"}, 1, "unexpected data after the object"},
		{"a value that is no object", "{\"a\": 1}", JSON, []string{"a", "b"}, 0, "a is not a table"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, err := Set(c.language, []byte(c.text), Key{Path: c.path, Value: true})
			var at *Error
			if !errors.As(err, &at) || at.Line != c.line || !strings.Contains(at.Reason, c.want) {
				t.Fatalf("%q, %v", text, err)
			}
		})
	}
}

// values are values for any key.
var values = []any{true, "a \"text\"", []string{"/etc/cdi", "/run/cdi"}, int64(3)}

// checkSet checks that Set changes one key and no other, and that removing the key restores the
// text.
func checkSet(t *testing.T, l Language, text []byte, path []string, which uint8, normal func([]byte) string) {
	before, err := l.Read(text)
	if err != nil {
		return // the text is malformed
	}
	value := values[int(which)%len(values)]
	after, err := Set(l, text, Key{Path: path, Value: value})
	if err != nil {
		return // Set refused the change
	}
	tree, err := l.Read(after)
	if err != nil {
		t.Fatalf("%q became %q: %v", text, after, err)
	}
	if got := Get(tree, path...); l == TOML && !Same(value, got) {
		t.Fatalf("%q became %q with %v for %v", text, after, got, value)
	}
	oldValue := Get(before, path...)
	switch oldValue.(type) {
	case nil:
	case bool, string, int64:
	default:
		return // Set does not remove an empty table
	}
	back, err := Set(l, after, Key{Path: path, Value: oldValue, Keep: Depth(before, path)})
	if err != nil {
		t.Fatalf("%q became %q, which does not become the old one: %v", text, after, err)
	}
	again, err := l.Read(back)
	if err != nil || !reflect.DeepEqual(before, again) {
		t.Fatalf("%q became %q and then %q, %v", text, after, back, err)
	}
	// An existing empty table keeps its header, which has no effect.
	header := "[" + tomlKey(path[:len(path)-1]) + "]"
	if oldValue == nil && normal(text) != normal(back) &&
		normal(text) != normal(bytes.TrimSuffix(bytes.TrimRight(back, "\r\n"), []byte(header))) {
		t.Fatalf("%q became %q and then %q", text, after, back)
	}
}

func FuzzTOML(f *testing.F) {
	f.Add([]byte("[0.'000']\nx = 1"), "", "0", uint8(1))
	for _, text := range []string{
		"", "version = 2\n", "a.b = 1\n[c]\n", "[a]\n\tb=[1, # x\n2]\n[[d]]\n[d.e]\n", "[a.'b.c']\n\"d\\u0041\" = '''\n'''\n",
		"\ufeff[a]\r\nb=1", "a={b=1}", "x=1 # c\n#\n", "[a]\n[b.c]\n[a.b]\n",
	} {
		f.Add([]byte(text), "a", "b", uint8(0))
		f.Add([]byte(text), "plugins", "io.containerd.grpc.v1.cri", uint8(2))
	}
	f.Fuzz(func(t *testing.T, text []byte, table, name string, which uint8) {
		checkSet(
			t,
			TOML,
			text,
			[]string{table, name, "enable_cdi"}[which%3:],
			which,
			func(text []byte) string { return strings.TrimRight(string(text), "\r\n") },
		)
	})
}

func FuzzJSON(f *testing.F) {
	for _, text := range []string{"", "{}", "{ }\n", "{\"a\": {\"b\": [1, {}]}}", "{\n\t\"a\": 1\n}",
		"{\"a\":1,\"a\":{}}"} {
		f.Add([]byte(text), "a", "b", uint8(0))
		f.Add([]byte(text), "features", "cdi", uint8(2))
	}
	f.Fuzz(func(t *testing.T, text []byte, table, name string, which uint8) {
		checkSet(t, JSON, text, []string{table, name, "x"}[which%3:], which, func(text []byte) string {
			var b bytes.Buffer
			if len(trimmed(text)) == 0 {
				text = []byte("{}")
			}
			if err := json.Compact(&b, text); err != nil {
				t.Fatal(err)
			}
			return b.String()
		})
	})
}

func TestDepthCountsTablesOfPath(t *testing.T) {
	tree := map[string]any{"a": map[string]any{"b": map[string]any{"c": true}, "d": 1}}
	for path, want := range map[string]int{"a": 0, "x": 0, "a.b": 1, "a.x": 1, "x.y": 0, "a.b.c": 2, "a.b.x": 2,
		"a.d.x":   1,
		"a.x.y.z": 1} {
		if got := Depth(tree, strings.Split(path, ".")); got != want {
			t.Errorf("%s: %d, want %d", path, got, want)
		}
	}
}

func TestReadKeepsDigitsAndRefusesOtherEncodings(t *testing.T) {
	tree, err := JSON.Read([]byte(`{"n": 9007199254740993}`))
	if err != nil || tree["n"] != json.Number("9007199254740993") {
		t.Errorf("%v, %v", tree, err)
	}
	for _, l := range []Language{JSON, TOML} {
		if tree, err := l.Read([]byte("\xff")); err == nil {
			t.Errorf("%v of a text that is not UTF-8", tree)
		}
	}
}
