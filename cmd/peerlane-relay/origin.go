package main

import (
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
)

// origin adds to each line of the log whose relay has written it: the generation, by
// which the hook's entries in the host's log, the supervisor's lines and the relay's are
// those of one life of one container; and the container, as the runtime calls it.
type origin struct{ generation, container string }

var signed sync.Once

// sign has lines say so from the first configuration on: what it names does not change.
func sign(c launch.Config) {
	signed.Do(func() { logrus.AddHook(&origin{c.Generation, c.Container}) })
}

// Levels are all.
func (*origin) Levels() []logrus.Level { return logrus.AllLevels }

// Fire adds what the line does not have itself.
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
