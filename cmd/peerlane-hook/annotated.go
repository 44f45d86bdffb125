package main

import (
	"flag"
	"os"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/hook"
)

// createAnnotated is create for engines that select hooks by annotation.
func createAnnotated(args []string) error {
	l, err := parse(flag.NewFlagSet("create-annotated", flag.ContinueOnError), args)
	if err != nil {
		return err
	}
	ahead := hook.ReadAhead(l)
	state, err := hook.ReadState(os.Stdin)
	if err != nil {
		return err
	}
	warning, err := hook.CreateAnnotated(ahead, state, runtimeRoot())
	if warning != nil {
		logrus.Warn(warning)
	}
	return err
}
