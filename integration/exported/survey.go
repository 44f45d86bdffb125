package main

import (
	"fmt"
	"go/ast"
	"go/types"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// identifier is an exported identifier.
type identifier struct {
	name  string // package.Name or package.Type.Name
	where string // file:line
	key   key
	kind  string
	// needs are identifiers in the signature or in the type: a user of this identifier can meet values
	// of the types.
	needs []key
	group string // constants of one type or block
	// permitted is set by a general exception.
	permitted bool
}

// key identifies an object in source and in export data: the same object of different variants of a
// package has the same key.
type key struct {
	pkg, name string
	line      int
	file      string
}

type survey struct {
	declared   map[key]*identifier
	used       map[key]bool // by another package
	interfaces []*types.Interface
	seen       map[*types.Interface]bool
	methods    []method // decided after all interfaces are known
}

type method struct {
	key   key
	owner types.Type
	name  string
}

func newSurvey() *survey {
	return &survey{declared: map[key]*identifier{}, used: map[key]bool{}, seen: map[*types.Interface]bool{}}
}

func (s *survey) look(p *packages.Package, declares bool) {
	s.uses(p)
	s.readInterfaces(p)
	if declares && p.Name != "main" && !strings.HasSuffix(p.Name, "_test") {
		s.declarations(p)
	}
}

func keyOf(p *packages.Package, o types.Object) key {
	at := p.Fset.Position(o.Pos())
	return key{o.Pkg().Path(), o.Name(), at.Line, filepath.Base(at.Filename)}
}

func (s *survey) uses(p *packages.Package) {
	for _, o := range p.TypesInfo.Uses {
		if o.Pkg() == nil || !o.Exported() || o.Pkg().Path() == p.PkgPath || !strings.HasPrefix(o.Pkg().Path(), module) {
			continue
		}
		if v, ok := o.(*types.Var); ok {
			o = v.Origin()
		}
		if f, ok := o.(*types.Func); ok {
			o = f.Origin()
		}
		s.used[keyOf(p, o)] = true
	}
}

// readInterfaces collects interfaces of the package and of its imports.
func (s *survey) readInterfaces(p *packages.Package) {
	add := func(t types.Type) {
		if t == nil {
			return
		}
		i, ok := t.Underlying().(*types.Interface)
		if ok && i.NumMethods() > 0 && !s.seen[i] {
			s.seen[i] = true
			s.interfaces = append(s.interfaces, i)
		}
	}
	add(types.Universe.Lookup("error").Type())
	for _, value := range p.TypesInfo.Types {
		add(value.Type)
	}
	visited := map[*types.Package]bool{}
	var visit func(*types.Package)
	visit = func(t *types.Package) {
		if visited[t] {
			return
		}
		visited[t] = true
		for _, name := range t.Scope().Names() {
			if n, ok := t.Scope().Lookup(name).(*types.TypeName); ok {
				add(n.Type())
			}
		}
		for _, i := range t.Imports() {
			visit(i)
		}
	}
	visit(p.Types)
}

func (s *survey) declarations(p *packages.Package) {
	short := strings.TrimPrefix(p.PkgPath, module+"/")
	declare := func(o types.Object, name, kind string) *identifier {
		at := p.Fset.Position(o.Pos())
		if strings.HasSuffix(at.Filename, "_test.go") || !o.Exported() {
			return &identifier{}
		}
		id := &identifier{name: short + "." + name, key: keyOf(p, o), kind: kind,
			where: fmt.Sprintf("%s/%s:%d", short, filepath.Base(at.Filename), at.Line)}
		if _, exists := s.declared[id.key]; !exists {
			s.declared[id.key] = id
		}
		return s.declared[id.key]
	}
	scope := p.Types.Scope()
	for _, name := range scope.Names() {
		o := scope.Lookup(name)
		if !o.Exported() {
			continue
		}
		switch o := o.(type) {
		case *types.Func:
			declare(o, name, "function").needs = mentioned(p, o.Type())
		case *types.Var:
			declare(o, name, "variable").needs = mentioned(p, o.Type())
		case *types.Const:
			id := declare(o, name, "constant")
			id.needs = mentioned(p, o.Type())
			if named, ok := o.Type().(*types.Named); ok {
				id.group = named.String()
			}
		case *types.TypeName:
			id := declare(o, name, "type")
			if o.IsAlias() {
				continue
			}
			named := o.Type().(*types.Named)
			if sig, ok := named.Underlying().(*types.Signature); ok {
				id.needs = mentioned(p, sig)
			}
			for m := range named.Methods() {
				if m.Exported() {
					declare(m, name+"."+m.Name(), "method").needs = mentioned(p, m.Type())
					s.methods = append(s.methods, method{keyOf(p, m), named, m.Name()})
				}
			}
			switch under := named.Underlying().(type) {
			case *types.Struct:
				fixed := encoded(under) || generated(p, o) || types.Implements(types.NewPointer(named), errorType)
				for f := range under.Fields() {
					if !f.Exported() {
						continue
					}
					id.needs = append(id.needs, mentioned(p, f.Type())...)
					if !fixed && !f.Embedded() {
						declare(f, name+"."+f.Name(), "field")
					}
				}
			case *types.Interface:
				for m := range under.ExplicitMethods() {
					id := declare(m, name+"."+m.Name(), "method")
					id.needs = mentioned(p, m.Type())
					id.permitted = true // another package can implement the interface
				}
			}
		}
	}
	s.groupConstants(p)
}

// errorType is the interface error. Callers can read every field of an error.
var errorType = types.Universe.Lookup("error").Type().Underlying().(*types.Interface)

// encoded reports whether a field of a struct has a tag: an encoder needs every field of the struct.
func encoded(t *types.Struct) bool {
	for i := range t.NumFields() {
		if t.Tag(i) != "" {
			return true
		}
	}
	return false
}

// generated reports whether a generated file declares o: the description of the file decides on the
// fields.
func generated(p *packages.Package, o types.Object) bool {
	for _, file := range p.Syntax {
		if file.FileStart <= o.Pos() && o.Pos() < file.FileEnd {
			return ast.IsGenerated(file)
		}
	}
	return false
}

// groupConstants gives the constants of a block of untyped constants a group.
func (s *survey) groupConstants(p *packages.Package) {
	for _, file := range p.Syntax {
		for _, d := range file.Decls {
			block, ok := d.(*ast.GenDecl)
			if !ok || len(block.Specs) < 2 {
				continue
			}
			for _, spec := range block.Specs {
				v, ok := spec.(*ast.ValueSpec)
				if !ok {
					continue
				}
				for _, name := range v.Names {
					o := p.TypesInfo.Defs[name]
					if o == nil || o.Pkg() == nil || !o.Exported() {
						continue
					}
					if id := s.declared[keyOf(p, o)]; id != nil && id.kind == "constant" && id.group == "" {
						id.group = p.Fset.Position(block.Pos()).String()
					}
				}
			}
		}
	}
}

// mentioned returns the named types of this project in a type.
func mentioned(p *packages.Package, t types.Type) (list []key) {
	seen := map[types.Type]bool{}
	var walk func(types.Type)
	walk = func(t types.Type) {
		if t == nil || seen[t] {
			return
		}
		seen[t] = true
		switch t := t.(type) {
		case *types.Named:
			o := t.Obj()
			if o.Pkg() != nil && strings.HasPrefix(o.Pkg().Path(), module) && o.Exported() {
				list = append(list, keyOf(p, o))
			}
			for a := range t.TypeArgs().Types() {
				walk(a)
			}
		case *types.Alias:
			walk(types.Unalias(t))
		case *types.Pointer:
			walk(t.Elem())
		case *types.Slice:
			walk(t.Elem())
		case *types.Array:
			walk(t.Elem())
		case *types.Chan:
			walk(t.Elem())
		case *types.Map:
			walk(t.Key())
			walk(t.Elem())
		case *types.Signature:
			for v := range t.Params().Variables() {
				walk(v.Type())
			}
			for v := range t.Results().Variables() {
				walk(v.Type())
			}
		case *types.Struct:
			for f := range t.Fields() {
				walk(f.Type())
			}
		}
	}
	walk(t)
	return list
}

// unused returns the identifiers that no other package uses and no exception permits.
func (s *survey) unused() (list []string) {
	for _, m := range s.methods {
		if id := s.declared[m.key]; id != nil && !s.used[m.key] && s.needed(m) {
			id.permitted = true
		}
	}
	// Types in signatures of identifiers in use.
	for changed := true; changed; {
		changed = false
		for k, id := range s.declared {
			if !s.used[k] && !id.permitted {
				continue
			}
			for _, n := range id.needs {
				if other := s.declared[n]; other != nil && !s.used[n] && !other.permitted {
					other.permitted, changed = true, true
				}
			}
		}
	}
	groups := map[string]bool{}
	for k, id := range s.declared {
		if id.group != "" && s.used[k] {
			groups[id.group] = true
		}
	}
	known := map[string]bool{}
	for k, id := range s.declared {
		if s.used[k] || id.permitted || groups[id.group] || inPublic(id.name) {
			continue
		}
		if _, excepted := exceptions[id.name]; excepted {
			known[id.name] = true
			continue
		}
		list = append(list, fmt.Sprintf("%s: %s %s", id.where, id.kind, id.name))
	}
	for name := range exceptions {
		if !known[name] {
			list = append(list, fmt.Sprintf("integration/exported/exceptions.go: %s is in use or does not exist", name))
		}
	}
	slices.Sort(list)
	return list
}

// needed reports whether the type of a method implements an interface with this method.
func (s *survey) needed(m method) bool {
	if slices.Contains([]string{"Is", "As", "Unwrap"}, m.name) {
		return true // package errors calls the method by an unnamed interface
	}
	for _, i := range s.interfaces {
		o, _, _ := types.LookupFieldOrMethod(i, false, nil, m.name)
		if o == nil {
			continue
		}
		if types.Implements(m.owner, i) || types.Implements(types.NewPointer(m.owner), i) {
			return true
		}
		// Export data and source have different types for one interface: the signature of the method decides.
		if i.NumMethods() == 1 && sameSignature(m, o) {
			return true
		}
	}
	return false
}

func sameSignature(m method, o types.Object) bool {
	own, _, _ := types.LookupFieldOrMethod(types.NewPointer(m.owner), true, nil, m.name)
	return own != nil && types.TypeString(own.Type(), nil) == types.TypeString(o.Type(), nil)
}
