package reader

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// standardInput is the file name for standard input.
const standardInput = "-"

// readInputFile reads a file of any kind that Input supports, or standard input.
func readInputFile(name string) (*topo.Host, error) {
	f, err := os.Stdin, error(nil)
	if name == standardInput {
		name = "standard input"
	} else {
		f, err = os.Open(name)
	}
	if err != nil {
		return nil, fmt.Errorf("read a topology: %w", err)
	}
	defer func() { _ = f.Close() }() // opened for reading: closing loses nothing
	data, err := io.ReadAll(io.LimitReader(f, textfile.MaxInput+1))
	if err != nil {
		return nil, fmt.Errorf("read a topology: %w", err)
	}
	return Input(name, data)
}

// Input reads a host from a file, and selects the reader by the content: a capture of Peerlane
// (hostOfCapture), a topology file of NCCL ([ncclxml.Read]) or of hwloc (hwlocXML), or the output
// of `nvidia-smi topo -m` ([SMI]). Errors contain name.
func Input(name string, data []byte) (*topo.Host, error) {
	if len(data) > textfile.MaxInput {
		return nil, &textfile.FileError{Form: "topology", Name: name, Err: textfile.ErrTooLarge}
	}
	kind, err := inputKind(data)
	if err != nil {
		return nil, &textfile.FileError{Form: "topology", Name: name, Err: err}
	}
	data = bytes.TrimPrefix(data, []byte(byteOrderMark))
	switch kind {
	case sourceCapture:
		h, err := hostOfCapture(bytes.NewReader(data))
		if err != nil {
			return nil, &textfile.FileError{Form: "capture", Name: name, Err: err}
		}
		h.Source.File = name
		return h, nil
	case topo.SourceNCCLXML:
		return ncclxml.Read(bytes.NewReader(data), name)
	case SourceHwlocXML:
		return hwlocXML(bytes.NewReader(data), name)
	}
	return SMI(data, name)
}

const (
	byteOrderMark = "\xef\xbb\xbf" // of UTF-8; editors on other systems write the mark
	knownInputs   = "supported are a capture (peerlane topo capture), a topology of NCCL (NCCL_TOPO_DUMP_FILE) or " +
		"hwloc (lstopo --of xml), and the text of nvidia-smi topo -m"
)

// inputKind returns the kind of a file by the content.
func inputKind(data []byte) (kind string, err error) {
	text := bytes.TrimSpace(bytes.TrimPrefix(data, []byte(byteOrderMark)))
	switch {
	case len(text) == 0:
		return "", &fault.Error{Code: fault.UnknownTopology, Operation: "find the format of the file",
			Cause: errors.New("it is empty"), Remedy: knownInputs}
	case bytes.HasPrefix(data, []byte{0x1f, 0x8b}): // gzip, RFC 1952
		return sourceCapture, nil
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}), bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		return "", errUTF16
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
			return sourceSMI, nil
		}
	}
	return "", &fault.Error{Code: fault.UnknownTopology, Operation: "find the format of the file",
		Cause: fmt.Errorf("it begins with %s, which is not a topology", textfile.QuoteStart(text)), Remedy: knownInputs}
}

// xmlKind returns the kind of an XML file by the root element. Comments and declarations can
// precede the root element.
func xmlKind(text []byte) (string, error) {
	text = textfile.WithoutDashes(text)
	if err := checkElements(text); err != nil {
		return "", err
	}
	d := xml.NewDecoder(bytes.NewReader(text))
	for {
		token, err := d.RawToken()
		if err != nil {
			line, column := d.InputPos()
			if errors.Is(err, io.EOF) {
				err = errNoElement
			}
			return "", &textfile.PlaceError{Line: line, Column: column, Err: err}
		}
		root, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		switch root.Name.Local {
		case "system":
			return topo.SourceNCCLXML, nil
		case "topology":
			return SourceHwlocXML, nil
		}
		return "", &fault.Error{Code: fault.UnknownTopology, Operation: "find the format of the file",
			Cause: fmt.Errorf("its root is <%s>; a topology of NCCL begins with <system>, a topology of hwloc with <topology>",
				root.Name.Local)}
	}
}

// maxElement bounds a piece of XML between two ">", in bytes. The decoder allocates about 30 times
// the size of an element with many attributes.
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
			return &textfile.PlaceError{Line: line, Column: 1,
				Err: fmt.Errorf("an element of more than %d bytes, the maximum for a topology, begins here or below",
					maxElement)}
		}
		if end < 0 {
			return nil
		}
		line += bytes.Count(rest[:end], []byte("\n"))
		rest = rest[end+1:]
	}
}

// Read reads the topology file that input names, as Input does, or the running host if input names
// no file.
func Read(input string, o topo.Options) (*topo.Host, error) {
	if input == "" {
		return Sysfs(o)
	}
	return readInputFile(input)
}
