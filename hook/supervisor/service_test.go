package supervisor

import (
	"encoding/json"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/handover"
)

// FuzzHandover checks that a message is accepted or refused, and that no part is used as a path or
// number before it is checked.
func FuzzHandover(f *testing.F) {
	for _, text := range []string{
		`{"version":1,"root":"/","generation":"00112233445566778899aabbccddeeff"}`,
		`{"version":1,"root":"/tmp/x","generation":"../../etc"}`,
		`{"version":1e0,"root":"\u0000","generation":null}`,
		`{"VERSION":1,"version":2}`, `{}{}`, `[]`, `null`, ``, `{"version":99999999999999999999}`, "{\"root\":\"\xff\"}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var h handover.Message
		if err := handover.ParseMessage(text, &h); err != nil {
			return
		}
		again, err := json.Marshal(h)
		if err != nil {
			t.Fatalf("%+v was read, and cannot be written: %v", h, err)
		}
		var same handover.Message
		if err := handover.ParseMessage(again, &same); err != nil || same != h {
			t.Errorf("%+v is %+v after another reading, %v", h, same, err)
		}
		// A message without descriptors is never accepted.
		if g, err := checkHandover(h, paths.New(h.Root), nil); err == nil {
			t.Errorf("%+v is generation %+v", h, g)
		}
	})
}
