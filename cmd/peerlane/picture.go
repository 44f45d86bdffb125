//go:build !front

package main

import (
	"errors"
	"fmt"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/picture"
	"github.com/peerlane/peerlane/topo/planner"
)

// printPicture draws a host and, unless p is nil, the lanes of the plan.
func (a *app) printPicture(form string, h *topo.Host, p *planner.Plan) error {
	var e *planner.Estimate
	switch {
	case p != nil && len(p.Lanes) == 0:
		return fmt.Errorf("%s: no GPU found, so no lane to draw; draw the host with peerlane topo -o %s", origin(h.Source),
			form)
	case p == nil && len(h.GPUs)+len(h.NICs) == 0:
		return fmt.Errorf("%s: no GPU and no NIC found; peerlane topo shows the cause", origin(h.Source))
	case p != nil:
		var err error
		if e, err = p.Estimate(h); err != nil && !errors.Is(err, planner.ErrNoBandwidths) {
			return fmt.Errorf("%s: %w", origin(h.Source), err)
		}
	}
	if p != nil {
		used := map[string]bool{}
		for _, l := range p.Lanes {
			for _, nic := range l.NICs {
				used[nic] = true
			}
		}
		h, _ = h.FoldFunctions(used)
	}
	pic := picture.New(h, p, e)
	text := pic.SVG()
	if form == formHTML {
		var err error
		if text, err = pic.HTML(); err != nil {
			return err
		}
	}
	_, _ = a.out.Document().Write(text) // a.out keeps the error
	return nil
}
