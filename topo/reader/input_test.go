package reader

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

func TestInputKindFollowsContent(t *testing.T) {
	const mark = "\xef\xbb\xbf"
	hwloc := machineXML(hwlocDevice("0000:01:00.0", "0302 [10de:2330] [10de:16c1] a1", "63.015385", ""), "", "", "")
	for name, tt := range map[string]struct{ text, kind string }{
		"NCCL":                  {topotest.SmallHost, topo.SourceNCCLXML},
		"NCCL, a mark and CRLF": {mark + strings.ReplaceAll(topotest.SmallHost, "\n", "\r\n"), topo.SourceNCCLXML},
		"NCCL, no declaration": {`<!-- <topology> --> <system version="1"><cpu numaid="0"/></system>`,
			topo.SourceNCCLXML},
		"hwloc":                    {hwloc, SourceHwlocXML},
		"hwloc behind blank lines": {"\n\n" + hwloc[strings.Index(hwloc, "<!--"):], SourceHwlocXML},
		"nvidia-smi":               {topotest.SMIMatrix, sourceSMI},
		"nvidia-smi, a mark":       {mark + topotest.SMIMatrix, sourceSMI},
		"nvidia-smi, prose above":  {"<user@host> nvidia-smi topo -m\n"[1:] + topotest.SMIMatrix, sourceSMI},
	} {
		// The file name does not select the reader.
		h, err := Input("host.tar.gz", []byte(tt.text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if h.Source != (topo.Source{Kind: tt.kind, File: "host.tar.gz"}) {
			t.Errorf("%s: source %+v", name, h.Source)
		}
	}
}

func TestInputOfUnknownKindFails(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want error
	}{
		"nothing":            {" \r\n", fault.UnknownTopology},
		"a text":             {"# some notes\nof mine\n", fault.UnknownTopology},
		"bytes":              {"\x7fELF\x02\x00\x01" + strings.Repeat("\x00", 100), fault.UnknownTopology},
		"a long line":        {strings.Repeat("x", 1<<20), fault.UnknownTopology},
		"JSON":               {`{"gpus": []}`, fault.UnknownTopology},
		"a torn capture":     {"\x1f\x8b\x08", errNotGzip},
		"another XML":        {`<graphs version="1"/>`, fault.UnknownTopology},
		"XML without root":   {"<!-- nothing -->", errNoElement},
		"a huge element":     {"<topology\n" + strings.Repeat(`a="b" `, maxElement/6+1) + "/>", at(1, 1)},
		"torn XML":           {"<sys", at(1, 5)},
		"UTF-16":             {"\xff\xfe<\x00s\x00", errUTF16},
		"a matrix's row":     {"GPU0\t X \tSYS\n", at(1, 1)},
		"a huge file":        {strings.Repeat(" ", textfile.MaxInput+1), textfile.ErrTooLarge},
		"no GPU":             {"No devices were found\n", fault.UnknownTopology},
		"a torn NCCL file":   {topotest.SmallHost[:400], at(7, 13)},
		"a torn hwloc file":  {`<topology version="2.0"><object`, at(1, 32)},
		"an old hwloc file":  {`<topology><object type="Machine"/></topology>`, at(1, 1)},
		"a matrix half gone": {topotest.SMIMatrix[:strings.Index(topotest.SMIMatrix, "PXB")], at(4, 21)},
	} {
		h, err := Input("some.file", []byte(tt.text))
		if h != nil || !testutil.HasError(err, tt.want) || !ofFile(err, "some.file") {
			t.Errorf("%s: %v; want an error with some.file and %v", name, err, tt.want)
		}
	}
}

func TestReadFileOfEveryKindSucceeds(t *testing.T) {
	dir := t.TempDir()
	for kind, text := range map[string]string{topo.SourceNCCLXML: topotest.SmallHost, sourceSMI: topotest.SMIMatrix} {
		file := filepath.Join(dir, kind)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		h, err := Read(file, topo.Options{})
		if err != nil || h.Source != (topo.Source{Kind: kind, File: file}) {
			t.Errorf("%s: %+v, %v", kind, h, err)
		}
	}
	var failed *fs.PathError
	if _, err := Read(dir, topo.Options{}); !errors.As(err, &failed) || failed.Path != dir {
		t.Errorf("a directory: %v", err)
	}
}

// TestEachFileOfTheCollectionIsRead reads files of NCCL and hwloc, and matrices of nvidia-smi.
func TestEachFileOfTheCollectionIsRead(t *testing.T) {
	for _, file := range topotest.Files(t, "testdata/*.xml", "*.[xt][mx][lt]") {
		if _, err := Read(file, topo.Options{}); err != nil {
			t.Error(err)
		}
	}
}

func FuzzReadInput(f *testing.F) {
	f.Add([]byte(topotest.SmallHost))
	f.Add([]byte(topotest.SMIMatrix))
	f.Add([]byte(machineXML("", "", "", "")))
	f.Add([]byte("\x1f\x8b\x08"))
	f.Fuzz(func(t *testing.T, data []byte) {
		kind, err := inputKind(data)
		if (kind == "") != (err != nil) {
			t.Errorf("kind %q, error %v", kind, err)
		}
		if h, err := Input("fuzz", data); (h == nil) != (err != nil) {
			t.Errorf("host %v, error %v", h, err)
		}
	})
}

func TestReadInputAcceptsCommentsWithDashes(t *testing.T) {
	for _, comment := range []string{"<!------ a skeleton ------>", "<!------>", "<!---->", "<!-- a -- b -->",
		"<!--- x --->", "<!-- <cpu> -- </cpu> -->"} {
		text := comment + "\n" + strings.Replace(topotest.SmallHost[strings.Index(topotest.SmallHost, "<system"):], "<cpu",
			comment+"<cpu", 1)
		h, err := Input("some.file", []byte(text))
		if err != nil {
			t.Errorf("%s: %v", comment, err)
			continue
		}
		if len(h.CPUs) != 2 || len(h.GPUs) != 5 || len(h.NICs) != 2 {
			t.Errorf("%s: %d CPUs, %d GPUs, %d NICs", comment, len(h.CPUs), len(h.GPUs), len(h.NICs))
		}
	}
	// Dashes elsewhere stay, and so do the places that errors name.
	h, err := Input("some.file", []byte(`<system version="1"><?a <!-- -- ?><cpu numaid="-1"><![CDATA[<!-- -- ]]><nic><net name="a--b"/></nic></cpu></system>`))
	if err != nil || len(h.NICs) != 1 || h.NICs[0].Name != "a--b" {
		t.Errorf("%+v, %v", h, err)
	}
	for text, line := range map[string]int{
		"<system version=\"1\">\n<!-- -- -->\n<!-- -- --> <cpu": 3,
		"<!-- -- ": 1,
	} {
		var place *textfile.PlaceError
		if _, err := Input("some.file", []byte(text)); !errors.As(err, &place) || place.Line != line {
			t.Errorf("%q: %v, want line %d", text, err, line)
		}
	}
}
