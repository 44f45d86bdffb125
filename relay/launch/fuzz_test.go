package launch

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// A relay refuses a message or can work with it: no name leads out of the configured directories.
func FuzzMessage(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		var c Config
		if json.Unmarshal(text, &c) != nil || c.Check() != nil {
			return
		}
		again, err := json.Marshal(c)
		if err != nil {
			t.Fatalf("%+v was read, and cannot be written: %v", c, err)
		}
		var same Config
		if err := json.Unmarshal(again, &same); err != nil || !reflect.DeepEqual(same, c) {
			t.Errorf("%+v is %+v after another reading, %v", c, same, err)
		}
		if strings.Trim(c.Generation, "0123456789abcdef") != "" || len(c.Generation) != 32 {
			t.Errorf("generation %q", c.Generation)
		}
		for _, l := range c.Lanes {
			for _, nic := range l.NICs {
				if dir, name := filepath.Split(filepath.Join("/nics", nic)); dir != "/nics/" || name != nic {
					t.Errorf("NIC %q is %q in %s", nic, name, dir)
				}
			}
		}
		if c.Slots < 1 || c.Slots > 1024 || c.SlotBytes == 0 || c.SlotBytes > 1<<30 {
			t.Errorf("%d slots of %d bytes", c.Slots, c.SlotBytes)
		}
	})
}

// From any output of a self-test the reader accepts only requested pairs, once per pair, and
// accepted pairs can be stored and read again.
func FuzzPairs(f *testing.F) {
	head := line(PairHost{Driver: 13000})
	for _, seed := range []string{
		head + line(good(testPairs[0])) + line(good(testPairs[1])),
		head + line(Pair{PairName: testPairs[1], Verdict: VerdictWrong, Reason: "x"}),
		head + line(good(testPairs[0])) + line(good(testPairs[0])), "{}\n{}", "\n\n", head + `{"gpu":null}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		record := PairRecord{Version: PairVersion, Pairs: []Pair{}}
		_ = ReadPairs(bytes.NewReader(text), testPairs, func(h PairHost, p Pair) {
			record.PairHost, record.Pairs = h, append(record.Pairs, p)
		})
		if len(record.Pairs) > len(testPairs) {
			t.Fatalf("%d pairs of %d", len(record.Pairs), len(testPairs))
		}
		again, err := ReadPairRecord([]byte(line(record)))
		if err != nil || !reflect.DeepEqual(again, record) {
			t.Errorf("%+v is %+v after another reading, %v", record, again, err)
		}
	})
}

// A record that is read is one that this release writes.
func FuzzPairRecord(f *testing.F) {
	whole := line(PairRecord{Version: PairVersion, Boot: "b", Module: "580.95", Pairs: []Pair{good(testPairs[0])}})
	for _, seed := range []string{whole, whole[:40], `{"version":1}`, "null", whole + "x"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := ReadPairRecord(text)
		if err != nil {
			return
		}
		again, err := ReadPairRecord([]byte(line(r)))
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Errorf("%+v is %+v after another reading, %v", r, again, err)
		}
	})
}
