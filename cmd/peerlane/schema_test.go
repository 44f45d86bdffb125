package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// schema is the part of JSON Schema in which docs/topology.schema.json lists fields.
type schema struct {
	Type       string
	Required   []string
	Properties map[string]schema
	Items      *schema
}

func (s schema) check(t *testing.T, at string, value any) {
	t.Helper()
	switch v := value.(type) {
	case map[string]any:
		for _, name := range s.Required {
			if _, ok := v[name]; !ok {
				t.Errorf("%s has no %q", at, name)
			}
		}
		for name, inner := range v {
			if s.Properties == nil {
				break // the schema lists no fields here
			}
			if field, known := s.Properties[name]; known {
				field.check(t, at+"."+name, inner)
			} else {
				t.Errorf("the schema does not know %s.%s", at, name)
			}
		}
	case []any:
		if s.Type != "array" || s.Items == nil {
			t.Errorf("%s is a list, and the schema says %s", at, s.Type)
			return
		}
		for _, inner := range v {
			s.Items.check(t, at+"[]", inner)
		}
	case nil:
		t.Errorf("%s is null", at)
	}
}

func TestSchemaCoversTopoOutput(t *testing.T) {
	text, err := os.ReadFile("../../docs/topology.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var s schema
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(s.Required, "pairs") {
		t.Fatal("the schema asks for no paths")
	}
	_, host := recordedHost(t)
	file := filepath.Join(t.TempDir(), "topo.xml")
	twoHosts := strings.Replace(ncclXML, "<cpu ", `<cpu host_hash="0x1" `, 1)
	twoHosts = strings.TrimSuffix(strings.TrimSpace(twoHosts), "</system>") + `<cpu host_hash="0x2" numaid="0" arch="arm64">
		<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="90" rank="0" gdr="1"><c2c bw="44000" count="10"/><nvlink target="0:1:0.0" count="2" tclass="0x068000"/></gpu></pci>
		<pci busid="0000:02:00.0" class="0x020000" vendor="0x1d0f" device="0xefa1"/></cpu></system>`
	if err := os.WriteFile(file, []byte(twoHosts), 0o644); err != nil {
		t.Fatal(err)
	}
	empty := t.TempDir()
	for name, args := range map[string][]string{
		"the recorded host": host,
		"two hosts":         {"--input", file},
		"nothing":           {"--sysfs", empty, "--proc", empty},
	} {
		got := decode[map[string]any](t, append([]string{"topo", "-o", "json"}, args...)...)
		s.check(t, name, got)
	}
}
