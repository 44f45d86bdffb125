package recorded

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// header begins an archive.
const header = `# The files of a host's sysfs and procfs about GPUs, RDMA devices and the devices
# between. ` + "`make vm-capture`" + ` reads the files from the kernel of the test machine and
# replaces this file: it overwrites a change made by hand.
#
# DIRECTORY/            and below it, indented:
#     NAME = TEXT       a file of one line
#     NAME -> TARGET    a symbolic link
#     NAME:             a file of several lines, or of bytes:
#         | LINE        a line
#         x AT BYTES    16 bytes from that offset; omitted bytes are 0
#         x SIZE        the end of the bytes
# AT, BYTES and SIZE are hexadecimal.
`

const (
	// rowBytes is the number of bytes of a line.
	rowBytes = 16
	// maxBytes limits a file of bytes: rows of zeros are not written, and a short text could
	// describe a huge file. The longest real file is the extended configuration space of a PCI
	// function.
	maxBytes = 4096
)

// archive is a tree of files by path; header describes the text form.
type archive map[string]entry

type entry struct {
	kind   kind
	data   []byte // of a file
	target string // of a link
}

// kind is the type of an entry.
type kind int

const (
	directory kind = iota
	file
	link
)

// namePattern excludes names that are ambiguous in the text, and "." and "..".
var namePattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.:,+@-]*$`)

// Causes of a faulty archive.
var (
	errName         = errors.New("is not a valid name in an archive")
	errNotDirectory = errors.New("cannot be a directory")
	errTwice        = errors.New("occurs twice")
	errNoDirectory  = errors.New("is no directory")
	errFirst        = errors.New("an entry before any directory")
	errEntry        = errors.New("is neither a file nor a link")
	errTextAlone    = errors.New("text without a file")
	errHasBytes     = errors.New("has bytes already, and cannot have text")
	errBytesAlone   = errors.New("bytes without a file")
	errLateBytes    = errors.New("unexpected bytes after text, or after the size")
	errOffset       = errors.New("offsets must rise")
	errRow          = errors.New("is not a row")
	errNoSize       = errors.New("ends without its size, `x SIZE`")
)

// lineError is an error in a line of an archive.
type lineError struct {
	line  int  // from 1
	after bool // the line is the last line, and a following line is missing
	err   error
}

func (e *lineError) Error() string {
	if e.after {
		return fmt.Sprintf("after line %d: %v", e.line, e.err)
	}
	return fmt.Sprintf("line %d: %v", e.line, e.err)
}

func (e *lineError) Unwrap() error { return e.err }

// addDirectory adds a directory and its parents. Adding a directory twice is no error.
func (a archive) addDirectory(dir string) error {
	at := ""
	for name := range strings.SplitSeq(dir, "/") {
		if !namePattern.MatchString(name) {
			return fmt.Errorf("%q in %q %w", name, dir, errName)
		}
		at = path.Join(at, name)
		if e, ok := a[at]; !ok {
			a[at] = entry{kind: directory}
		} else if e.kind != directory {
			return fmt.Errorf("%s %w: %s is not a directory", dir, errNotDirectory, at)
		}
	}
	return nil
}

// addFile adds a file to a directory.
func (a archive) addFile(dir, name string, data []byte) error {
	if !isText(data) && len(data) > maxBytes {
		return fmt.Errorf("%s in %s has %d bytes of binary data, more than %d", name, dir, len(data),
			maxBytes)
	}
	return a.add(dir, name, entry{kind: file, data: data})
}

// addLink adds a symbolic link to a directory. The link must stay inside the archive.
//
// addLink accepts only a target that first goes up and then down. No directory of an archive is
// below a link, so the way up is known, and the way down cannot leave the archive.
func (a archive) addLink(dir, name, target string) error {
	if path.Clean(target) != target || !filepath.IsLocal(path.Join(dir, target)) {
		return fmt.Errorf("link %s in %s to %q leads out of the archive", name, dir, target)
	}
	for element := range strings.SplitSeq(target, "/") {
		if element != ".." && !namePattern.MatchString(element) {
			return fmt.Errorf("link %s in %s to %q: %q %w", name, dir, target, element, errName)
		}
	}
	return a.add(dir, name, entry{kind: link, target: target})
}

func (a archive) add(dir, name string, e entry) error {
	if err := a.addDirectory(dir); err != nil {
		return err
	}
	if !namePattern.MatchString(name) {
		return fmt.Errorf("%q in %s %w", name, dir, errName)
	}
	at := path.Join(dir, name)
	if _, ok := a[at]; ok {
		return fmt.Errorf("%s %w", at, errTwice)
	}
	a[at] = e
	return nil
}

// paths returns the paths in the order of the text: a directory, then the entries of the
// directory.
func (a archive) paths() []string {
	paths := make([]string, 0, len(a))
	for p := range a {
		paths = append(paths, p)
	}
	key := func(p string) string { return strings.ReplaceAll(p, "/", "\x00") }
	slices.SortFunc(paths, func(a, b string) int { return strings.Compare(key(a), key(b)) })
	return paths
}

// String returns the archive's text; equal archives have equal texts.
func (a archive) String() string {
	held := map[string][]string{} // names by directory
	paths := a.paths()
	for _, p := range paths {
		dir := path.Dir(p)
		held[dir] = append(held[dir], path.Base(p))
	}
	var b strings.Builder
	b.WriteString(header)
	for _, dir := range paths {
		if a[dir].kind != directory {
			continue
		}
		names := slices.DeleteFunc(slices.Clone(held[dir]), func(name string) bool {
			return a[path.Join(dir, name)].kind == directory
		})
		if len(names) == 0 && len(held[dir]) > 0 {
			continue // the subdirectories imply the directory
		}
		slices.SortStableFunc(names, func(x, y string) int {
			return a[path.Join(dir, x)].rank() - a[path.Join(dir, y)].rank()
		})
		fmt.Fprintf(&b, "\n%s/\n", dir)
		for _, name := range names {
			a[path.Join(dir, name)].format(&b, name)
		}
	}
	return b.String()
}

// rank is the position among the entries of a directory: short entries first.
func (e entry) rank() int {
	switch {
	case isLine(e.data): // a link has no data
		return 0
	case e.kind == link:
		return 1
	case isText(e.data):
		return 2
	}
	return 3
}

func (e entry) format(b *strings.Builder, name string) {
	switch e.rank() {
	case 0:
		fmt.Fprintf(b, "    %s = %s", name, e.data)
	case 1:
		fmt.Fprintf(b, "    %s -> %s\n", name, e.target)
	case 2:
		fmt.Fprintf(b, "    %s:\n", name)
		for line := range bytes.Lines(e.data) {
			b.WriteString("        |")
			if len(line) > 1 { // no trailing space
				b.WriteString(" ")
			}
			b.Write(line)
		}
	case 3:
		fmt.Fprintf(b, "    %s:\n", name)
		at := 0
		for row := range slices.Chunk(e.data, rowBytes) {
			if len(bytes.Trim(row, "\x00")) > 0 {
				fmt.Fprintf(b, "        x %04x % x\n", at, row)
			}
			at += len(row)
		}
		fmt.Fprintf(b, "        x %04x\n", at)
	}
}

// isLine reports whether data is a single non-empty line of text.
func isLine(data []byte) bool {
	return len(data) > 1 && bytes.Count(data, []byte("\n")) == 1 && isText(data)
}

// isText reports whether data is empty or consists of whole lines of printable characters.
func isText(data []byte) bool {
	if len(data) > 0 && data[len(data)-1] != '\n' || !utf8.Valid(data) {
		return false
	}
	return !bytes.ContainsFunc(data, func(r rune) bool { return !unicode.IsPrint(r) && r != '\t' && r != '\n' })
}

// parse parses an archive's text. parse trusts no input: an accepted entry stays inside the
// directory of the archive.
func parse(text string) (archive, error) {
	p := parser{archive: archive{}}
	n := 0
	for line := range strings.Lines(text) {
		n++
		if err := p.line(strings.TrimSuffix(line, "\n")); err != nil {
			return nil, &lineError{n, false, err}
		}
	}
	if err := p.endFile(); err != nil {
		return nil, &lineError{n, true, err}
	}
	return p.archive, nil
}

type parser struct {
	archive archive
	dir     string    // the current directory
	file    *openFile // the current file, or nil
}

// openFile is a file whose lines are being read.
type openFile struct {
	name  string
	data  []byte
	lines bool // the file has lines of text
	rows  bool // the file has rows of bytes
	ended bool // the size of the rows was read
}

// rowPattern distinguishes rows from a file or a link of the name x.
var rowPattern = regexp.MustCompile(`^x ([0-9a-f]+)(?: ([0-9a-f ]+))?$`)

func (p *parser) line(line string) error {
	entry := strings.TrimLeft(line, " \t")
	indented := entry != line
	if indented && strings.HasPrefix(entry, "|") {
		return p.textLine(strings.TrimPrefix(entry[1:], " "))
	}
	if row := rowPattern.FindStringSubmatch(entry); indented && row != nil {
		return p.row(row[1], row[2])
	}
	if err := p.endFile(); err != nil {
		return err
	}
	switch {
	case entry == "" || strings.HasPrefix(entry, "#"):
		return nil
	case !indented:
		dir, ok := strings.CutSuffix(line, "/")
		if !ok {
			return fmt.Errorf("%q %w", line, errNoDirectory)
		}
		p.dir = dir
		return p.archive.addDirectory(dir)
	case p.dir == "":
		return errFirst
	}
	return p.entry(entry)
}

func (p *parser) entry(entry string) error {
	name, rest, _ := strings.Cut(entry, " ")
	if text, ok := strings.CutPrefix(rest, "= "); ok {
		return p.archive.addFile(p.dir, name, []byte(text+"\n"))
	}
	if target, ok := strings.CutPrefix(rest, "-> "); ok {
		return p.archive.addLink(p.dir, name, target)
	}
	if name, ok := strings.CutSuffix(entry, ":"); ok {
		p.file = &openFile{name: name}
		return nil
	}
	return fmt.Errorf("%q %w", entry, errEntry)
}

func (p *parser) textLine(text string) error {
	f := p.file
	if f == nil {
		return errTextAlone
	}
	if f.rows {
		return fmt.Errorf("%s %w", f.name, errHasBytes)
	}
	f.lines = true
	f.data = append(append(f.data, text...), '\n')
	return nil
}

// row adds a row of bytes; a row without bytes ends the file.
func (p *parser) row(offset, text string) error {
	f := p.file
	if f == nil {
		return errBytesAlone
	}
	if f.lines || f.ended {
		return fmt.Errorf("%s: %w", f.name, errLateBytes)
	}
	at, err := strconv.ParseUint(offset, 16, 32)
	if err != nil || at > maxBytes || int(at) < len(f.data) {
		return fmt.Errorf("%s of %d bytes continues at %s, hexadecimal: %w, up to %#x", f.name, len(f.data), offset,
			errOffset,
			maxBytes)
	}
	f.rows = true
	f.data = append(f.data, make([]byte, int(at)-len(f.data))...)
	if text == "" {
		f.ended = true
		return nil
	}
	row, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	if err != nil || at%rowBytes != 0 || len(row) > rowBytes || len(f.data)+len(row) > maxBytes {
		return fmt.Errorf("%s at %s: %q %w of up to %d bytes that begins at a multiple of that", f.name, offset, text, errRow,
			rowBytes)
	}
	f.data = append(f.data, row...)
	return nil
}

// endFile adds the current file.
func (p *parser) endFile() error {
	f := p.file
	if f == nil {
		return nil
	}
	p.file = nil
	if f.rows && !f.ended {
		return fmt.Errorf("%s %w", f.name, errNoSize)
	}
	return p.archive.addFile(p.dir, f.name, f.data)
}
