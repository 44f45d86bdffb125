// Package pci has the PCI identities and classes of GPUs, NICs and switches.
package pci
