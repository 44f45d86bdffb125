package fault

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestErrorTextHasEachFieldAndTheCode(t *testing.T) {
	cause := errors.New("it is not a mount")
	for _, tt := range []struct {
		err  Error
		want string
	}{
		{Error{AnchorNotMounted, "check the anchor", "/a", cause, "run peerlane cdi anchor"},
			"check the anchor /a: it is not a mount; run peerlane cdi anchor [PL1203]"},
		{Error{Code: Drained, Operation: "all relays of this host are drained", Remedy: "run peerlane relay resume --all"},
			"all relays of this host are drained; run peerlane relay resume --all [PL1306]"},
		{Error{Code: Unreachable, Operation: "connect to the relay of another host", Cause: cause},
			"connect to the relay of another host: it is not a mount [PL1602]"},
		{Error{Operation: "parse the VPD", Cause: cause}, "parse the VPD: it is not a mount"},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

func TestErrorMatchesItsCodeAndItsCause(t *testing.T) {
	var err error = &Error{Code: UnreadablePlan, Operation: "read the plan", Object: "/p", Cause: fs.ErrNotExist}
	err = fmt.Errorf("container %q: %w", "a", err)
	if !errors.Is(err, UnreadablePlan) || errors.Is(err, Drained) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf(
			"errors.Is: %t, %t, %t",
			errors.Is(err, UnreadablePlan),
			errors.Is(err, Drained),
			errors.Is(err, fs.ErrNotExist),
		)
	}
	var f *Error
	if !errors.As(err, &f) || f.Object != "/p" {
		t.Errorf("errors.As: %+v", f)
	}
}

func TestCodeInOnlyAtTheEndOfATextMatches(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "[PL1306]": false, "drained [PL1306]": true, "container \"[PL1306]\" has no lane [PL1402]": false,
		"drained [PL1306]; and more": false, "drained [PL1306] ": false, "drained [PL13061]": false,
	} {
		if got := Drained.In(text); got != want {
			t.Errorf("%q: %t, want %t", text, got, want)
		}
	}
}

func TestSuffixOfATextIsItsCode(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "[PL1306]": "", " [PL1306]": " [PL1306]", "a [PL1402] b [PL1306]": " [PL1306]", "a [PL130]": "",
		"a [PL130x]": "", "a [PL1306": "", "a [QL1306]": "",
		(&Error{Code: NoLane, Operation: "connect"}).Error(): " [PL1402]",
	} {
		if got := Suffix(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestCatalogueEntriesAreWholeAndInOrder(t *testing.T) {
	if n := len(Entries()); n < 30 || n >= 40 {
		t.Errorf("%d entries", n)
	}
	form := regexp.MustCompile(`^PL1[0-9]{3}$`)
	var last Code
	for _, e := range Entries() {
		if !form.MatchString(string(e.Code)) || e.Code <= last {
			t.Errorf("%s after %s", e.Code, last)
		}
		last = e.Code
		if e.Title == "" || strings.HasSuffix(e.Title, ".") || !strings.HasSuffix(e.Cause, ".") || len(e.Remedies) == 0 {
			t.Errorf("%s: title %q, cause %q, %d remedies", e.Code, e.Title, e.Cause, len(e.Remedies))
		}
		for _, remedy := range e.Remedies {
			if !strings.HasSuffix(remedy, ".") {
				t.Errorf("%s: remedy %q", e.Code, remedy)
			}
		}
	}
}

// constants returns the declared codes of this package, by the name of the constant.
func constants(t *testing.T) map[string]Code {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "entries.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	codes := map[string]Code{}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == 1 {
			if text, ok := v.Values[0].(*ast.BasicLit); ok {
				code, err := strconv.Unquote(text.Value)
				if err != nil {
					t.Fatal(err)
				}
				codes[v.Names[0].Name] = Code(code)
			}
		}
		return true
	})
	return codes
}

// Every code has an entry, and a program outside of this package returns it.
func TestEachCodeHasAnEntryAndAUse(t *testing.T) {
	codes := constants(t)
	if len(codes) != len(Entries()) {
		t.Errorf("%d codes, %d entries", len(codes), len(Entries()))
	}
	used := map[string]bool{}
	for _, top := range []string{"cdi", "cmd", "config", "hook", "relay", "topo"} {
		err := filepath.WalkDir("../../"+top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if s, ok := n.(*ast.SelectorExpr); ok {
					if x, ok := s.X.(*ast.Ident); ok && x.Name == "fault" {
						used[s.Sel.Name] = true
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, code := range codes {
		if !slices.ContainsFunc(Entries(), func(e Entry) bool { return e.Code == code }) {
			t.Errorf("%s (%s) has no entry", name, code)
		}
		if !used[name] {
			t.Errorf("no program returns %s (%s)", name, code)
		}
	}
}
