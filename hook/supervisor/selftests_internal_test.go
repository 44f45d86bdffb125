package supervisor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
)

// A configuration without room for all triples contains the results of good ones, and the log has
// the number of the others.
func TestConfigurationBeyondADatagramKeepsGoodTriples(t *testing.T) {
	gpu := func(i int) launch.GPU {
		return launch.GPU{Index: i, BusID: fmt.Sprintf("0000:%02x:00.0", i), UUID: fmt.Sprintf("GPU-%032x", i)}
	}
	var nics []string
	for i := range 100 {
		nics = append(nics, fmt.Sprintf("mlx5_%d", i))
	}
	config := launch.Config{SelfTest: launch.SelfTestOnce}
	for i := range 8 {
		config.Lanes = append(config.Lanes, launch.Lane{GPU: gpu(i), Relay: true, Servers: []launch.GPU{gpu(100)},
			NICs: nics})
	}
	log := logrus.New()
	var logged bytes.Buffer
	log.SetOutput(&logged)
	s := &supervisor{generation: &generation.Generation{Config: config}, log: logrus.NewEntry(log)}
	good := 0
	for i, n := range launch.StagingTriples(config.Lanes) {
		r := launch.Triple{TripleName: n, Verdict: launch.VerdictWrong, Reason: strings.Repeat("x", 200),
			Setting: strings.Repeat("y", 200)}
		if i%8 == 7 {
			r.Verdict, r.Reason = launch.VerdictGood, ""
			good++
		}
		s.triples.known = append(s.triples.known, r)
	}
	for range 2 {
		c := s.knowing(config)
		text, err := json.Marshal(c)
		if err != nil || len(text) > launch.MaxDatagram {
			t.Fatalf("%d bytes, %v", len(text), err)
		}
		found := 0
		for _, r := range c.Triples {
			if r.Verdict == launch.VerdictGood {
				found++
			}
			if r.Setting != "" {
				t.Fatalf("the configuration has the setting of %v", r.TripleName)
			}
		}
		if found != good || len(c.Triples) <= good {
			t.Errorf("the configuration has %d good triples of %d, and %d in all", found, good, len(c.Triples))
		}
		want := fmt.Sprintf("no room for %d of %d results", len(s.triples.known)-len(c.Triples), len(s.triples.known))
		if strings.Count(logged.String(), want) != 1 {
			t.Errorf("the log is %q, want %q once", logged.String(), want)
		}
	}
}
