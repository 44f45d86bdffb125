package health

import (
	"errors"
	"slices"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
)

func TestFailureIsLoggedWhenItsTextChangesAndAgainAfterSuccess(t *testing.T) {
	log, hook := test.NewNullLogger()
	f := Failures{Log: log, Message: "Observing the host failed"}
	for _, err := range []error{errors.New("a"), errors.New("a"), errors.New("b"), errors.New("a"), nil, nil,
		errors.New("a"), errors.New("a")} {
		f.Note(err)
	}
	var got []string
	for _, e := range hook.AllEntries() {
		if e.Message != f.Message || e.Level != logrus.WarnLevel {
			t.Errorf("%s: %s", e.Level, e.Message)
		}
		got = append(got, e.Data[logrus.ErrorKey].(error).Error())
	}
	if !slices.Equal(got, []string{"a", "b", "a", "a"}) {
		t.Errorf("the log has %v", got)
	}
}
