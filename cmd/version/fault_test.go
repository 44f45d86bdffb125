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
	// A user reads the text in place of a stack trace.
	if !errors.As(err, &fault) || fault.what == nil ||
		err.Error() != "this is a bug in Peerlane "+Get().Version+": strings: negative Repeat count; please report it, with "+
			"the output of the same command with GOTRACEBACK=all in its environment" {
		t.Errorf("error of a panic: %v", err)
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
