package topo

import (
	"errors"
	"testing"
)

func TestCheckTextNamesFieldWithControlCharacter(t *testing.T) {
	const bad = "a\x1b[2J"
	for _, c := range []struct {
		name, field string // the field is empty for a permitted host
		change      func(*Host)
	}{
		{"none", "", func(*Host) {}},
		{"the user's text", "", func(h *Host) { h.Source.File, h.Notes = bad, []string{bad} }},
		{"a NIC", "NICs[1].Name", func(h *Host) { h.NICs[1].Name = bad }},
		{"a list in a list", "GPUs[0].NVLinks[1].Peer", func(h *Host) { h.GPUs[0].NVLinks = []NVLink{{}, {Peer: bad}} }},
		{"an embedded struct", "GPUs[0].Place.Switch", func(h *Host) { h.GPUs[0].Switch = bad }},
		{"a pointer", "NICs[0].Own.Place.Switch", func(h *Host) { h.NICs[0].Own = &Function{Place: Place{Switch: bad}} }},
	} {
		h := &Host{GPUs: []GPU{{}}, NICs: []NIC{{}, {}}}
		c.change(h)
		err := h.CheckText()
		var text *TextError
		found := errors.As(err, &text)
		if c.field == "" && err != nil || c.field != "" && (!found || text.Field != c.field || text.Text != bad) {
			t.Errorf("%s: %v, want an error of %q", c.name, err, c.field)
		}
	}
}
