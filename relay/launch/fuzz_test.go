package launch

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// What a relay is told is one thing or the other, and what it does not refuse it
// can work with: no name in it leads out of the directories that it is told.
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
