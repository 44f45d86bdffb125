package bandwidths

import "testing"

func TestPCIeBandwidthFollowsSpeedAndWidth(t *testing.T) {
	for _, tt := range []struct {
		speed string
		width int
		want  float64 // GB/s, NCCL's
	}{
		{"2.5 GT/s PCIe", 1, 0.1875}, {"5.0 GT/s PCIe", 4, 1.5}, {"5 GT/s", 16, 6}, {"8.0 GT/s PCIe", 16, 12},
		{"16 GT/s", 8, 12}, {"32.0 GT/s PCIe", 16, 48}, {"64.0 GT/s PCIe", 16, 96},
		{"16.0 GT/s", 16, 12}, {"", 0, 12}, {"Unknown", 255, 191.25}, {"NaN GT/s", -1, 12}, {"-8 GT/s", 8, 6},
		{"1e9 GT/s", 16, 12},
	} {
		if got := PCIe(tt.speed, tt.width); got != tt.want {
			t.Errorf("%q, %d lanes: %g GB/s, want %g", tt.speed, tt.width, got, tt.want)
		}
	}
}

func TestSocketBandwidthFollowsProcessor(t *testing.T) {
	for _, tt := range []struct {
		arch, vendor  string
		family, model int
		want          float64 // GB/s, NCCL's
	}{
		{"x86_64", "GenuineIntel", 6, 0x4f, 6}, {"x86_64", "GenuineIntel", 6, 85, 10}, {"x86_64", "GenuineIntel", 6, 143, 22},
		{"x86_64", "GenuineIntel", 6, 207, 40}, {"x86_64", "AuthenticAMD", 25, 1, 16}, {"ppc64", "", 0, 0, 32},
		{"arm64", "", 0, 0, 6}, {"", "", 0, 0, Local}, {"x86_64", "HygonGenuine", 24, 0, Local},
		{"x86_64", "CentaurHauls", 7, 0x5b, 9}, {"x86_64", "  Shanghai  ", 7, 0x3b, 6},
		{"x86_64", "CentaurHauls", 6, 0x5b, 6}, {"x86_64", "GenuineIntel", 15, 0xcf, 6},
		{"x86_64", "GenuineIntel", 15, 0x8f, 6}, {"x86_64", "GenuineIntel", 15, 0x55, 6},
	} {
		if got := Socket(tt.arch, tt.vendor, tt.family, tt.model); got != tt.want {
			t.Errorf("%+v: %g GB/s", tt, got)
		}
	}
}

func TestXGMIBandwidthFollowsTheArchitecture(t *testing.T) {
	for gcn, want := range map[string]float64{"906": 24, "908": 24, "gfx90a": 36, "910": 36, "gfx942": 48, "942": 48,
		"950": 48, "": 24} {
		if got := XGMI(gcn); got != want {
			t.Errorf("%q: %g GB/s, want %g", gcn, got, want)
		}
	}
}

func TestLinkSpeedReadsKernelText(t *testing.T) {
	for text, want := range map[string]float64{
		"16.0 GT/s PCIe": 16, "2.5 GT/s PCIe": 2.5, "64": 64, "1024 GT/s": 1024, "0.5 GT/s": 0.5,
		"": 0, "Unknown": 0, "0 GT/s": 0, "-1 GT/s": 0, "1025 GT/s": 0, "NaN GT/s": 0, "1e999 GT/s": 0,
	} {
		if got := LinkSpeed(text); got != want {
			t.Errorf("%q: %g, want %g", text, got, want)
		}
	}
}

func TestNVLinkBandwidthFollowsCapability(t *testing.T) {
	for capability, want := range map[int]float64{
		52: 20, 60: 18, 62: 18, 69: 18, 70: 20, 80: 20, 85: 20, 86: 12, 87: 20, 89: 20, 90: 20.6, 99: 20.6,
		100: 40.1, 120: 40.1,
	} {
		if got := NVLink(capability); got != want {
			t.Errorf("capability %d: %g GB/s, want %g", capability, got, want)
		}
	}
}
