package pci

import (
	"strings"

	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
)

// Classes and vendors of PCI that a file can show (PCI Code and ID Assignment
// Specification; the PCI ID repository).
const (
	VendorAMD      = "0x1002"
	VendorHygon    = "0x1d94"
	VendorAmazon   = "0x1d0f"
	VendorAlibaba  = "0x1ded"
	VendorVirtio   = "0x1af4"
	VendorBroadcom = "0x1000"
	ClassDisplay   = "0x03"
	ClassNetwork   = "0x02"
	ClassNVSwitch  = "0x0680"
	ClassNVLinkCPU = "0x068001" // IBM's NVLink bridge
)

// Graphics reports whether a function can be a GPU. An AMD GPU without a display is a
// processing accelerator, and some Hygon GPUs are co-processors.
func Graphics(class, vendor string) bool {
	switch {
	case strings.HasPrefix(class, ClassDisplay):
		return true
	case strings.HasPrefix(class, "0x12"):
		return vendor == "" || vendor == VendorAMD || vendor == VendorHygon
	case strings.HasPrefix(class, "0x0b40"):
		return vendor == VendorHygon
	}
	return false
}

// MakerOf is GPU.Vendor of a PCI vendor.
func MakerOf(vendor string) string {
	switch vendor {
	case "", VendorNVIDIA:
		return ""
	case VendorAMD:
		return "AMD"
	case VendorHygon:
		return "Hygon"
	}
	return vendor
}

// PCI identities (class: PCI Code and ID Assignment Specification, 1.4).
const (
	VendorNVIDIA = "0x10de"
	ClassVGA     = "0x0300"
	Class3D      = "0x0302"
)

// PCI identities of NVIDIA's network devices whose vital product data matters.
const (
	VendorMellanox     = "0x15b3"
	DeviceConnectX7    = "0x1021"
	DeviceConnectX8    = "0x1023"
	DeviceBlueField3   = "0xa2dc"
	DeviceDataDirect   = "0x2100" // the DMA function of a ConnectX-8
	ManagementProperty = "SW_MNG"
)

// BondName matches the name that mlx5_ib gives to the RDMA device of a RoCE LAG.
var BondName = lazyregexp.New(`_bond_[0-9]+$`)
