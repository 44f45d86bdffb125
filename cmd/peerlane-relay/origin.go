package main

import (
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
)

// origin adds two fields to every line of the log: the generation, which the entries of the hook,
// the supervisor and the relay for one run of a container share, and the container, by the
// runtime's name.
type origin struct{ generation, container string }

var signed sync.Once

// sign adds the origin to log lines from the first configuration on: the generation and the
// container do not change.
func sign(c launch.Config) {
	signed.Do(func() { logrus.AddHook(&origin{c.Generation, c.Container}) })
}

// Levels returns every level.
func (*origin) Levels() []logrus.Level { return logrus.AllLevels }

// Fire adds the fields that the line lacks.
func (o *origin) Fire(e *logrus.Entry) error {
	if e.Data == nil {
		e.Data = logrus.Fields{}
	}
	for name, value := range map[string]string{"generation": o.generation, "container": o.container} {
		if _, has := e.Data[name]; !has && value != "" {
			e.Data[name] = value
		}
	}
	return nil
}
