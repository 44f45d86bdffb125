package topo

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/internal/fault"
)

// maxInput bounds a topology file, bytes; real ones have some ten thousand, and
// captures some hundred thousand.
const maxInput = 16 << 20

var errTooLarge = fmt.Errorf("it is larger than %d MiB, which no topology is", maxInput>>20)

// standardInput is the name of a file that stands for standard input.
const standardInput = "-"

// readInputFile reads a file of any kind that ReadInput knows, or standard input.
func readInputFile(name string) (*Host, error) {
	f, err := os.Stdin, error(nil)
	if name == standardInput {
		name = "standard input"
	} else {
		f, err = os.Open(name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading a topology: %w", err)
	}
	defer func() { _ = f.Close() }() // opened for reading: closing loses nothing
	data, err := io.ReadAll(io.LimitReader(f, maxInput+1))
	if err != nil {
		return nil, fmt.Errorf("reading a topology: %w", err)
	}
	return ReadInput(name, data)
}

// ReadInput reads a host from a file of any kind that there is a reader for,
// told by its content: a capture of Peerlane ([ReadCapture]), a topology file
// of NCCL ([ReadNCCLXML]) or of hwloc ([ReadHwlocXML]), or what `nvidia-smi topo
// -m` prints ([ReadSMI]). name is for messages.
func ReadInput(name string, data []byte) (*Host, error) {
	if len(data) > maxInput {
		return nil, fmt.Errorf("reading the topology %s: %w", name, errTooLarge)
	}
	kind, err := inputKind(data)
	if err != nil {
		return nil, fmt.Errorf("reading the topology %s: %w", name, err)
	}
	data = bytes.TrimPrefix(data, []byte(byteOrderMark))
	switch kind {
	case SourceCapture:
		h, err := ReadCapture(bytes.NewReader(data))
		if err != nil {
			return nil, fmt.Errorf("reading the capture %s: %w", name, err)
		}
		h.Source.File = name
		return h, nil
	case SourceNCCLXML:
		return ReadNCCLXML(bytes.NewReader(data), name)
	case SourceHwlocXML:
		return ReadHwlocXML(bytes.NewReader(data), name)
	}
	return ReadSMI(data, name)
}

const (
	byteOrderMark = "\xef\xbb\xbf" // of UTF-8; editors on other systems write it
	knownInputs   = "a capture (peerlane topo capture), a topology of NCCL (NCCL_TOPO_DUMP_FILE), one of hwloc (lstopo --of xml), and the text of nvidia-smi topo -m are known"
)

// inputKind tells by its content which reader a file is for.
func inputKind(data []byte) (kind string, err error) {
	text := bytes.TrimSpace(bytes.TrimPrefix(data, []byte(byteOrderMark)))
	switch {
	case len(text) == 0:
		return "", &fault.Error{Code: fault.UnknownTopology, Operation: "find the format of the file", Cause: errors.New("it is empty"), Remedy: knownInputs}
	case bytes.HasPrefix(data, []byte{0x1f, 0x8b}): // gzip, RFC 1952
		return SourceCapture, nil
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}), bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		return "", errors.New("it is text in UTF-16; save it in UTF-8")
	case text[0] == '<':
		return xmlKind(text)
	}
	number := 0
	for line := range bytes.Lines(text) {
		number++
		if len(line) > 1<<16 || bytes.IndexByte(line, 0) >= 0 {
			break // no text of nvidia-smi has such lines
		}
		if l := splitLine(number, string(line)); smiHeader(l) || smiRow(l) {
			return SourceSMI, nil
		}
	}
	return "", &fault.Error{Code: fault.UnknownTopology, Operation: "find the format of the file", Cause: fmt.Errorf("it begins with %s, which is no topology", quoteStart(text)), Remedy: knownInputs}
}

// xmlKind tells by the root element, which comments and declarations may stand
// before.
func xmlKind(text []byte) (string, error) {
	text = withoutDashes(text)
	if err := checkElements(text); err != nil {
		return "", err
	}
	d := xml.NewDecoder(bytes.NewReader(text))
	for {
		token, err := d.RawToken()
		if err != nil {
			line, column := d.InputPos()
			if errors.Is(err, io.EOF) {
				err = errors.New("it has no element")
			}
			return "", &PlaceError{line, column, err}
		}
		root, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		switch root.Name.Local {
		case "system":
			return SourceNCCLXML, nil
		case "topology":
			return SourceHwlocXML, nil
		}
		return "", &fault.Error{Code: fault.UnknownTopology, Operation: "find the format of the file", Cause: fmt.Errorf("its root is <%s>; a topology of NCCL begins with <system>, one of hwloc with <topology>", root.Name.Local)}
	}
}

// withoutDashes replaces "-" within comments by "." in a copy of the text, if need be.
// Some topology files have comments such as <!------ text ------>, which the standard and
// the decoder refuse. Lines and columns stay.
func withoutDashes(text []byte) []byte {
	out := text
	for at := 0; ; {
		rest := text[at:]
		i := bytes.IndexByte(rest, '<')
		if i < 0 {
			return out
		}
		begins, ends := "", ""
		for _, form := range [][2]string{{"<!--", "-->"}, {"<![CDATA[", "]]>"}, {"<?", "?>"}, {"<", ""}} {
			if bytes.HasPrefix(rest[i:], []byte(form[0])) {
				begins, ends = form[0], form[1]
				break
			}
		}
		at += i + len(begins)
		length := bytes.Index(text[at:], []byte(ends))
		if length < 0 {
			return out // the decoder names the place
		}
		if begins == "<!--" && bytes.IndexByte(text[at:at+length], '-') >= 0 {
			if &out[0] == &text[0] {
				out = bytes.Clone(text)
			}
			for j := at; j < at+length; j++ {
				if out[j] == '-' {
					out[j] = '.'
				}
			}
		}
		at += length + len(ends)
	}
}

// maxElement bounds a piece of XML between two ">", bytes. The decoder takes
// some thirty times the memory for an element with many attributes.
const maxElement = 1 << 20

func checkElements(text []byte) error {
	line := 1
	for rest := text; ; {
		end := bytes.IndexByte(rest, '>')
		length := end
		if end < 0 {
			length = len(rest)
		}
		if length > maxElement {
			return &PlaceError{line, 1, fmt.Errorf("an element of more than %d bytes begins here or on the lines below, which no topology has", maxElement)}
		}
		if end < 0 {
			return nil
		}
		line += bytes.Count(rest[:end], []byte("\n"))
		rest = rest[end+1:]
	}
}

// quoteStart quotes the beginning of a text that a message can hold.
func quoteStart(text []byte) string {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	const most = 40
	if len(line) > most {
		return strconv.QuoteToASCII(strings.ToValidUTF8(string(line[:most]), "?")) + " .."
	}
	return strconv.QuoteToASCII(strings.TrimSpace(string(line)))
}
