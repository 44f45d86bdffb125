package ncclfile

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// PairOf returns the pair of two devices with the given names.
func PairOf(t *testing.T, pairs []graph.Pair, from, to string) graph.Pair {
	t.Helper()
	for _, p := range pairs {
		if p.From == from && p.To == to {
			return p
		}
	}
	t.Fatalf("no pair from %s to %s", from, to)
	return graph.Pair{}
}

// ReadXML reads a file of NCCL from a text.
func ReadXML(t *testing.T, text string) *topo.Host {
	t.Helper()
	h, err := ncclxml.Read(strings.NewReader(text), "test.xml")
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// ReadAsNCCLDoes parses text byte by byte like src/graph/xml.cc of NCCL 2.30, and compares the
// result with a parser of XML.
func ReadAsNCCLDoes(t *testing.T, text string) {
	t.Helper()
	r := bytes.NewReader([]byte(text))
	next := func() byte {
		c, err := r.ReadByte()
		if err != nil {
			t.Fatalf("NCCL would meet an unexpected end in\n%s", text)
		}
		return c
	}
	// token is xmlGetToken with xmlGetValue.
	token := func() (name, value string, last byte) {
		for {
			c := next()
			if c == '=' {
				if c := next(); c != '"' {
					t.Fatalf("NCCL wants a double quote after %s=", name)
				}
				for {
					if c := next(); c == '"' {
						return name, value, next()
					} else if value += string([]byte{c}); len(value) > maxValue {
						t.Fatalf("NCCL has no room for %s", value)
					}
				}
			}
			if strings.IndexByte(" >/\n\r", c) >= 0 {
				return name, "", c
			}
			name += string([]byte{c})
		}
	}
	var got []string
	for {
		c, err := r.ReadByte()
		for err == nil && (c == ' ' || c == '\n' || c == '\r') {
			c, err = r.ReadByte()
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if c != '<' {
			t.Fatalf("NCCL expects <, and there is %q", c)
		}
		name, _, last := token()
		if strings.HasPrefix(name, "!--") {
			for seen := name[3:] + string([]byte{last}); !strings.HasSuffix(seen, "-->"); {
				seen += string([]byte{next()})
			}
			continue
		}
		if name == "" && last == '/' {
			name, _, last = token()
			got = append(got, "/"+name)
		} else {
			line := name
			for n := 0; last == ' '; n++ {
				var key, value string
				if n == 16 {
					t.Fatalf("NCCL has no room for more attributes in <%s>", line)
				}
				key, value, last = token()
				line += " " + key + "=" + value
			}
			got = append(got, line)
			if last == '/' {
				_, _, last = token()
				got = append(got, "/"+name)
			}
		}
		if last != '>' {
			t.Fatalf("NCCL expects > after %s, and there is %q", name, last)
		}
	}
	want := elementsOf(t, text)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("written (-) and read by NCCL (+):\n%s", diff)
	}
}

// maxValue is NCCL's bound on an attribute, in bytes.
const maxValue = 253

// elementsOf returns the elements of an XML text, each with attributes, and the ends of elements.
func elementsOf(t *testing.T, text string) (list []string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		switch e := token.(type) {
		case xml.StartElement:
			line := e.Name.Local
			for _, a := range e.Attr {
				line += " " + a.Name.Local + "=" + a.Value
			}
			list = append(list, line)
		case xml.EndElement:
			list = append(list, "/"+e.Name.Local)
		}
	}
	return list
}
