package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/relay/launch"
)

// tableRDMA compares the transports of route staged on one host.
const tableRDMA = "rdma"

// rdma measures route staged over emulated NICs and then over software RDMA devices, which relays
// use as NICs of two hosts.
func (r *run) rdma() (err error) {
	defer func() {
		r.host.Software = false
		// Relays of the other tables are on no network, so that staged data passes the emulated NICs.
		if removed := os.Remove(r.host.Layout.ClusterKey()); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}()
	sizes, shortest := r.sizes(8, 64<<10, 1<<20, 16<<20), map[uint64]string{}
	for _, by := range []string{launch.TransportLoop, launch.TransportVerbs} {
		r.host.Software = by == launch.TransportVerbs
		if err := r.rdmaBy(by, sizes, shortest); err != nil {
			return fmt.Errorf("transport %s: %w", by, err)
		}
	}
	return nil
}

// rdmaBy measures one transport. times has the baselines of short messages by size: the first
// transport's.
func (r *run) rdmaBy(by string, sizes []uint64, times map[uint64]string) (err error) {
	s, err := r.stageWith(staged, r.lanes, 0, nil, func(*config.Config) {})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	lanes, err := r.host.TwoClients()
	if err != nil {
		return err
	}
	if r.host.Software && r.host.Config.Relay.SelfTest != launch.SelfTestOff {
		r.progress("testing GPUs and NICs")
		tested, err := r.host.Verify(r.ctx, lanes[:]...)
		if err != nil {
			return err
		}
		for _, t := range tested {
			r.progress("%v: %s %s", t.TripleName, t.Verdict, t.Reason)
		}
	}
	a, b, err := s.pair(slices.Max(sizes))
	if err != nil {
		return err
	}
	note := ""
	if r.host.Software {
		if note, err = r.softwareWay(a); err != nil {
			return err
		}
	}
	row := Row{Table: tableRDMA, What: "container A to container B", Route: staged, Transport: by, Note: note}
	for _, size := range sizes {
		name, comparable, err := r.rawOf(staged, size)
		if err != nil {
			return err
		}
		for _, depth := range r.depths(1, 16) {
			r.progress("route staged over %s, %s, %d in flight", by, sizeText(size), depth)
			found, err := r.stream(a, b, size, depth)
			if err != nil {
				return err
			}
			row := row
			row.Size, row.Depth, row.Times = size, depth, found.Times
			if size > 4<<10 {
				row.Value, row.Unit, row.Baseline = found.GBs, GBs, name
				if size >= 16<<20 && depth >= 16 && comparable && r.host.Software {
					row.Asked = least(0.95)
				}
				r.row(row)
				continue
			}
			if depth > 1 || found.Times == nil {
				continue
			}
			row.What += ", from post to completion"
			row.Value, row.Unit = found.Times.P50, microseconds
			if r.host.Software {
				row.Baseline, row.Asked = times[size], most(1)
			} else {
				times[size] = r.compareWith("loop, "+sizeText(size)+" from post to completion", row.Value, microseconds)
			}
			r.row(row)
		}
	}
	return nil
}

// softwareWay returns the RDMA connection of a client's relay in words. It fails if data does not go
// by queue pairs and GPU memory.
func (r *run) softwareWay(w *worker) (string, error) {
	c, err := r.sending(w)
	if err != nil {
		return "", err
	}
	if c.Transport != launch.TransportVerbs || !c.GDR {
		return "", fmt.Errorf("the connection goes by transport %s, %s", c.Transport, c.Registration)
	}
	info, err := control.Inspect(r.host.Layout, w.generation.ID)
	if err != nil {
		return "", err
	}
	if info.Report == nil || info.Report.Network == nil || len(info.Report.Network.Peers) == 0 {
		return "", fmt.Errorf("the relay reports no RDMA connection: %s", info.NoReport)
	}
	return info.Report.Network.Peers[0].Way, nil
}
