package picture

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // for the page
	"encoding/base64"
	"fmt"
	"html/template"
	"strconv"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

var (
	//go:embed page.html
	pageText string
	//go:embed page.css
	pageSheet string
	//go:embed page.js
	pageScript string

	page = template.Must(template.New("page").Parse(pageText))
)

// row is a lane in the page's table.
type row struct {
	Index            int
	GPU, Address     string
	Role, Kind       string
	Pinned           bool
	Through, NICs    string
	Rail, Path, Legs string
	Rates            *rates
	Reason           string
}

// rates are the figures of an estimate, formatted.
type rates struct {
	Planned, Today, Off                string
	AlonePlanned, AloneToday, AloneOff string
	Limit                              string
}

// HTML writes the picture as a page, with a table of the lanes, the reasons and the estimate
// below the picture. The page loads no other file, and the page's policy forbids loading.
func (p *Picture) HTML() ([]byte, error) {
	var svg writer
	p.svg(&svg, false)
	data := struct {
		Title      string
		ScriptHash string
		Style      template.CSS
		Script     template.JS
		SVG        template.HTML
		Lanes      []row
		Uniformity *rates
		Notes      []string
	}{
		Title:      p.title,
		ScriptHash: scriptHash(pageScript),
		Style:      template.CSS(css() + pageSheet),
		Script:     template.JS(pageScript),
		SVG:        template.HTML(svg.String()), // writer escapes the text
	}
	notes := p.tree.host.Notes
	if p.plan != nil {
		notes = p.plan.Notes
	}
	for _, n := range notes {
		data.Notes = append(data.Notes, plain(n))
	}
	for _, l := range p.lanes {
		data.Lanes = append(data.Lanes, p.row(l))
	}
	if p.estimate != nil && len(p.estimate.GPUs) > 0 {
		data.Uniformity = printed(p.estimate.Uniformity, share)
	}
	var b bytes.Buffer
	if err := page.Execute(&b, data); err != nil {
		return nil, fmt.Errorf("write the page: %w", err)
	}
	return b.Bytes(), nil
}

// scriptHash names a script in a policy (CSP 3, 2.3.1).
func scriptHash(script string) string {
	hash := sha256.Sum256([]byte(script))
	return "sha256-" + base64.StdEncoding.EncodeToString(hash[:])
}

func share(part float64) string { return strconv.FormatFloat(part, 'f', 2, 64) }

func printed(r planner.Rates, figure func(float64) string) *rates {
	return &rates{
		Planned: figure(r.Relay), Today: figure(r.NCCL), Off: figure(r.HostMemory),
		AlonePlanned: figure(r.Alone.Relay), AloneToday: figure(r.Alone.NCCL), AloneOff: figure(r.Alone.HostMemory),
	}
}

func (p *Picture) row(l *lane) row {
	r := row{
		Index: l.index, GPU: strconv.Itoa(l.start.gpu.Index), Address: plain(l.GPU), Role: l.Role, Kind: l.Kind,
		Pinned: l.Pinned,
		NICs:   plain(list(l.NICs)), Reason: plain(l.Reason),
	}
	switch l.Kind {
	case planner.KindStaged:
		r.Through = p.serverNames(l)
	case planner.KindBounce:
		r.Through = "host memory"
	}
	if l.Rail >= 0 {
		r.Rail = strconv.Itoa(l.Rail)
	}
	if l.Path != topo.DIS {
		r.Path = l.Path.String()
	}
	for _, leg := range []*topo.Path{l.Copy, l.Network} {
		if leg != nil {
			if r.Legs != "" {
				r.Legs += " + "
			}
			r.Legs += leg.Type.String()
		}
	}
	if l.estimate != nil {
		r.Rates = printed(l.estimate.Rates, figure)
		r.Rates.Limit = plain(l.estimate.Limit)
	}
	return r
}
