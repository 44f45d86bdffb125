package statemachine_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/internal/statemachine"
	"github.com/peerlane/peerlane/relay/internal/statemachine/statetest"
)

// door is a machine of two states: open and shut.
func door() *statemachine.Table[uint8, uint8, uint8] {
	return statemachine.New("door", statemachine.Names{
		States: []string{"open", "shut"}, Events: []string{"push", "pull"}, Actions: []string{"none", "creak"},
	}, statemachine.Cells[uint8, uint8, uint8]{0: {0: {Next: 1, Action: 1}}, 1: {0: {Next: 1}, 1: {Next: 0}}})
}

func TestApplyChangesStateByPossibleEventsOnly(t *testing.T) {
	table := door()
	var state uint8
	if action, possible := table.Apply(&state, 1); possible || action != 0 || state != 0 {
		t.Errorf("impossible event: action %d, possible %v, state %d", action, possible, state)
	}
	if action, possible := table.Apply(&state, 0); !possible || action != 1 || state != 1 {
		t.Errorf("possible event: action %d, possible %v, state %d", action, possible, state)
	}
}

func TestMustPanicsAtImpossibleEvent(t *testing.T) {
	defer func() {
		err, _ := recover().(error)
		var impossible *statemachine.ImpossibleError
		if !errors.As(err, &impossible) || *impossible != (statemachine.ImpossibleError{Machine: "door", State: "open",
			Event: "pull"}) {
			t.Errorf("panic with %v", err)
		}
	}()
	var state uint8
	door().Must(&state, 1)
}

func TestNewPanicsAtCellWithoutName(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	door().Set(0, 0, statemachine.Cell[uint8, uint8]{Next: 2}, true)
}

func expected(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "door.txt")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const doorCells = `
open: push: shut / creak
open: pull: impossible # the door opens to the other side
shut: push: shut
shut: pull: open
`

func TestDifferencesFindEachOtherCell(t *testing.T) {
	for change, want := range map[string]int{
		"":                   0,
		"open: pull: open":   1, // instead of the line that exists
		"ajar: push: open":   1, // an unknown state
		"shut: pull: open\n": 1, // a second line
	} {
		text := doorCells
		if change == "open: pull: open" {
			text = strings.Replace(text, "open: pull: impossible", change, 1)
		} else {
			text += change
		}
		found, err := statetest.Differences(statetest.Of(door()), expected(t, text))
		if err != nil || len(found) != want {
			t.Errorf("%q: %v, %v, want %d differences", change, found, err, want)
		}
	}
}

func TestMutateChangesEachCellAndRestoresTable(t *testing.T) {
	m, file := statetest.Of(door()), expected(t, doorCells)
	var mutants []string
	statetest.Mutate(m, func(name string) {
		if found, err := statetest.Differences(m, file); err != nil || len(found) != 1 {
			t.Errorf("%s: %v, %v", name, found, err)
		}
		mutants = append(mutants, name)
	})
	// Three possible cells have another next state, another action and no transition; one has none.
	if len(mutants) != 10 || !slices.Contains(mutants, "open: pull: open") {
		t.Errorf("%d mutants: %v", len(mutants), mutants)
	}
	if found, err := statetest.Differences(m, file); err != nil || len(found) > 0 {
		t.Errorf("after the mutants: %v, %v", found, err)
	}
}

func TestPageShowsTransitionsAndCells(t *testing.T) {
	page := statetest.Page(statetest.Of(door()))
	for _, line := range []string{
		"    s0 --> s1: push / creak\n", "    s1 --> s0: pull\n", "| push | shut / creak | shut |\n", "| pull |  | open |\n",
	} {
		if !strings.Contains(page, line) {
			t.Errorf("the page has no %q:\n%s", line, page)
		}
	}
	if strings.Contains(page, "s1 --> s1") {
		t.Error("the diagram has a transition without a change")
	}
}

func TestCopyOfTableLeavesTableUnchanged(t *testing.T) {
	table := door()
	statetest.Of(table).Put(0, 0, statetest.Cell{})
	if _, possible := table.Cell(0, 0); !possible {
		t.Error("a change of the copy has changed the table")
	}
	statetest.Live(table).Put(0, 0, statetest.Cell{})
	if _, possible := table.Cell(0, 0); possible {
		t.Error("a change of the live machine has not changed the table")
	}
}

func TestApplyAllocatesNothing(t *testing.T) {
	table := door()
	var state uint8
	if n := testing.AllocsPerRun(100, func() { state = 0; table.Apply(&state, 0) }); n != 0 {
		t.Errorf("an event allocates %v times", n)
	}
}

func BenchmarkApply(b *testing.B) {
	table := door()
	for b.Loop() {
		var state uint8
		table.Apply(&state, 0)
	}
}
