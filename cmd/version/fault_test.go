package version

import (
	"errors"
	"strings"
	"testing"
)

func TestAPanicBecomesASentence(t *testing.T) {
	t.Setenv("GOTRACEBACK", "")
	err := Sentence(func() error {
		var nothing map[string]int
		nothing["a"] = 1
		return nil
	})
	var fault Fault
	if !errors.As(err, &fault) || !strings.Contains(err.Error(), "assignment to entry in nil map; please report it") || strings.Contains(err.Error(), "\n") {
		t.Errorf("it is %v", err)
	}
	if err := Sentence(func() error { return errors.ErrUnsupported }); err != errors.ErrUnsupported {
		t.Errorf("an error became %v", err)
	}
}

func TestATraceIsThereForWhoAsks(t *testing.T) {
	t.Setenv("GOTRACEBACK", "all")
	defer func() {
		if recover() == nil {
			t.Error("the panic was caught")
		}
	}()
	err := Sentence(func() error { panic("seen") })
	t.Error(err)
}
