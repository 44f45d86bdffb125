package main

import (
	"bytes"
	"fmt"
	"go/scanner"
	"go/token"
	"regexp"
	"strings"
	"unicode/utf8"
)

// maxColumns is the length of a line of Go, in characters; a tab counts as one.
const maxColumns = 120

const linesFile = "integration/wording/lines.txt"

const linesHeader = `# Lines of Go above 120 columns, by folder. The values may only fall:
# go run ./integration/wording -update
`

// checkLines compares the numbers of long lines with the limits of linesFile, which update lowers first.
func checkLines(root string, found map[string]score, update bool) error {
	long := map[string]int{}
	for folder, s := range found {
		if s.long > 0 {
			long[folder] = s.long
		}
	}
	l := countList{linesFile, linesHeader, func(folder string, count, limit int) error {
		return fmt.Errorf("%s: %d lines of more than %d columns, limit %d, such as %s; wrap them", folder, count, maxColumns,
			limit, found[folder].longAt)
	}, false}
	return l.check(root, long, update)
}

var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// longLines returns the numbers of the lines above maxColumns. Generated files have none. Lines of
// raw strings and of comments in /* */, such as recorded files and C, have any length.
func longLines(source []byte) []int {
	if generated.Match(source) {
		return nil
	}
	var long []int
	exempt := map[int]bool{}
	for i, line := range bytes.Split(source, []byte("\n")) {
		if utf8.RuneCount(line) > maxColumns {
			long = append(long, i+1)
		}
	}
	if long == nil {
		return nil
	}
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, func(token.Position, string) {}, scanner.ScanComments)
	for {
		at, kind, text := s.Scan()
		if kind == token.EOF {
			break
		}
		if kind == token.STRING && text[0] == '`' || kind == token.COMMENT && text[1] == '*' {
			first := file.Line(at)
			for line := first; line <= first+strings.Count(text, "\n"); line++ {
				exempt[line] = true
			}
		}
	}
	kept := long[:0]
	for _, line := range long {
		if !exempt[line] {
			kept = append(kept, line)
		}
	}
	return kept
}
