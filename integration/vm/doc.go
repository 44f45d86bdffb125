// Package vm builds and runs virtual machines for tests: a stock Debian kernel under QEMU's
// emulation, with an agent that executes the host's requests. It never uses KVM, because an
// existing /dev/kvm may not work.
//
//	Image    kernel, modules and root file system, made once and kept in the
//	         user's cache directory under a name for what went into them
//	Machine  a guest that runs, alone or joined to another by a network
//
// Command run is the command line; docs/contributing.md documents it.
package vm
