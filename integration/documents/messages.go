package documents

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Message is a text that a program can print: a format of an error, or of a log line of
// level warning or above.
type Message struct {
	Text string // with "…" for each argument
	at   string // the package, relative to the repository
	code string // the name of the code's constant in package fault; "" for an internal message
}

// Messages returns the messages of the installed programs and libraries, in order. root is
// the folder of the repository.
func Messages(root string) ([]Message, error) {
	all, err := goMessages(root)
	if err != nil {
		return nil, err
	}
	libraries, err := cMessages(root)
	if err != nil {
		return nil, err
	}
	all = append(all, libraries...)
	slices.SortFunc(all, func(a, b Message) int {
		return strings.Compare(a.at+"\x00"+a.Text+"\x00"+a.code, b.at+"\x00"+b.Text+"\x00"+b.code)
	})
	return slices.Compact(all), nil
}

// products are the folders of installed programs. Messages of tests, demos and benchmarks need no
// explanation.
var products = []string{"cdi", "cmd", "config", "cuda", "hook", "relay", "topo"}

var notProducts = regexp.MustCompile(`^(cuda/(sim|conformance|kernels)|cmd/peerlane/(bench|bundle|demo|measure|testbed)|topo/(recorded|internal/topotest)|relay/wire/generate|relay/(libpeerlane|nccl)/build|relay/verbs/(softdevice|conformance)|cmd/manual)(/|$)|/testdata(/|$)`)

// verb matches a verb of package fmt.
var verb = regexp.MustCompile(`%[-+# 0]*(\*|\d+)?(\.(\*|\d+)?)?(\[\d+\])?[a-zA-Z]`)

// shown returns a format in its printed form.
func shown(format string) string {
	text := verb.ReplaceAllString(strings.ReplaceAll(format, "%%", "\x00"), "…")
	text = strings.ReplaceAll(text, "\x00", "%")
	text = strings.Join(strings.Fields(text), " ")
	for strings.Contains(text, "……") {
		text = strings.ReplaceAll(text, "……", "…")
	}
	return text
}

// formatOf returns the index of the argument with a call's message, or -1.
func formatOf(call *ast.CallExpr) int {
	name := ""
	of := ""
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		name = f.Sel.Name
		if x, ok := f.X.(*ast.Ident); ok {
			of = x.Name
		}
	case *ast.Ident:
		name = f.Name
	}
	switch {
	case of == "fmt" && name == "Errorf", of == "errors" && name == "New":
		return 0
	case of == "wire" && name == "Errorf", of == "" && name == "Errorf":
		if len(call.Args) > 1 { // with a status in front
			return 1
		}
	case name == "Warn" || name == "Warnf" || name == "Warning" || name == "Error" || name == "Errorf" ||
		name == "Fatal" || name == "Fatalf":
		return 0
	}
	return -1
}

// literal returns the value of a constant expression, with "…" for non-constant parts.
func literal(e ast.Expr, constants map[string]string) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil && e.Kind == token.STRING
	case *ast.Ident:
		text, ok := constants[e.Name]
		return text, ok
	case *ast.BinaryExpr:
		a, okA := literal(e.X, constants)
		b, okB := literal(e.Y, constants)
		if !okA {
			a = "%v"
		}
		if !okB {
			b = "%v"
		}
		return a + b, okA || okB
	}
	return "", false
}

// goMessages returns the messages of the Go packages.
func goMessages(root string) (all []Message, err error) {
	for _, top := range products {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return err
			}
			at, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if notProducts.MatchString(at) {
				return filepath.SkipDir
			}
			names, err := filepath.Glob(filepath.Join(path, "*.go"))
			if err != nil {
				return err
			}
			var files []*ast.File
			for _, name := range names {
				if strings.HasSuffix(name, "_test.go") {
					continue
				}
				f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
				if err != nil {
					return err
				}
				files = append(files, f)
			}
			all = append(all, messagesOf(files, at)...)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// constantsOf returns the string constants of a package.
func constantsOf(files []*ast.File) map[string]string {
	constants := map[string]string{}
	for _, f := range files {
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec) // of a const declaration
				for i, name := range v.Names {
					if i < len(v.Values) {
						if text, ok := literal(v.Values[i], constants); ok {
							constants[name.Name] = text
						}
					}
				}
			}
		}
	}
	return constants
}

