package testbed

import (
	"bytes"
	"os"
	"testing"
)

func TestHalfPopulatedHostIsThatOfTheReadme(t *testing.T) {
	want, err := os.ReadFile("../../../docs/hgx-4-nics.xml")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(halfPopulated, want) {
		t.Error("half.xml is not docs/hgx-4-nics.xml; copy it")
	}
}
