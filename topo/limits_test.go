package topo

import (
	"testing"
)

func TestCheckOfNumbersLimitsAreInclusive(t *testing.T) {
	for numa, want := range map[int]bool{-2: false, -1: true, 0: true, 65535: true, 65536: false} {
		if err := CheckNUMA(numa); (err == nil) != want {
			t.Errorf("NUMA node %d: %v", numa, err)
		}
	}
	for index, want := range map[int]bool{-1: false, 0: true, 4095: true, 4096: false} {
		if err := CheckIndex(index); (err == nil) != want {
			t.Errorf("GPU index %d: %v", index, err)
		}
	}
}

func TestNumberJoinsSixteenBitsOfEachField(t *testing.T) {
	d := PCIIdentity{Vendor: "0x10de", Device: "2330", SubsystemVendor: "", SubsystemDevice: "0xffff"}
	if got := d.Number(); got != 0x10de23300000ffff {
		t.Errorf("%#x", got)
	}
	d.Device = "0x12345"
	if got := d.Number(); got != 0x10deffff0000ffff {
		t.Errorf("a field of 20 bits: %#x", got)
	}
}
