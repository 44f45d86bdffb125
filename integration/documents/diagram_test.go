package documents

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDiagramsAreCurrent(t *testing.T) {
	for name, want := range diagrams() {
		path := filepath.Join(root, "docs", name)
		current(t, path, []byte(want))
		page := filepath.Join(root, "docs", strings.TrimSuffix(name, ".svg")+".md")
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "]("+name+")") {
			t.Errorf("%s does not show %s", page, name)
		}
	}
}

func TestDiagramIsWellFormedXML(t *testing.T) {
	for name, text := range diagrams() {
		d := xml.NewDecoder(strings.NewReader(text))
		boxes := 0
		for {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if start, ok := token.(xml.StartElement); ok && start.Name.Local == "rect" {
				boxes++
			}
		}
		if boxes < 5 {
			t.Errorf("%s has %d boxes", name, boxes)
		}
	}
}
