package hook

import (
	"os"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/sandbox"
)

// HoldersOf is Holders for nodes of other names.
var HoldersOf = holders

// ContainerOfCgroup is what tells of containers that have no relay.
var ContainerOfCgroup = containerOfCgroup

// Uverbs is where the character devices of RDMA are.
var Uverbs = &uverbs

// VerbsNodes are those of an RDMA device.
var VerbsNodes = verbsNodes

// SweepUIDs is what Collect does for uids.
var SweepUIDs = sweepUIDs

// ClaimUID makes an empty generation and claims a uid for it.
func ClaimUID(l paths.Layout, c config.Relay) (int, error) {
	s, err := newSandbox(c)
	if err != nil {
		return 0, err
	}
	g := &Generation{ID: newID(), Sandbox: s}
	host, err := lockHost(l)
	if err != nil {
		return 0, err
	}
	defer host.Close()
	if err := os.Mkdir(l.GenerationDir(g.ID), 0o700); err != nil {
		return 0, err
	}
	if err := makeSupervisorLock(l, g.ID); err != nil {
		return 0, err
	}
	err = g.claimUID(l, c)
	return g.Sandbox.UID, err
}

// LeaveCgroup moves this process out of the group of a generation, in a hierarchy
// that is mounted at root.
func LeaveCgroup(root, family, id string) error { return cgroup{root, family, id}.leave() }

// RemoveCgroup removes that.
func RemoveCgroup(root, family, id string) error { return cgroup{root, family, id}.remove() }

// Sysfs is where a Tester reads NICs and PCIe ports.
var Sysfs = &sysfs

// TestUntilUp tests triples, and again those whose port comes up.
var TestUntilUp = testUntilUp

// ModuleVersion is where the driver's version is.
var ModuleVersion = &moduleVersion

// WaitOr waits for a process that a driver may hold.
var WaitOr = waitOr

// Readable is what a relay's environment has its sandbox let it read.
func Readable(environment ...string) []string {
	var s sandbox.Spec
	Sandbox{}.files(&s, environment)
	return s.Read
}

// KillByPidfd kills a process.
var KillByPidfd = &killByPidfd

// RandomUID is a uid that a relay may get of a range.
func RandomUID(l paths.Layout, id string, first, last int) (int, error) {
	return linkUID(l, id, first, last)
}

// MakeSupervisorLock makes the directory of a generation, with the file that a uid's mark is.
func MakeSupervisorLock(l paths.Layout, id string) error {
	if err := os.Mkdir(l.GenerationDir(id), 0o700); err != nil {
		return err
	}
	return makeSupervisorLock(l, id)
}
