package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"slices"
	"strings"
)

// mutant is a change of the code.
type mutant struct {
	file   string // relative to the root of the module
	line   int
	action string
	code   string // before the change
}

func (m mutant) String() string {
	return fmt.Sprintf("%s:%d: %s: %s", m.file, m.line, m.action, m.code)
}

// insertion is text of a mutant in a file, or in place of an operator.
type insertion struct {
	offset, length int // length is that of the replaced text
	order          int // of insertions at one offset
	text           string
}

// mutator adds the mutants of a package. It changes no line numbers.
type mutator struct {
	info    *types.Info
	pkg     *types.Package
	fset    *token.FileSet
	mutants []mutant
	skip    map[int]bool // identifiers of mutants that do not compile

	name       string // of the file
	text       []byte
	insertions []insertion
	sequence   int
	negated    map[ast.Expr]bool // conditions and operands
	beside     map[ast.Expr]bool // results beside an error, and numbers in its message
}

// file returns the text of a file with mutants.
func (m *mutator) file(name string, text []byte, f *ast.File) []byte {
	m.name, m.text, m.insertions = name, text, nil
	m.negated, m.beside = map[ast.Expr]bool{}, map[ast.Expr]bool{}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Body != nil && !isErrorText(d) {
				m.walk(d.Body)
			}
		case *ast.GenDecl:
			if d.Tok == token.VAR {
				m.walk(d)
			}
		}
	}
	slices.SortStableFunc(m.insertions, func(a, b insertion) int {
		return cmp.Or(a.offset-b.offset, a.order-b.order)
	})
	var out strings.Builder
	at := 0
	for _, i := range m.insertions {
		out.Write(text[at:i.offset])
		out.WriteString(i.text)
		at = i.offset + i.length
	}
	out.Write(text[at:])
	return []byte(out.String())
}

// isErrorText reports whether a function is the method Error of an error.
func isErrorText(d *ast.FuncDecl) bool {
	return d.Recv != nil && d.Name.Name == "Error" && d.Type.Params.NumFields() == 0
}

// walk adds the mutants of a node and of the nodes below it.
func (m *mutator) walk(root ast.Node) {
	ast.Inspect(root, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			m.statements(n.List)
		case *ast.CaseClause:
			m.statements(n.Body)
			if len(n.List) == 1 {
				m.failing(n.List[0], n.Body)
			}
		case *ast.CommClause:
			m.statements(n.Body)
		case *ast.IfStmt:
			m.condition(n.Cond)
			m.failing(n.Cond, n.Body.List)
		case *ast.ForStmt:
			m.condition(n.Cond)
		case *ast.TypeSwitchStmt:
			m.walk(n.Body) // the guard has no mutants
			return false
		case *ast.ExprStmt:
			return !m.silent(n.X)
		case *ast.ReturnStmt:
			m.result(n, "")
		case *ast.GenDecl:
			return n.Tok == token.VAR
		case *ast.KeyValueExpr:
			m.walk(n.Value) // an array's index is a constant
			return false
		case *ast.ArrayType, *ast.StructType, *ast.InterfaceType, *ast.FuncType:
			return false
		case *ast.CallExpr:
			if m.allocates(n) && len(n.Args) == 3 {
				m.walk(n.Args[1])
				return false
			}
			return m.expression(n)
		case ast.Expr:
			return m.expression(n)
		}
		return true
	})
}

// allocates reports whether a call is of the builtin make.
func (m *mutator) allocates(c *ast.CallExpr) bool {
	name, isName := c.Fun.(*ast.Ident)
	if !isName {
		return false
	}
	b, isBuiltin := m.info.Uses[name].(*types.Builtin)
	return isBuiltin && b.Name() == "make"
}

// expression adds the mutants of an expression, and reports whether to walk the expressions below.
func (m *mutator) expression(e ast.Expr) bool {
	tv, ok := m.info.Types[e]
	if !ok {
		return true
	}
	if tv.IsType() {
		return false
	}
	if tv.Value != nil {
		if !m.beside[e] {
			m.constant(e, tv)
		}
		return false
	}
	if c, ok := e.(*ast.CallExpr); ok {
		m.message(c)
	}
	b, ok := e.(*ast.BinaryExpr)
	if !ok {
		return true
	}
	switch b.Op {
	case token.LAND:
		m.operand(b.X, "ignore an operand of &&", "(mutationOn(%d) || (")
		m.operand(b.Y, "ignore an operand of &&", "(mutationOn(%d) || (")
	case token.LOR:
		m.operand(b.X, "ignore an operand of ||", "(!mutationOn(%d) && (")
		m.operand(b.Y, "ignore an operand of ||", "(!mutationOn(%d) && (")
	case token.EQL, token.NEQ:
		m.negate(e)
	case token.LSS:
		m.call(b, "move a boundary", "mutationLess")
	case token.LEQ:
		m.call(b, "move a boundary", "mutationLessEqual")
	case token.GTR:
		m.call(b, "move a boundary", "mutationGreater")
	case token.GEQ:
		m.call(b, "move a boundary", "mutationGreaterEqual")
	case token.ADD:
		if isNumber(tv.Type) {
			m.call(b, "subtract", "mutationAdd")
		}
	case token.SUB:
		m.call(b, "add", "mutationSubtract")
	}
	return true
}

