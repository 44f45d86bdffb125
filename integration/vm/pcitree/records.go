package pcitree

import (
	"encoding/binary"
	"fmt"
)

// The module's input format: struct header and struct record of integration/vm/module/pcitree.c.
const (
	magic           = "pcitree1"
	versionSize     = 236
	driverSize      = 20
	informationSize = 992
	configSize      = 4096

	headerSize = len(magic) + 8 + 4 + versionSize
	recordSize = 4 + 4 + 4 + driverSize + informationSize + 2*configSize

	maxWindow = 64 << 40 // bytes
)

// driverVersion is the version of the NVIDIA driver whose files in /proc the module imitates.
const driverVersion = "580.95.05"

// models names GPUs by device, as the driver does.
var models = map[uint16]string{
	0x20b2: "NVIDIA A100-SXM4-80GB",
	0x2330: "NVIDIA H100 80GB HBM3",
	0x2335: "NVIDIA H200",
	0x26b9: "NVIDIA L40S",
}

// records returns the tree in the module's format, for a single write to /dev/pcitree.
func (t *Tree) records() []byte {
	b := make([]byte, 0, headerSize+len(t.functions)*recordSize)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint64(b, t.window)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(t.functions)))
	version := ""
	for _, f := range t.functions {
		if f.minor >= 0 {
			version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " + driverVersion + "  Release Build\n"
		}
	}
	b = appendText(b, version, versionSize)
	for _, f := range t.functions {
		b = binary.LittleEndian.AppendUint32(b, uint32(f.domain))
		b = binary.LittleEndian.AppendUint32(b, uint32(f.root.numa))
		b = append(b, byte(f.root.bus), byte(f.bus), byte(f.device<<3), 0)
		b = appendText(b, f.line.driver, driverSize)
		b = appendText(b, f.information(), informationSize)
		c := f.config()
		b = append(b, c.value[:]...)
		b = append(b, c.writable[:]...)
	}
	return b
}

// appendText appends text and zeros. The texts belong to this package and fit.
func appendText(b []byte, text string, size int) []byte {
	field := make([]byte, size)
	copy(field[:size-1], text)
	return append(b, field...)
}

// information returns the driver's /proc/driver/nvidia/gpus/ADDRESS/information of a GPU, or "" for
// a function without this driver.
func (f *function) information() string {
	if f.minor < 0 {
		return ""
	}
	model, ok := models[f.line.id.device]
	if !ok {
		model = fmt.Sprintf("NVIDIA Graphics Device %04x", f.line.id.device)
	}
	return fmt.Sprintf("Model: \t\t %s\n"+
		"IRQ:   \t\t %d\n"+
		"GPU UUID: \t %s\n"+
		"Video BIOS: \t 96.00.89.00.01\n"+
		"Bus Type: \t PCIe\n"+
		"DMA Size: \t 52 bits\n"+
		"DMA Mask: \t 0xfffffffffffff\n"+
		"Bus Location: \t %s\n"+
		"Device Minor: \t %d\n"+
		"GPU Firmware: \t %s\n"+
		"GPU Excluded:\t No\n", model, 200+f.minor, f.uuid, f.address, f.minor, driverVersion)
}

// bars returns the sizes of a function's BARs in bytes, powers of two. BARs are 64-bit and
// prefetchable, so that a bridge needs one window only.
func (f *function) bars() []uint64 {
	switch f.line.kind {
	case kindGPU:
		return []uint64{16 << 20, 128 << 30, 32 << 20}
	case kindNIC:
		return []uint64{32 << 20}
	case kindNVMe:
		return []uint64{16 << 10}
	}
	return nil
}

// config is a configuration space with a mask of writable bits.
type config struct {
	value, writable [configSize]byte
}

func (c *config) set16(at int, value, writable uint16) {
	binary.LittleEndian.PutUint16(c.value[at:], value)
	binary.LittleEndian.PutUint16(c.writable[at:], writable)
}

func (c *config) set32(at int, value, writable uint32) {
	binary.LittleEndian.PutUint32(c.value[at:], value)
	binary.LittleEndian.PutUint32(c.writable[at:], writable)
}

// Offsets of capabilities.
const (
	express      = 0x40
	acsExtension = 0x100 // the first extended capability
)

