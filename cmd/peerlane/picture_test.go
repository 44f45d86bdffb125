package main

import (
	"os"
	"strings"
	"testing"
)

func TestPicturesHaveRequestedForm(t *testing.T) {
	_, host := recordedHost(t)
	for _, test := range []struct {
		command, form string
		begins        string
		lanes         bool
	}{
		{"plan", formSVG, "<?xml", true},
		{"plan", formHTML, "<!DOCTYPE html>", true},
		{"topo", formSVG, "<?xml", false},
		{"topo", formHTML, "<!DOCTYPE html>", false},
	} {
		out := peerlane(t, append([]string{test.command, "-o", test.form}, host...)...)
		if !strings.HasPrefix(out, test.begins) {
			t.Errorf("peerlane %s -o %s begins with %.20q", test.command, test.form, out)
		}
		for _, want := range []string{"GPU 7", "mlx5_1", "PCIe 5.0 x16", "48 GB/s", "22 GB/s between nodes"} {
			if !strings.Contains(out, want) {
				t.Errorf("peerlane %s -o %s lacks %q", test.command, test.form, want)
			}
		}
		if strings.Contains(out, `data-lane="7"`) != test.lanes {
			t.Errorf("peerlane %s -o %s: lanes are drawn: %v", test.command, test.form, !test.lanes)
		}
		if test.lanes && test.form == formHTML && !strings.Contains(out, "staged on GPUs 4 and 5, near that NIC") {
			t.Errorf("peerlane plan -o html lacks the reasons")
		}
	}
}

// The README states the command of the picture.
func TestPictureOfReadmeIsCurrent(t *testing.T) {
	const command = "peerlane plan --input docs/hgx-4-nics.xml -o svg > docs/picture.svg"
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{command, "](docs/picture.svg)"} {
		if !strings.Contains(string(readme), want) {
			t.Errorf("the README lacks %q", want)
		}
	}
	picture := peerlane(t, "plan", "--root", t.TempDir(), "--input", "../../docs/hgx-4-nics.xml", "-o", "svg")
	golden(t, "../../../docs/picture.svg", picture)
	if len(picture) > 150<<10 {
		t.Errorf("%d bytes; the README must load fast", len(picture))
	}
}