// condition adds the negation of a condition.
func (m *mutator) condition(e ast.Expr) {
	if e != nil && m.info.Types[e].Value == nil {
		m.negate(e)
	}
}

func (m *mutator) negate(e ast.Expr) {
	if m.isBool(e) && !m.negated[ast.Unparen(e)] {
		m.negated[ast.Unparen(e)] = true
		m.wrap(e, "negate", "(mutationOn(%d) != (", "))")
	}
}

// failing notes the results beside an error in the body of a condition err != nil.
func (m *mutator) failing(condition ast.Expr, body []ast.Stmt) {
	b, ok := ast.Unparen(condition).(*ast.BinaryExpr)
	if !ok || b.Op != token.NEQ || !m.info.Types[b.Y].IsNil() {
		return
	}
	name, ok := b.X.(*ast.Ident)
	if !ok {
		return
	}
	for _, s := range body {
		if r, ok := s.(*ast.ReturnStmt); ok {
			m.result(r, name.Name)
		}
	}
}

// result notes the results beside an error that is not nil: no caller reads these. name is a variable with
// such an error; empty without one.
func (m *mutator) result(s *ast.ReturnStmt, name string) {
	if len(s.Results) < 2 {
		return
	}
	last := ast.Unparen(s.Results[len(s.Results)-1])
	fails := false
	switch e := last.(type) {
	case *ast.Ident:
		fails = isVariableOfPackage(m.info.Uses[e])
	case *ast.SelectorExpr:
		fails = isVariableOfPackage(m.info.Uses[e.Sel])
	case *ast.CallExpr:
		fails = m.makesError(e)
	case *ast.UnaryExpr:
		_, fails = e.X.(*ast.CompositeLit)
	}
	ast.Inspect(last, func(n ast.Node) bool {
		i, ok := n.(*ast.Ident)
		fails = fails || ok && i.Name == name
		return true
	})
	if !fails || !types.Implements(m.info.TypeOf(last), errorType) {
		return
	}
	for _, e := range s.Results[:len(s.Results)-1] {
		m.beside[e] = true
	}
}

// isVariableOfPackage reports whether an object is a variable of a package, such as io.EOF.
func isVariableOfPackage(o types.Object) bool {
	v, ok := o.(*types.Var)
	return ok && v.Pkg() != nil && v.Parent() == v.Pkg().Scope()
}

var errorType = types.Universe.Lookup("error").Type().Underlying().(*types.Interface)

// makesError reports whether an expression calls errors.New, or a function Errorf of a package.
func (m *mutator) makesError(c *ast.CallExpr) bool {
	name, ok := c.Fun.(*ast.Ident)
	if s, isSelector := c.Fun.(*ast.SelectorExpr); isSelector {
		name, ok = s.Sel, true
	}
	if !ok {
		return false
	}
	f, ok := m.info.Uses[name].(*types.Func)
	return ok && (f.Name() == "Errorf" || f.FullName() == "errors.New")
}

// message notes the numbers in the message of an error: the arguments after the format.
func (m *mutator) message(c *ast.CallExpr) {
	if !m.makesError(c) {
		return
	}
	if s, ok := m.info.TypeOf(c.Fun).(*types.Signature); ok && s.Variadic() {
		for _, a := range c.Args[min(s.Params().Len()-1, len(c.Args)):] {
			m.beside[a] = true
		}
	}
}

// operand adds the mutant without an operand of && or ||. The walk adds mutants of nested operands.
func (m *mutator) operand(e ast.Expr, action, before string) {
	inner, isBinary := ast.Unparen(e).(*ast.BinaryExpr)
	if isBinary && (inner.Op == token.LAND || inner.Op == token.LOR) || m.info.Types[e].Value != nil || !m.isBool(e) {
		return
	}
	m.negated[ast.Unparen(e)] = true
	m.wrap(e, action, before, "))")
}