// config writes a function's configuration space (PCIe 7.5 and 7.7.11).
func (f *function) config() *config {
	c := &config{}
	id := f.line.id
	c.set16(0x00, id.vendor, 0)
	c.set16(0x02, id.device, 0)
	c.set16(0x04, 0x0006, 0x0547) // memory and bus master are on
	c.set16(0x06, 0x0010, 0)      // has capabilities
	c.set32(0x08, f.line.class<<8|f.revision(), 0)
	c.writable[0x0c] = 0xff
	c.value[0x34] = express
	c.writable[0x3c] = 0xff
	if f.portType == endpoint {
		f.endpointHeader(c)
	} else {
		f.bridgeHeader(c)
	}
	f.express(c)
	if f.acs != acsNone {
		// Source validation, translation blocking, request and completion
		// redirect, upstream forwarding, direct translated.
		const all, on = 0x5f, 0x1d
		c.set32(acsExtension, 0x0001_000d, 0)
		c.set16(acsExtension+4, all, 0)
		c.set16(acsExtension+6, 0, all)
		if f.acs == acsOn {
			c.set16(acsExtension+6, on, all)
		}
	}
	return c
}

func (f *function) revision() uint32 {
	if f.line.kind == kindGPU {
		return 0xa1
	}
	return 0
}

func (f *function) endpointHeader(c *config) {
	c.set16(0x2c, f.line.subsystem.vendor, 0)
	c.set16(0x2e, f.line.subsystem.device, 0)
	at := 0x10
	for _, size := range f.bars() {
		address := ^(size - 1) &^ 0xf
		c.set32(at, 0xc, uint32(address)) // 64 bits, prefetchable
		c.set32(at+4, 0, uint32(address>>32))
		at += 8
	}
	if f.line.kind == kindGPU && f.line.id.vendor == 0x10de {
		// The kernel enables the sound function of an NVIDIA GPU through this register, unless the
		// bit is set.
		c.set32(0x488, 1<<25, 0)
	}
}

func (f *function) bridgeHeader(c *config) {
	c.value[0x0e] = 1
	for i, bus := range []int{f.bus, f.secondary, f.subordinate} {
		c.value[0x18+i], c.writable[0x18+i] = byte(bus), 0xff
	}
	// The windows are closed: bases above limits. The I/O window stays closed; read-only zeros
	// would be a window at 0.
	c.set16(0x1c, 0x00f0, 0)
	c.set16(0x20, 0xfff0, 0xfff0)
	c.set16(0x22, 0x0000, 0xfff0)
	c.set16(0x24, 0xfff1, 0xfff0) // prefetchable, 64 bits
	c.set16(0x26, 0x0001, 0xfff0)
	c.set32(0x28, 0, 0xffffffff)
	c.set32(0x2c, 0, 0xffffffff)
	c.set16(0x3e, 0, 0x00ff) // bridge control
}

// express writes the PCI Express capability, version 2.
func (f *function) express(c *config) {
	c.value[express] = 0x10
	c.set16(express+0x02, 2|uint16(f.portType)<<4, 0)
	c.set32(express+0x04, 0x8001, 0)      // role-based errors, payloads of 256 bytes
	c.set16(express+0x08, 0x2810, 0x7fff) // as after a reset
	downwards := f.portType == rootPort || f.portType == downstreamPort
	capabilities := uint32(f.max.gen) | uint32(f.max.width)<<4 | uint32(f.port)<<24
	if downwards {
		capabilities |= 1 << 20 // tells whether the data link layer is active
	}
	c.set32(express+0x0c, capabilities, 0)
	c.set16(express+0x10, 0, 0x0fd3) // without "retrain", which reads as 0
	switch {
	case f.current == (link{}):
		c.set16(express+0x12, 1, 0)
	case downwards:
		c.set16(express+0x12, uint16(f.current.gen|f.current.width<<4|1<<13), 0)
	default:
		c.set16(express+0x12, uint16(f.current.gen|f.current.width<<4), 0)
	}
	c.set32(express+0x2c, (1<<f.max.gen-1)<<1, 0) // every speed up to the maximum
	c.set16(express+0x30, uint16(f.max.gen), 0x000f)
}
