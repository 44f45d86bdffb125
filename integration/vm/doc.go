// Package vm makes and runs virtual machines for tests: a stock Debian kernel
// under QEMU's emulation, with an agent that runs what the host asks for. It
// never uses KVM: where /dev/kvm exists it need not work.
//
//	Image    kernel, modules and root file system, made once and kept in the
//	         user's cache directory under a name for what went into them
//	Machine  a guest that runs, alone or joined to another by a network
//
// Command run is the way to it from a shell, and docs/contributing.md tells how.
package vm
