package verbs

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sirupsen/logrus"
)

// domains are those that take the place of a NIC's own for queue pairs that are connected
// anew: what was written by a key of before cannot be written by them.
type domains struct {
	// Under the Fabric's mu: NICs with such a domain, and how many indexes NICs have had and
	// which of these are free again.
	renewed map[*nic]bool
	indexes int
	free    []int
}

// life is whether a domain is there still.
type life struct {
	mu   sync.RWMutex // held for reading by who registers in it
	over bool
}

// errRetired is for who registers memory with NICs of before.
var errRetired = errors.New("the queue pairs have been replaced meanwhile")

func (l *life) use(f func() error) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.over {
		return errRetired
	}
	return f()
}

// useAll has f use the domains of all NICs.
func useAll(nics []*nic, f func() error) error {
	if len(nics) == 0 {
		return f()
	}
	return nics[0].life.use(func() error { return useAll(nics[1:], f) })
}

// newIndex is a NIC's.
func (f *Fabric) newIndex() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.free); n > 0 {
		i := f.free[n-1]
		f.free = f.free[:n-1]
		return i
	}
	f.indexes++
	return f.indexes - 1
}

// renew gives each NIC a new domain, and makes known there what all of some others know. One that
// cannot is left out, unless it is needed or the last. It blocks. Those that it gives end with
// retire.
//
// Whoever registers memory meanwhile does so with all of them, so that each NIC that is chosen
// in the end knows it: a GPU's memory cannot be registered on the loop.
func (f *Fabric) renew(nics, others, needed []*nic, registers *atomic.Pointer[[]*nic]) (renewed []*nic, err error) {
	var out []*nic
	var why []error
	cannot := func(n *nic, err error) {
		out, why = append(out, n), append(why, err)
	}
	defer func() {
		if err != nil {
			registers.Store(&others)
			out, renewed = append(out, renewed...), nil
		}
		f.retireNow(out)
	}()
	for _, n := range nics {
		now := *n
		now.life = &life{}
		if now.domain, err = n.context.NewDomain(); err != nil {
			cannot(&now, err)
			continue
		}
		now.index = f.newIndex()
		f.mu.Lock()
		f.renewed[&now] = true
		f.mu.Unlock()
		renewed = append(renewed, &now)
	}
	follow := func() error {
		renewed = slices.DeleteFunc(renewed, func(n *nic) bool {
			err := f.follow([]*nic{n}, others)
			if err != nil {
				cannot(n, err)
			}
			return err != nil
		})
		if len(renewed) == 0 || withAll(renewed, needed) != nil {
			return errors.Join(why...)
		}
		both := slices.Concat(others, renewed)
		registers.Store(&both)
		return nil
	}
	if err = follow(); err != nil {
		return renewed, err
	}
	if err = follow(); err != nil { // what has come meanwhile
		return renewed, err
	}
	for i, n := range out {
		logrus.WithError(why[i]).Warnf("RDMA is connected anew without %s", n.name)
	}
	return renewed, nil
}

// follow makes known to NICs all that others know. It blocks.
func (f *Fabric) follow(nics, others []*nic) error {
	for _, r := range f.registrations() {
		if !r.known(others) {
			continue
		}
		if err := r.fill(f, nics); err != nil && !errors.Is(err, errForgotten) {
			return err
		}
	}
	return nil
}

// registrations are all that there are, those that are being given back too.
func (f *Fabric) registrations() (list []*registration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.memories {
		list = append(list, r)
	}
	for r := range f.closing {
		list = append(list, r)
	}
	return list
}

// retire gives the domains of renewed NICs back, beside the loop. No queue pair may be in
// them.
func (f *Fabric) retire(nics []*nic) {
	f.building.Add(1)
	go func() {
		defer f.building.Done()
		f.retireNow(nics)
	}()
}

func (f *Fabric) retireNow(nics []*nic) {
	for _, n := range nics {
		f.mu.Lock()
		mine := f.renewed[n]
		f.mu.Unlock()
		if !mine {
			continue
		}
		n.life.mu.Lock()
		n.life.over = true
		n.life.mu.Unlock()
		all := f.registrations()
		for _, r := range all {
			r.drop(n.index)
		}
		logged(n.domain.Close())
		f.mu.Lock()
		delete(f.renewed, n)
		f.free = append(f.free, n.index)
		for _, r := range all {
			delete(r.asked, n.life)
		}
		f.mu.Unlock()
	}
}

// drop ends what one NIC knows of it.
func (r *registration) drop(index int) {
	r.making.Lock()
	defer r.making.Unlock()
	list := slices.Clone(*r.regions.Load())
	if index >= len(list) || list[index] == nil {
		return
	}
	region := list[index]
	list[index] = nil
	r.regions.Store(&list)
	logged(region.Close())
}
