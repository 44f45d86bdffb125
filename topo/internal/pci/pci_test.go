package pci

import "testing"

func TestGraphicsFollowsClassAndVendor(t *testing.T) {
	for _, c := range []struct {
		name, class, vendor string
		want                bool
	}{
		{"VGA", ClassVGA, VendorNVIDIA, true},
		{"3D", Class3D, "", true},
		{"accelerator of AMD", "0x120000", VendorAMD, true},
		{"accelerator of Hygon", "0x120000", VendorHygon, true},
		{"accelerator of an unknown vendor", "0x120000", "", true},
		{"accelerator of another vendor", "0x120000", VendorAmazon, false},
		{"co-processor of Hygon", "0x0b4000", VendorHygon, true},
		{"co-processor of another vendor", "0x0b4000", VendorAMD, false},
		{"network device", "0x020000", VendorMellanox, false},
		{"no class", "", "", false},
	} {
		if got := Graphics(c.class, c.vendor); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}

func TestMakerOfVendorIsEmptyForNVIDIA(t *testing.T) {
	for vendor, want := range map[string]string{"": "", VendorNVIDIA: "", VendorAMD: "AMD", VendorHygon: "Hygon",
		VendorAmazon: VendorAmazon} {
		if got := MakerOf(vendor); got != want {
			t.Errorf("%q: %q, want %q", vendor, got, want)
		}
	}
}
