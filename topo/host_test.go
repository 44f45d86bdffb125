package topo

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPathTypesAreOrderedAndNamed(t *testing.T) {
	for a := LOC; a <= DIS; a++ {
		text, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		var back PathType
		if err := json.Unmarshal(text, &back); err != nil || back != a {
			t.Errorf("%v is written %s and read %v, %v", a, text, back, err)
		}
	}
	if got, err := ParsePathType("pxb"); err != nil || got != PXB {
		t.Errorf("%v, %v", got, err)
	}
	_, err := ParsePathType("NEAR")
	if e, ok := errors.AsType[*PathTypeError](err); !ok || e.Text != "NEAR" {
		t.Errorf("%v; want an error that lists the names", err)
	}
	if _, err := json.Marshal(DIS + 1); err == nil {
		t.Error("a path type without a name is written")
	}
	if !slices.IsSorted([]PathType{NVL, PIX, PXB, PHB, NODE, SYS, DIS}) {
		t.Error("a nearer path type is not smaller")
	}
}

func TestParseBusIDReturnsCanonicalForm(t *testing.T) {
	for text, want := range map[string]string{
		"0000:17:00.0": "0000:17:00.0", "17:00.0": "0000:17:00.0", "00000000:AB:1C.7": "0000:ab:1c.7",
		"10000:e1:00.0": "10000:e1:00.0", "1:0.0": "0000:01:00.0", "0001:00:00.0": "0001:00:00.0",
		"": "", "0": "", "0000:17:00": "", "0000:17:00.8": "", "0000:17:00.0/..": "", "GPU-1": "", "123456789:00:00.0": "",
	} {
		got, err := ParseBusID(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

func TestNamesAreOrderedByTheirNumbers(t *testing.T) {
	names := []string{"mlx5_10", "mlx5_2", "erdma_0", "mlx5_bond_0", "eth", "mlx5_02", "99999999999999999999", "mlx5_1"}
	slices.SortFunc(names, CompareNatural)
	want := []string{"99999999999999999999", "erdma_0", "eth", "mlx5_1", "mlx5_02", "mlx5_2", "mlx5_10", "mlx5_bond_0"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}