func (m *mutator) isBool(e ast.Expr) bool {
	b, ok := m.info.TypeOf(e).(*types.Basic)
	return ok && b.Info()&types.IsBoolean != 0
}

// call replaces an operation by a call of the function with this name.
func (m *mutator) call(b *ast.BinaryExpr, action, function string) {
	if _, isParameter := m.info.TypeOf(b.X).(*types.TypeParam); isParameter {
		return
	}
	id, ok := m.add(b, action)
	if !ok {
		return
	}
	m.insert(b.Pos(), 0, false, fmt.Sprintf("%s(%d, ", function, id))
	m.insert(b.OpPos, len(b.Op.String()), false, ",")
	m.insert(b.End(), 0, true, ")")
}

// constant adds one to an integer of this package.
func (m *mutator) constant(e ast.Expr, tv types.TypeAndValue) {
	if tv.Value.Kind() != constant.Int || m.foreign(e) {
		return
	}
	name := ""
	switch t := tv.Type.(type) {
	case *types.Basic:
		if t.Info()&types.IsInteger == 0 || t.Info()&types.IsUntyped != 0 {
			return
		}
		name = t.Name()
	case *types.Named:
		if t.Obj().Pkg() != m.pkg || t.Obj().Parent() != m.pkg.Scope() {
			return
		}
		name = t.Obj().Name()
	default:
		return
	}
	m.wrap(e, "add one to a constant", "mutationConstant["+name+"](%d, ", ")")
}

// foreign reports whether a constant comes from another package.
func (m *mutator) foreign(e ast.Expr) (found bool) {
	ast.Inspect(e, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			found = found || m.info.Uses[s.Sel] != nil && m.info.Uses[s.Sel].Pkg() != m.pkg
		}
		return true
	})
	return found
}

func isNumber(t types.Type) bool {
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&(types.IsInteger|types.IsFloat) != 0
}

// statements adds the removal of statements of a block.
func (m *mutator) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if m.silent(s.X) {
				continue
			}
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE || allBlank(s.Lhs) {
				continue
			}
		case *ast.BranchStmt:
			if s.Tok == token.GOTO || s.Tok == token.FALLTHROUGH {
				continue
			}
		case *ast.IncDecStmt, *ast.SendStmt, *ast.DeferStmt:
		default:
			continue
		}
		m.wrap(s, "remove", "if !mutationOn(%d) { ", " }")
	}
}

func allBlank(list []ast.Expr) bool {
	return !slices.ContainsFunc(list, func(e ast.Expr) bool {
		i, ok := e.(*ast.Ident)
		return !ok || i.Name != "_"
	})
}

// silent reports whether a statement logs or panics.
func (m *mutator) silent(e ast.Expr) (found bool) {
	ast.Inspect(e, func(n ast.Node) bool {
		if i, ok := n.(*ast.Ident); ok {
			switch o := m.info.Uses[i].(type) {
			case *types.PkgName:
				found = found || o.Imported().Path() == "github.com/sirupsen/logrus"
			case *types.Builtin:
				found = found || o.Name() == "panic"
			}
		}
		_, isFunction := n.(*ast.FuncLit)
		return !isFunction
	})
	return found
}

// wrap adds a mutant by texts around a node; before has a verb for the mutant's identifier.
func (m *mutator) wrap(n ast.Node, action, before, after string) {
	if id, ok := m.add(n, action); ok {
		m.insert(n.Pos(), 0, false, fmt.Sprintf(before, id))
		m.insert(n.End(), 0, true, after)
	}
}

// add returns the identifier of a new mutant, not ok if it does not compile.
func (m *mutator) add(n ast.Node, action string) (id int, ok bool) {
	id = len(m.mutants)
	code, _, _ := strings.Cut(string(m.text[m.offset(n.Pos()):m.offset(n.End())]), "\n")
	m.mutants = append(m.mutants, mutant{m.name, m.fset.Position(n.Pos()).Line, action, code})
	return id, !m.skip[id]
}

// insert adds text at a position. At a position, texts that end a node come first, inner nodes before outer
// nodes; texts that begin a node follow, outer nodes before inner nodes.
func (m *mutator) insert(p token.Pos, length int, ends bool, text string) {
	m.sequence++
	order := m.sequence
	if ends {
		order = -order
	}
	m.insertions = append(m.insertions, insertion{m.offset(p), length, order, text})
}

func (m *mutator) offset(p token.Pos) int { return m.fset.File(p).Offset(p) }