// collector collects the messages in the files of a package.
type collector struct {
	at        string
	constants map[string]string
	formats   map[string]int    // parameter with the format, of the package's own functions
	makers    map[string]string // see faultMakers
	code      string            // of the fault.Error whose nodes are visited
	list      []Message
}

// messagesOf returns the messages in the files of a package.
func messagesOf(files []*ast.File, at string) []Message {
	constants := constantsOf(files)
	c := &collector{at: at, constants: constants, formats: formats(files, at), makers: faultMakers(files, constants)}
	for _, f := range files {
		var stack []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				c.leave(stack[len(stack)-1])
				stack = stack[:len(stack)-1]
				return true
			}
			stack = append(stack, n)
			c.enter(n)
			return true
		})
	}
	return c.list
}

func (c *collector) write(text string) {
	if text := shown(text); strings.Trim(text, "…:;,. ()") != "" {
		c.list = append(c.list, Message{text, c.at, c.code})
	}
}

func (c *collector) add(e ast.Expr) {
	if text, ok := literal(e, c.constants); ok {
		c.write(text)
	}
}

func (c *collector) enter(n ast.Node) {
	switch n := n.(type) {
	case *ast.CompositeLit:
		if isFault(n) {
			var text string
			c.code, text = faultText(n, c.constants)
			c.write(text)
		}
	case *ast.FuncDecl:
		if n.Name.Name == "Error" && n.Recv != nil && n.Body != nil {
			texts(n.Body, c.add) // a type of errors
			returned(n.Body, c.add)
		}
	case *ast.CallExpr:
		c.call(n)
	}
}

func (c *collector) call(call *ast.CallExpr) {
	if code, makes := c.makers[called(call)]; makes {
		c.code = code
		for _, a := range call.Args {
			if text, ok := literal(a, c.constants); ok && strings.Contains(text, " ") {
				c.write(text)
			}
		}
	} else if i := formatOf(call); i >= 0 && i < len(call.Args) {
		c.add(call.Args[i])
	} else if i, ok := c.formats[called(call)]; ok && i < len(call.Args) {
		c.add(call.Args[i])
	} else if sinks[called(call)] {
		for _, a := range call.Args {
			c.add(a)
			texts(a, c.add)
		}
	}
}

func (c *collector) leave(n ast.Node) {
	switch n := n.(type) {
	case *ast.CompositeLit:
		if isFault(n) {
			c.code = ""
		}
	case *ast.CallExpr:
		if c.makers[called(n)] != "" {
			c.code = ""
		}
	}
}

// isFault reports whether a literal is a fault.Error.
func isFault(c *ast.CompositeLit) bool {
	s, ok := c.Type.(*ast.SelectorExpr)
	if !ok || s.Sel.Name != "Error" {
		return false
	}
	x, ok := s.X.(*ast.Ident)
	return ok && x.Name == "fault"
}

// faultMakers returns the functions that only return a fault.Error, and the code of the error. The
// arguments are parts of the error's text.
func faultMakers(files []*ast.File, constants map[string]string) map[string]string {
	makers := map[string]string{}
	for _, f := range files {
		for _, d := range f.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil || len(f.Body.List) != 1 {
				continue
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				if c, ok := n.(*ast.CompositeLit); ok && isFault(c) {
					makers[f.Name.Name], _ = faultText(c, constants)
				}
				return true
			})
		}
	}
	return makers
}

// faultText returns the code and the format of a fault.Error, as method Error joins the fields.
func faultText(c *ast.CompositeLit, constants map[string]string) (code, text string) {
	fields := map[string]string{}
	for _, e := range c.Elts {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok {
			continue
		}
		name := kv.Key.(*ast.Ident).Name // of a struct's field
		value, ok := literal(kv.Value, constants)
		if call, found := kv.Value.(*ast.CallExpr); found && called(call) == "Sprintf" {
			value, ok = literal(call.Args[0], constants)
		}
		if !ok {
			value = "%v"
		}
		fields[name] = value
		if s, ok := kv.Value.(*ast.SelectorExpr); ok && name == "Code" {
			code = s.Sel.Name
		}
	}
	text = strings.TrimSpace(fields["Operation"] + " " + fields["Object"])
	for _, part := range [][2]string{{": ", "Cause"}, {"; ", "Remedy"}} {
		if fields[part[1]] != "" {
			text += part[0] + fields[part[1]]
		}
	}
	return code, text
}

