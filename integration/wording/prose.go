package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Limits of a package, in occurrences per 1,000 words. Comments of opencontainers/cgroups
// have 1.1 and 19, of containerd/nri 0.6 and 16.
const (
	maxRelatives = 2
	maxPronouns  = 30
)

// score is the measure of one package.
type score struct {
	words     int
	relatives int    // free relatives: the matches of relative
	pronouns  int    // pronouns and quantifiers without a noun
	tests     int    // names of tests without the form that checkTestName requires
	long      int    // lines above maxColumns
	longAt    string // the last file with such lines, and its first line
}

// per returns occurrences per 1,000 words.
func (s score) per(n int) float64 { return float64(n) * 1000 / float64(max(s.words, 1)) }

var (
	word     = regexp.MustCompile(`[A-Za-z']+`)
	relative = regexp.MustCompile(`(?i)\b(what|whoever|whatever|who)\b`)
	pronoun  = regexp.MustCompile(`(?i)\b(its?|they|them|their|those|these|ones?|others?|none|all|each|nobody|somebody)\b`)
	ending   = regexp.MustCompile(`[.;:]\s+`)
)

// add counts the words of a comment or an error. A sentence of at most two words is a label.
func (s *score) add(text string) {
	for _, sentence := range ending.Split(text, -1) {
		if len(strings.Fields(sentence)) <= 2 {
			continue
		}
		s.words += len(word.FindAllString(sentence, -1))
		s.pronouns += len(pronoun.FindAllString(sentence, -1))
		for _, at := range relative.FindAllStringIndex(sentence, -1) {
			// A question mark after the word: the text quotes a question.
			if !strings.HasPrefix(strings.TrimLeft(sentence[at[1]:], " \t"), "?") {
				s.relatives++
			}
		}
	}
}

// measure adds the comments, the errors and the names of tests of a Go file.
func (s *score) measure(name string, source []byte) {
	files := token.NewFileSet()
	file := files.AddFile(name, files.Base(), len(source))
	var scan scanner.Scanner
	scan.Init(file, source, nil, scanner.ScanComments)
	var block []string // lines of one comment
	last := 0          // last line of block
	flush := func() {
		s.add(strings.Join(block, " "))
		block = nil
	}
	var before [4]string // the last tokens, without comments
	for {
		pos, kind, text := scan.Scan()
		if kind == token.EOF {
			break
		}
		if kind == token.COMMENT {
			line := file.Line(pos)
			if line != last+1 {
				flush()
			}
			last = line + strings.Count(text, "\n")
			if line := comment(text); line != "" {
				block = append(block, line)
			}
			continue
		}
		if kind == token.STRING && before[3] == "(" && isError(before[1], before[2]) {
			if message, err := strconv.Unquote(text); err == nil {
				flush()
				s.add(message)
			}
		}
		if kind == token.IDENT && before[3] == "func" && strings.HasSuffix(name, "_test.go") && checkTestName(text) != nil {
			s.tests++
		}
		if kind != token.SEMICOLON || text == ";" { // the scanner inserts a semicolon at a newline
			if text == "" {
				text = kind.String()
			}
			copy(before[:], before[1:])
			before[3] = text
		}
	}
	flush()
}

// isError reports whether a call makes an error, from the two tokens before "(".
func isError(dot, function string) bool {
	return function == "Errorf" || dot == "." && function == "New"
}

// comment returns the text of a comment; empty for a directive.
func comment(text string) string {
	if text, found := strings.CutPrefix(text, "//"); found {
		for _, directive := range []string{"go:", "nolint", "line ", " Code generated", " Copyright", "export ", "lint:"} {
			if strings.HasPrefix(text, directive) {
				return ""
			}
		}
		return strings.TrimSpace(text)
	}
	return strings.TrimSpace(strings.TrimSuffix(strings.TrimPrefix(text, "/*"), "*/"))
}

// skipped lists the folders that wording does not check.
var skipped = map[string]bool{".git": true, "bin": true, "dist": true}

// eachFile visits the Go files below root, except testdata and the skipped folders. Paths are relative to
// root and use slashes.
func eachFile(root string, skipped map[string]bool, visit func(path string, source []byte) error) error {
	return filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		at = filepath.ToSlash(at)
		if e.IsDir() {
			if skipped[at] || path.Base(at) == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(at, ".go") {
			return nil
		}
		source, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return visit(at, source)
	})
}

// measureAll measures the packages below root. The key is the path relative to root.
func measureAll(root string) (map[string]score, error) {
	found := map[string]score{}
	err := eachFile(root, skipped, func(at string, source []byte) error {
		if strings.HasSuffix(at, ".pb.go") {
			return nil
		}
		s := found[path.Dir(at)]
		s.measure(at, source)
		if long := longLines(source); len(long) > 0 {
			s.long += len(long)
			s.longAt = fmt.Sprintf("%s:%d", at, long[0])
		}
		found[path.Dir(at)] = s
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("measure the packages of %s: %w", root, err)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("measure the packages of %s: no Go file found; name the root of the repository with -root",
			root)
	}
	return found, nil
}
