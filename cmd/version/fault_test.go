package version

import (
	"errors"
	"strings"
	"testing"
)

func TestSentencePanicBecomesError(t *testing.T) {
	t.Setenv("GOTRACEBACK", "")
	err := Sentence(func() error {
		return errors.New(strings.Repeat("x", -len(t.Name())))
	})
	var fault fault
	if !errors.As(err, &fault) || !strings.Contains(err.Error(), "strings: negative Repeat count; please report it") ||
		strings.Contains(err.Error(), "\n") {
		t.Errorf("it is %v", err)
	}
	if err := Sentence(func() error { return errors.ErrUnsupported }); err != errors.ErrUnsupported {
		t.Errorf("an error became %v", err)
	}
}

func TestSentenceGotracebackKeepsTrace(t *testing.T) {
	t.Setenv("GOTRACEBACK", "all")
	defer func() {
		if recover() == nil {
			t.Error("the panic was caught")
		}
	}()
	err := Sentence(func() error { panic("seen") })
	t.Error(err)
}
