package main

import (
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
)

// origin adds two fields to every log line: the generation, which hook, supervisor and relay share
// for one run of a container, and the runtime's name of the container.
type origin struct{ generation, container string }

var signed sync.Once

// sign adds the origin to log lines. Only the first configuration counts: the generation and the
// container do not change.
func sign(c launch.Config) {
	signed.Do(func() { logrus.AddHook(&origin{c.Generation, c.Container}) })
}

// Levels returns all levels.
func (*origin) Levels() []logrus.Level { return logrus.AllLevels }

// Fire adds the fields that the entry lacks.
func (o *origin) Fire(e *logrus.Entry) error {
	if e.Data == nil {
		e.Data = logrus.Fields{}
	}
	for name, value := range map[string]string{"generation": o.generation, "container": o.container} {
		if _, ok := e.Data[name]; !ok && value != "" {
			e.Data[name] = value
		}
	}
	return nil
}