// called returns the name of the called function.
func called(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		return f.Sel.Name
	case *ast.Ident:
		return f.Name
	}
	return ""
}

// sinks are functions whose argument reaches a user: the reason of a relay's kill or of a refusal.
var sinks = map[string]bool{
	"failed": true, "kill": true, "logKeyError": true, "logToHost": true, "newCallError": true, "printState": true,
	"refuse": true,
}

// texts adds the formats of fmt.Sprintf within a node.
func texts(part ast.Node, add func(ast.Expr)) {
	ast.Inspect(part, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && called(call) == "Sprintf" && len(call.Args) > 0 {
			add(call.Args[0])
		}
		return true
	})
}

// returned adds the texts that a method returns as a literal, or joins with +.
func returned(body *ast.BlockStmt, add func(ast.Expr)) {
	ast.Inspect(body, func(n ast.Node) bool {
		if r, ok := n.(*ast.ReturnStmt); ok {
			for _, result := range r.Results {
				add(result)
			}
		}
		return true
	})
}

// formats returns a package's functions that make an error or a warning from a format, and the
// index of the format: functions with a parameter of that name, followed by further parameters.
// Functions that make findings of peerlane doctor do not count, because docs/doctor.md lists the
// findings.
func formats(files []*ast.File, at string) map[string]int {
	own := map[string]int{}
	for _, f := range files {
		for _, d := range f.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || at == "cmd/peerlane/doctor" {
				continue
			}
			i := 0
			for n, field := range f.Type.Params.List {
				last := n == len(f.Type.Params.List)-2
				if _, variadic := f.Type.Params.List[len(f.Type.Params.List)-1].Type.(*ast.Ellipsis); last && variadic &&
					len(field.Names) > 0 && field.Names[len(field.Names)-1].Name == "format" {
					own[f.Name.Name] = i + len(field.Names) - 1
				}
				i += len(field.Names)
			}
		}
	}
	return own
}

// comment matches a C comment.
var comment = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)

// strung matches C strings, including adjacent strings, which C joins.
var strung = regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"(?:\s*(?:PRI[a-z0-9]+\s*)?"(?:[^"\\\n]|\\.)*")*`)

var text = regexp.MustCompile(`"((?:[^"\\\n]|\\.)*)"`)

// cVerb matches a verb of printf.
var cVerb = regexp.MustCompile(`%[-+# 0]*(\*|\d+)?(\.(\*|\d+)?)?(hh|h|ll|l|z|j|t)?[a-zA-Z]`)

// cMessages returns the messages of the C libraries: every text of several words, as C code does
// not mark messages.
func cMessages(root string) (list []Message, err error) {
	for _, at := range []string{"relay/libpeerlane/source", "relay/nccl/source"} {
		files, err := filepath.Glob(filepath.Join(root, at, "*.c"))
		if err != nil || len(files) == 0 {
			return nil, fmt.Errorf("%s: %d files: %v", at, len(files), err)
		}
		for _, file := range files {
			source, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			for _, together := range strung.FindAllString(withoutComments(string(source)), -1) {
				message := ""
				for _, m := range text.FindAllStringSubmatch(together, -1) {
					message += m[1]
				}
				message = shown(cVerb.ReplaceAllString(strings.ReplaceAll(strings.ReplaceAll(message, `\"`, `"`), `\n`, " "), "%v"))
				if strings.Count(message, " ") >= 2 && strings.Trim(message, "…:;,. ()") != "" {
					list = append(list, Message{message, at, codeIn(message)})
				}
			}
		}
	}
	return list, nil
}

// codeIn returns the code at the end of a C text, or "".
func codeIn(text string) string {
	if m := regexp.MustCompile(`\[(PL[0-9]{4})\]$`).FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// withoutComments removes comments, but not strings that resemble comments.
func withoutComments(source string) string {
	either := regexp.MustCompile(`(?s)"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|` + comment.String())
	return either.ReplaceAllStringFunc(source, func(s string) string {
		if strings.HasPrefix(s, "/") {
			return " "
		}
		if strings.HasPrefix(s, "'") {
			return "0"
		}
		return s
	})
}
