package verbs

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sirupsen/logrus"
)

// domains has the protection domains that replace the domain of a NIC after a reconnect: the new
// queue pairs cannot write with keys from before the reset.
type domains struct {
	// Under Fabric.mu: the NICs with such a domain, the number of indexes of NICs, and the free
	// indexes.
	renewed map[*nic]bool
	indexes int
	free    []int
}

// life is the lifetime of a protection domain.
type life struct {
	mu   sync.RWMutex // held for reading during a registration
	over bool
}

// errRetired is the error of a registration with NICs that a reconnect has replaced.
var errRetired = errors.New("a reconnect has replaced the NICs")

func (l *life) use(f func() error) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.over {
		return errRetired
	}
	return f()
}

// useAll calls f while the domains of every NIC exist.
func useAll(nics []*nic, f func() error) error {
	if len(nics) == 0 {
		return f()
	}
	return nics[0].life.use(func() error { return useAll(nics[1:], f) })
}

// newIndex returns an unused index for a NIC.
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

// renew gives each NIC a new domain and registers the memory there that others have registered.
// renew omits a NIC that fails, unless needed has the NIC or no other NIC remains. It blocks.
// retire releases the renewed NICs.
//
// During renew, goroutines register memory with both the old and the new NICs, so that every chosen
// NIC has the memory at the end: the loop cannot register memory of a GPU.
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
	if err = follow(); err != nil { // memory registered meanwhile
		return renewed, err
	}
	for i, n := range out {
		logrus.WithError(why[i]).Warnf("RDMA reconnects without %s", n.name)
	}
	return renewed, nil
}

// follow registers with nics the memory that others have registered. It blocks.
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

// registrations returns every registration, including registrations in release.
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

// retire releases the domains of renewed NICs on another goroutine. The domains must have no queue
// pair.
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

// drop releases the registration with one NIC.
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
