package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// measuredFile returns the path of the rates of `peerlane plan --measure`.
func (a *app) measuredFile() string { return filepath.Join(a.layout.State(), "measured.json") }

// maxMeasured is the maximum size of that file in bytes.
const maxMeasured = 16 << 20

// useMeasured sets the measured rates of a host from the file, if it exists. If the file is
// unreadable, useMeasured warns, and the model uses its constants.
func (a *app) useMeasured(h *topo.Host) {
	path := a.measuredFile()
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err == nil && (!info.Mode().IsRegular() || info.Size() > maxMeasured):
		err = fmt.Errorf("%s is no file that peerlane plan --measure wrote", path)
	}
	var m *topo.Measured
	if err == nil {
		var text []byte
		if text, err = os.ReadFile(path); err == nil {
			m, err = topo.ParseMeasured(text)
		}
	}
	if err != nil {
		a.log.Warnf("ignoring the measurements of this host; peerlane plan --measure replaces them: %s: %v", path, err)
		return
	}
	h.Measure(m)
}

// printModelLinks prints the rate that the model assumes for each link, and the source of the
// rate.
func (a *app) printModelLinks(h *topo.Host, p *planner.Plan) {
	if h.Measured == nil {
		return
	}
	t := a.newTable("LINK", "GB/S", "FROM")
	for _, l := range p.ModelLinks(h) {
		t.AppendRow(table.Row{l.Name, gigabytes(l.Rate), l.Source})
	}
	a.section("Links that neither PCIe nor NVLink tells", t)
}
